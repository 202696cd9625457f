"""The start of a shard, step by step: join the cluster, claim the shard, open the journal, replay its end, serve.
Claiming fences older processes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from kvemb.arrays.record_cache import CacheBudget
from kvemb.client.all_shards import AllShards
from kvemb.config import Config
from kvemb.coordination.markers import Identity
from kvemb.coordination.registry_format import META_NAME
from kvemb.errors import ConfigError, JournalBehindError, ShardUnavailableError, StorageError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.protocol.messages import LEFT_SESSIONS, LeftSessionsRequest
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef
from kvemb.stores.storage_kinds import open_store

from ..capabilities import CAPABILITIES
from ..engine.engine import Engine
from ..engine.storage_pace import Pause
from ..ingest.ingest import Ingest
from ..ingest.part_checks import MapGate
from ..ingest.sessions import Sessions, sessions_in
from ..ingest.sync_steps import Membership, SyncSteps
from ..journal import Journal
from ..journal.write_ahead_log import FencedLog
from ..model.bucket_settings import settle_limits
from ..model.row_ages import RowAges
from ..model.table_registry import Registry
from ..model.tables import Tables
from ..model.transition import Timeline
from ..recovery.claim_shard import CLUSTER_NAME, Claim, claim_shard
from ..recovery.high_water_mark import require_reached
from ..recovery.join_cluster import StoppedError, StorageWait, join_cluster, keep_identity
from ..recovery.known_rows import known_tables
from ..recovery.replay import Recovered, Recovery
from ..recovery.shard_parts import ShardParts, StartAgainError, StartingShard, state_of
from ..recovery.start_report import CLAIMING, JOINING, LOADING, READING, REPLAYING, StartReport
from ..repair.repairer import Repairer
from ..row_log import Reconstructor, Runs
from ..row_log.state_file import SavedState, ShardState
from ..shard_process.data_dir import DataDir, folder_of, for_writes, named
from .front import Front
from .shard import Shard

JOURNAL, RUNS = "journal", "snapshot"  # the folders in the data folder
_LARGEST_SEGMENT = 256 << 20
_ISSUED_BEHIND_THE_END = 1 << 20
OnClaimed = Callable[[Callable[[], int], Callable[[], ClusterMap]], None]
log = logging.getLogger("paramserver")


def start(
    config: Config,
    shard: int,
    *,
    listen: str,
    start_timeout_s: float,
    wait: Callable[[float], None],
    take_over: bool = False,
    roll_back: bool = False,
    on_fenced: Callable[[], None] = lambda: None,
    on_load: Callable[[], None] | None = None,
    on_claimed: OnClaimed = lambda epoch, now: None,
) -> Shard:
    """Take every step up to a shard that can serve; on an error everything is closed again."""
    root = Path(config.servers.data_dir)
    _require_own_folder(config.cluster, root, shard)
    data = DataDir(root, shard, take_over=take_over)
    front = None
    try:
        data.leave_words("")
        report = StartReport()
        front = Front(config, shard, listen, report, data.sign, take_over=take_over)
        while True:
            step = _Start(config, shard, data, start_timeout_s, wait, report, roll_back=roll_back, on_claimed=on_claimed)
            try:
                running = step.shard(front, on_fenced, on_load)
                break
            except StartAgainError:  # everything is done again: the journal's end is in the saved state now, and a load can be read
                roll_back = False
        running.serve()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StoppedError):
            data.leave_words(f"{type(error).__name__}: {error}")
        if front is not None:
            front.close()
        data.close()
        raise
    return running


def _require_own_folder(cluster: str, root: Path, shard: int) -> None:
    """Refuse the data folder of a cluster of another name before it is touched: `--take-over` would shut out a process of that one."""
    folder = folder_of(root, shard)
    with suppress(OSError):  # which opening it says
        name = (folder / CLUSTER_NAME).read_text(encoding="utf-8", errors="replace")
        if name != cluster:
            raise ConfigError(
                f"cluster: got {cluster!r}, but {folder} is of cluster {name!r}. Nothing was changed. Put that name back, by which "
                "trainers and shards know the cluster; or give a new cluster a data_dir and nodes of its own."
            )


class _Start:
    """The steps of a start, in order."""

    def __init__(
        self,
        config: Config,
        shard: int,
        data: DataDir,
        start_timeout_s: float,
        wait: Callable[[float], None],
        report: StartReport,
        *,
        roll_back: bool = False,
        on_claimed: OnClaimed = lambda epoch, now: None,
    ) -> None:
        self._on_claimed = on_claimed
        self._config, self._shard, self._data, self._roll_back = config, shard, data, roll_back
        self._start_timeout_s, self._wait, self._report, self._timeout_s = start_timeout_s, wait, report, config.storage.timeout_s
        self._store = open_store(config.storage, role=f"shard:{shard}")

    def shard(self, front: Front, on_fenced: Callable[[], None], on_load: Callable[[], None] | None) -> Shard:
        """Return a shard that can serve."""
        started = None
        try:
            with named(f"shard {self._shard}: its data folder cannot be used", self._data.path):
                started = self.recovered()
                front.open(self._wait, self._start_timeout_s, self._data.signed_by)
                return Shard(started, front, on_fenced=on_fenced, on_load=on_load)
        except BaseException:
            if started is not None:
                started.fenced_log.journal.close()
            self._store.close()
            raise

    def recovered(self) -> ShardParts:
        """Return the parts of a shard whose tables, sessions and rows are those of the journal's end."""
        again = StorageWait(Deadline.after(self._start_timeout_s), self._wait, self._report)
        identity, registry, state = self._claimed(again)
        claim = Claim(self._data, self._store, self._shard, state.epoch, self._timeout_s)
        self._on_claimed(lambda: claim.epoch, lambda: self._store.nodes.cluster_map)
        self._create_tables(registry, again)
        journal = self._open_journal()
        try:
            saved = SavedState(self._data, state, claim.require)
            runs = Runs(self._data.path / RUNS, saved, epoch=state.epoch)
            fenced_log = FencedLog(journal, claim.require)
            known = StartingShard(self._shard, registry, runs, saved, fenced_log, claim, self._store, self._data, self._timeout_s)
            return self._loaded(known, state, identity.cluster_id)
        except JournalBehindError:
            journal.give_up()
            raise
        except BaseException:
            journal.close()
            raise

    def _claimed(self, again: StorageWait) -> tuple[Identity, Registry, ShardState]:
        """Join the cluster and become the shard's owner; return the state of the last one."""
        store, data, shard, name = self._store, self._data, self._shard, self._config.cluster
        self._report.enter(JOINING)
        n_shards = len(self._config.servers.shards)
        identity = join_cluster(store, data, shard, n_shards, name=name, timeout_s=self._timeout_s, again=again)
        self._report.enter(CLAIMING)
        registry = Registry(store, shard, self._timeout_s, data)
        check, left = partial(self._check, identity, registry), partial(self._sessions_left, again)
        state = claim_shard(store, data, shard, identity.cluster_id, self._timeout_s, check=check, left=left, again=again)
        if data.read(CLUSTER_NAME) is None:
            data.write(CLUSTER_NAME, [name.encode()])
        return identity, registry, state

    def _check(self, identity: Identity, registry: Registry, state: ShardState) -> None:
        """Check all that may refuse the shard; only then is the folder this cluster's, and may the nodes be written to."""
        if not self._roll_back:
            require_reached(state, self._store, self._data.path / JOURNAL, self._timeout_s)
        keep_identity(self._data, identity)
        registry.load()
        there = {table.name: table for table in registry.tables}
        for table in self._declared:
            if table.name in there:
                there[table.name].require_same(table.opened_as(there[table.name]))

    def _sessions_left(self, again: StorageWait) -> list[tuple[str, int, int]]:
        """What a shard that has left had taken of trainers, whose number this one has; shard 0 keeps it."""
        shards = AllShards(self._config.servers.shards, tls=self._config.servers.tls, maps=self._store.nodes)
        request, left_s = LeftSessionsRequest(self._shard), self._start_timeout_s

        def ask() -> bytes:
            return shards.call(0, LEFT_SESSIONS, request, Deadline.after(left_s)).sessions

        with closing(shards):
            return sessions_in(again(ask, (ShardUnavailableError,)))

    @property
    def _declared(self) -> Sequence[TableDef]:
        """The tables of kvemb.yaml, which shard 0 creates."""
        return self._config.tables if self._shard == 0 else ()

    def _create_tables(self, registry: Registry, again: StorageWait) -> None:
        for table in self._declared:
            names = {one.name for one in registry.dropping} - {one.name for one in registry.tables}
            if table.name in names:  # this shard is needed to end that
                log.warning("table %s of kvemb.yaml is being dropped, and created at the first start after that", table.name)
                continue
            again(partial(registry.create, table, exist_ok=True))
        if self._shard == 0 and registry.tables:
            again(lambda: settle_limits(self._store, self._store.nodes.addresses, registry.tables, self._timeout_s))

    def _loaded(self, known: StartingShard, state: ShardState, cluster_id: bytes) -> ShardParts:
        """Recover, with what capabilities do before and after it."""
        report = self._report
        recovery = Recovery(known.fenced_log.journal, state.journal, state.k, known.registry.find_key)
        report.enter(READING, recovery.looked_through)
        recovery.scan()
        steps = [step for one in CAPABILITIES if (step := one.at_start(known, self._retry_until())) is not None]
        for step in steps if recovery.is_done and not self._roll_back else ():
            report.enter(LOADING, step.how_far)
            step.read()
        report.enter(READING)
        parts = self._replayed(known, state, recovery, cluster_id)
        if not recovery.is_done:
            self._settle(parts)
        for step in steps:
            report.enter(LOADING, step.how_far)
            step.finish(parts)
        return parts

    def _replayed(self, known: StartingShard, state: ShardState, recovery: Recovery, cluster_id: bytes) -> ShardParts:
        """Apply the journal's end to tables and storage."""
        servers, registry, journal, saved = self._config.servers, known.registry, known.fenced_log.journal, known.saved.now
        budget, index_bytes = CacheBudget(servers.cache_mb << 20), servers.index_mb << 20
        rows = known_tables(saved, known.runs, journal, registry.find_key, budget=budget, index_bytes=index_bytes)
        tables = Tables(rows, budget, log=known.runs, index_bytes=index_bytes)
        sessions = Sessions(self._shard == 0, state.next_incarnation + self._skipped_incarnations, list(state.sessions))
        timeline = Timeline(state.epoch, recovery.k, self._where, roll_back=self._roll_back)
        repairer = self._repairer(timeline, known, tables)
        engine = Engine(
            self._store, tables, timeline, k=state.k, timeout_s=self._timeout_s, repair=repairer, rows_applied=state.rows_applied
        )
        self._report.enter(REPLAYING, recovery.applied)
        members = Membership(servers.trainers, state.members, state.complete)
        recovered = recovery.run(engine, tables, sessions, members, self._retry_until())
        for table in registry.gone:  # the replay may have needed them
            tables.forget(table)
        ages = RowAges(saved.points, saved.since, k=engine.k)
        ages.mark(time.time(), engine.k)  # a start that comes before the next minute is up keeps this one, too
        return ShardParts(
            config=self._config,
            shard=self._shard,
            cluster_id=cluster_id,
            registry=registry,
            tables=tables,
            engine=engine,
            ingest=self._ingest(known, sessions, recovered),
            fenced_log=known.fenced_log,
            recovered=recovered,
            timeline=timeline,
            runs=known.runs,
            repairer=repairer,
            store=self._store,
            maps=self._store.nodes,
            data=self._data,
            claim=known.claim,
            saved=known.saved,
            ages=ages,
        )

    def _ingest(self, known: StartingShard, sessions: Sessions, recovered: Recovered) -> Ingest:
        servers = self._config.servers
        rule = servers.barrier_timeout_s, recovered.members, servers.on_lost_trainer
        steps = SyncSteps.first(servers.trainers, *rule) if servers.mode == "sync" else None
        gate = MapGate(self._shard, lambda: self._store.nodes.cluster_map)
        return Ingest(sessions, steps, record=known.fenced_log.record, gate=gate, registry=known.registry)

    @property
    def _where(self) -> str:
        return f"shard {self._shard}: the journal in {self._data.path / JOURNAL}"

    @property
    def _skipped_incarnations(self) -> int:
        """Numbers to skip: hellos may be gone with the journal's end, and incarnations that other shards know must not be issued again."""
        return _ISSUED_BEHIND_THE_END if self._roll_back else 0

    def _repairer(self, timeline: Timeline, known: StartingShard, tables: Tables) -> Repairer:
        runs, registry = known.runs, known.registry
        return Repairer(
            self._store,
            tables,
            self._shard,
            timeline=timeline,
            reconstruct=Reconstructor(lambda: runs.view, known.fenced_log.journal, registry.find_key).records,
            timeout_s=self._timeout_s,
            metas=lambda: [(META_NAME, registry.put_back)],
            still_ours=for_writes(known.claim.require),
        )

    def _open_journal(self) -> Journal:
        # Only whole segments can be let go: several must fit into the bound.
        segment_bytes = min(_LARGEST_SEGMENT, self._config.servers.journal_max_mb << 17)
        return Journal(self._data.path / JOURNAL, self._config.servers.durability, segment_bytes=segment_bytes)

    def _settle(self, parts: ShardParts) -> None:
        """Save the recovered state, so that the next start need not replay it again."""
        parts.runs.publish([], state_of(parts, parts.fenced_log.journal.end))

    def _retry_until(self) -> Pause:
        """Wait between tries of a batch; give up when storage has not answered for as long as a start may wait."""
        waited_s = last_s = 0.0
        waiting = WhyWaiting()

        def pause(error: StorageError, pause_s: float) -> None:
            nonlocal waited_s, last_s
            waited_s = pause_s + (0.0 if pause_s < last_s else waited_s)  # pauses grow, and begin again with every batch
            last_s = pause_s
            self._report.waits(str(error))
            if waiting.is_news(str(error)):
                log.info("recovery waits for storage: %s", error)
            if waited_s > self._start_timeout_s:
                raise error
            self._wait(pause_s)

        return pause
