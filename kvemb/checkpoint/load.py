"""Loading a checkpoint into a cluster, seen from the client: verifies it, has every shard check it, decides, and watches.

Before the decision nothing has changed, except that missing tables may have been created, empty. Every storage node holds a copy of the
decision. Once one node holds it, it is made: every shard carries it out, at once or when it is started the next time. Until all have, pulls
see old and new rows side by side. Shards report their progress on the nodes, too, so that a load can be watched while they do not serve.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import msgpack

from kvemb.checkpoint.chain import Chain, open_chain
from kvemb.checkpoint.checkpoint_messages import LOAD_CHECKPOINT, LoadRequest
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest
from kvemb.checkpoint.verify import verify_chain
from kvemb.client.all_shards import AllShards
from kvemb.coordination.replicated_values import DamagedCopyError, intact_copies
from kvemb.errors import CheckpointError, InvalidInputError, KvembError, ParameterServerError, ProtocolError, StorageError
from kvemb.net.deadline import Deadline, checked_timeout
from kvemb.protocol.messages import CREATE_TABLE, DESCRIBE, CreateTableRequest, DescribeReply, Empty
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

META_NAME = "kvemb:load"
log = logging.getLogger("kvemb")


@dataclass(frozen=True)
class Decision:
    """The decision to load one checkpoint into the whole cluster; from here on every shard will."""

    serial: int  # rises with every decision
    load_id: str  # 32 hex digits
    url: str  # of the checkpoint
    save_id: str  # of the checkpoint: another one that lies there later is not loaded
    # names of those to be loaded, while all others stay as they are; none: all, and no other table keeps its rows
    tables: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the bytes that nodes hold."""
        fields = astuple(self)
        packed: bytes = msgpack.packb(["kvemb-load", 2, *fields] if self.tables else ["kvemb-load", 1, *fields[:-1]])
        return packed


@dataclass(frozen=True)
class Report:
    """The progress of one shard: state "reading", "writing" or "done", or "failed" with the error."""

    load_id: str
    state: str
    error: str
    rows_done: int
    rows: int
    beat: int

    def encode(self) -> bytes:
        """Return the bytes that nodes hold."""
        packed: bytes = msgpack.packb(["kvemb-load-report", 1, *astuple(self)])
        return packed


def decode_decision(data: bytes) -> Decision:
    """Read one copy. Raises as `newest_decision`."""
    fields: list[Any] = _read(data, "kvemb-load", {1: [int, str, str, str], 2: [int, str, str, str, list]})
    serial, load_id, url, save_id, *names = fields
    return Decision(serial, load_id, url, save_id, tuple(map(str, names[0])) if names else ())


def newest_decision(copies: Iterable[bytes | None], where: Sequence[str] = ()) -> Decision | None:
    """Return the newest of the nodes' copies, or None."""
    found = intact_copies(copies, decode_decision, META_NAME, where)
    return max(found, key=lambda decision: decision.serial, default=None)


def newest_report(copies: Iterable[bytes | None]) -> Report | None:
    """Return the newest of the nodes' copies of a shard's report, or None; damaged copies are passed over."""
    try:
        found = intact_copies(copies, lambda data: Report(*_read(data, "kvemb-load-report", _REPORT)), "of a load's report")
    except DamagedCopyError:
        return None
    return max(found, key=lambda report: report.beat, default=None)


def report_name(shard: int) -> str:
    """Return the name that a shard's report stands under."""
    return f"kvemb:load:{shard}"


_DROP_FIRST = (
    "To load it all the same, drop the table first (`kvemb drop NAME --yes`): the load makes it as it was. "
    "Or load the others alone (--table)."
)
_REPORT = {1: [str, str, str, int, int, int]}


def _read(data: bytes, magic: str, kinds: Mapping[int, Sequence[type]]) -> list[Any]:
    """Read the fields of a value; `kinds` has those of each format."""
    try:
        items = msgpack.unpackb(data, max_array_len=1 << 12, max_map_len=0, max_ext_len=0)
        if not isinstance(items, list) or items[:1] != [magic]:
            raise ValueError("no list of ours")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DamagedCopyError(f"expected {magic}, got {data[:40]!r}") from error
    try:
        if [type(item) for item in items[2:]] != kinds[items[1]]:
            raise ValueError("other fields")
        return list(items[2:])
    except (IndexError, KeyError, ValueError, TypeError) as error:
        raise ProtocolError(
            f"the value under {META_NAME} is not of this release ({error}): start the shards with the release that began this load, until "
            "it is done (docs/upgrade.md)"
        ) from error


_POLL_S, _LONGEST_POLL_S, _POLL_SHARE, _CALL_S, _GIVE_UP_S = 0.02, 0.25, 0.05, 60.0, 2.0

LoadProgress = Callable[[str, int, int], None]
"""Called now and then with (name of the phase, amount done, amount in all): "verifying" in bytes, "loading" in rows."""


@dataclass(frozen=True)
class LoadResult:
    """The result of a finished load: the URL, the checkpoint's manifest, the number of rows, and how long it took."""

    url: str
    manifest: CheckpointManifest
    n_rows: int
    seconds: float


@dataclass(frozen=True)
class Loading:
    """The cluster that is loaded: its shards, its storage, its tables."""

    servers: AllShards
    store: Store
    tables: Mapping[str, TableDef]
    timeout_s: float


def load(
    loading: Loading, url: str, *, tables: Collection[str] | None = None, stall_timeout_s: float, progress: LoadProgress | None = None
) -> LoadResult:
    """Load a checkpoint; see `kvemb.api.cluster.Cluster.load`."""
    begun, stall_timeout_s = time.monotonic(), checked_timeout(stall_timeout_s)
    if tables is not None and (isinstance(tables, str) or not tables):
        raise InvalidInputError(f"tables: expected a list of names, or None for all, got {tables!r}")
    names = tuple(sorted(set(tables or ())))
    chain = _verified(url, loading.tables, progress, names)
    url, save_id = chain.levels[0].storage.url, chain.newest.save_id
    load_id = secrets.token_hex(16)
    request = LoadRequest(load_id, url, save_id, False, list(names))
    try:
        loading.servers.call_each(LOAD_CHECKPOINT, request, _deadline())  # of two loads at once one is refused by shard 0
        _create_tables(loading, chain)
        _decide(loading.store, Decision(_next_serial(loading.store, loading.timeout_s), load_id, url, save_id, names), loading.timeout_s)
    except BaseException:
        with suppress(KvembError):
            loading.servers.try_each(LOAD_CHECKPOINT, LoadRequest(load_id, "", save_id, False), Deadline.after(_GIVE_UP_S))
        raise
    for reply in loading.servers.try_each(LOAD_CHECKPOINT, LoadRequest(load_id, url, save_id, True), _deadline()).values():
        if isinstance(reply, Exception) and not isinstance(reply, ParameterServerError):
            raise reply  # a shard that does not answer now loads when it is started
    reports = _watch(loading, load_id, stall_timeout_s, progress)
    return LoadResult(url, chain.newest, sum(report.rows_done for report in reports), time.monotonic() - begun)


def decide(
    store: Store, tables: Mapping[str, TableDef], url: str, *, timeout_s: float, progress: LoadProgress | None = None
) -> CheckpointManifest:
    """Decide a load while shards are down: they carry it out when they are started. It takes the place of a load that cannot be finished.

    Raises:
        CheckpointError: it is missing or damaged, or holds a table that the cluster does not have; nothing was decided.
    """
    chain = _verified(url, tables, progress)
    missing = [table.definition.name for table in chain.newest.tables if table.definition.name not in tables]
    if missing:
        raise CheckpointError(f"table {missing[0]!r} does not exist, and only running shards create tables: load while they run")
    serial = _next_serial(store, timeout_s)
    _decide(store, Decision(serial, secrets.token_hex(16), chain.levels[0].storage.url, chain.newest.save_id), timeout_s)
    return chain.newest


def _verified(url: str, tables: Mapping[str, TableDef], progress: LoadProgress | None, names: Sequence[str] = ()) -> Chain:
    chain = open_chain(url, names)
    for table in chain.newest.tables:
        if table.definition.name in tables:
            tables[table.definition.name].require_same(table.definition, _DROP_FIRST)
    _tell_lacking(chain)
    verify_chain(chain, None if progress is None else lambda done, total: progress("verifying", done, total)).require_good()
    return chain


def _tell_lacking(chain: Chain) -> None:
    """Say what a weights-only checkpoint cannot bring back: the optimizer's state, as a user might miss it when the load is done."""
    fields = {table.definition.name: [f.name for f in table.definition.optimizer.state_fields()] for table in chain.newest.tables}
    if chain.newest.weights_only and (lacking := [f"{name} ({', '.join(of)})" for name, of in fields.items() if of]):
        log.warning(
            "%r holds weights alone: the optimizer's state begins as in new rows, of table %s. A checkpoint that was saved without "
            "weights_only has it",
            *(chain.levels[0].storage, ", ".join(lacking)),
        )


def _create_tables(loading: Loading, chain: Chain) -> None:
    for table in chain.newest.tables:
        if table.definition.name not in loading.tables:
            request = CreateTableRequest(table.definition.with_tag_attempt(0).to_dict(), True)
            loading.servers.call(0, CREATE_TABLE, request, _deadline())


def _next_serial(store: Store, timeout_s: float) -> int:
    """Return a serial above every earlier decision's, also of those that nodes have lost since: hence a time."""
    try:
        last = newest_decision(store.values.get(META_NAME, Deadline.after(timeout_s)), store.values.copies_on(META_NAME))
    except DamagedCopyError:
        last = None  # the new decision is written over all of them
    return max(time.time_ns() // 1_000_000, 1 + (0 if last is None else last.serial))


def _decide(store: Store, decision: Decision, timeout_s: float) -> None:
    try:
        store.values.put(META_NAME, decision.encode(), Deadline.after(timeout_s))
    except StorageError as error:
        raise CheckpointError(
            f"the decision to load {decision.url} may stand on some storage nodes and not on others ({error}); load again when all nodes "
            "answer, before any shard is restarted"
        ) from error


def _watch(loading: Loading, load_id: str, stall_timeout_s: float, progress: LoadProgress | None) -> list[Report]:
    """Wait until every shard has loaded and serves; CheckpointError: one failed, or none gets further. The load stays decided."""
    begun = moved = time.monotonic()
    seen = ""
    while True:
        found = zip(loading.servers.numbers, _reports(loading), strict=True)
        of_shards = {shard: report for shard, report in found if report is not None and report.load_id == load_id}
        reports = list(of_shards.values())
        for shard, report in of_shards.items():
            if report.state == "failed":
                raise CheckpointError(f"shard {shard}: {report.error}. The load stays decided: mend the cause, then start the shard again")
        if progress is not None and reports:
            progress("loading", sum(_share_done(report) for report in reports), sum(2 * report.rows for report in reports))
        if len(reports) == len(loading.servers.numbers) and all(report.state == "done" for report in reports) and _all_serve(loading):
            return reports
        if seen != (seen := repr(reports)):
            moved = time.monotonic()
        if time.monotonic() - moved > stall_timeout_s:
            raise CheckpointError(
                f"no shard has come any further for {stall_timeout_s:g} s: {reports}. The load stays decided: shards that are down load "
                "when they are started"
            )
        time.sleep(min(max(_POLL_S, _POLL_SHARE * (time.monotonic() - begun)), _LONGEST_POLL_S))


def _share_done(report: Report) -> int:
    """Return the rows read plus the rows written: twice the rows at the end."""
    return {"reading": report.rows_done, "writing": report.rows + report.rows_done, "done": 2 * report.rows}.get(report.state, 0)


def _reports(loading: Loading) -> list[Report | None]:
    shards = loading.servers.numbers
    try:
        found = [loading.store.values.get(report_name(shard), Deadline.after(loading.timeout_s)) for shard in shards]
    except StorageError:
        return [None] * len(shards)
    return [newest_report(copies) for copies in found]


def _all_serve(loading: Loading) -> bool:
    replies = loading.servers.try_each(DESCRIBE, Empty(), Deadline.after(loading.timeout_s))
    return all(isinstance(reply, DescribeReply) for reply in replies.values())


def _deadline() -> Deadline:
    return Deadline.after(_CALL_S)
