"""The client that serves: look-ups from cache, filter and storage, each within a deadline, with an answer also where storage gives none.

Thread-safe. In a forked child look-ups go on with an empty cache and connections of its own; the child follows the feed if its parent did
not yet, since gRPC does not survive a fork.
"""

from __future__ import annotations  # help() shows types as they are written here

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.api.connector import connect_to_serve
from kvemb.arrays.hashing import mix64
from kvemb.arrays.ids import normalize, unique
from kvemb.errors import ClosedError, InvalidInputError, StorageError, UnknownViewError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.process import ForkLock
from kvemb.process.metrics import SECONDS, BucketCounts, MetricFamilies
from kvemb.projection.projection_reader import ProjectionReader
from kvemb.projection.projection_target import TargetUrl
from kvemb.schema.table_def import TableDef
from kvemb.serve.row_sources import ClusterSource, RowSet, ServingSource, ViewSource
from kvemb.serve.served_tables import RowsFound, ServedFrom, ServedTable, ServedTables

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("kvemb")
_Begun = tuple[RowSet, list[RowsFound], list[tuple[int, ...]], Deadline]
"""A look-up under way: which rows, each table's share, the shape of its ids, and until when."""
_LONGEST_MS = 1e9
_TARGET_TIMEOUT_S = 5.0  # what storage.timeout_s is for clusters


class MeanOf:
    """The rule of a table whose unknown ids get the mean of the rows of these ids, as of `max_age_ms` ago at most."""

    def __init__(self, ids: ArrayLike) -> None:
        self.ids = np.array(ids).reshape(-1)
        if not len(self.ids):
            raise InvalidInputError("MeanOf: there is no id to take the mean of; name one at least")


UnknownRule = Literal["initializer", "zeros"] | MeanOf | ArrayLike
"""What an id without a row gets: the row that its first push would begin with, zeros, the mean of rows, or this row, floats [dim]."""


def connect(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    cache_mb: float = 256.0,
    filter_mb: float = 256.0,
    max_age_ms: float = 1000.0,
    timeout_ms: float | None = None,
    degraded: Literal["cached", "default"] = "cached",
    unknown: Mapping[str, UnknownRule] | None = None,
) -> ServingClient:
    """Open a cluster to serve its rows; needs storage, and no parameter server. See docs/serve.md.

    Args:
        source: as of `kvemb.connect`. With TLS between clients and shards its certificate needs the role `reader`, for the feed. Or
            redis://HOST:PORT of a projection's target, which is read in the cluster's place; with `?view=NAME` always this view.
        cache_mb: memory for rows, of each table that is looked up; 0: none is kept.
        filter_mb: memory for filters of ids that exist, 2 to 2.5 bytes an id, of all tables; a table whose filter would have less than a
            byte for each has none. 0: none is built.
        max_age_ms: how old a cached row may be where no feed is followed.
        timeout_ms: of each look-up; storage.timeout_s unless given, which is also that of connecting and of opening a table. 5 s of a
            target.
        degraded: the answer where storage does not give one in time. "cached": rows of the cache, however old; where an id has none, the
            storage's error is raised. "default": these ids get the table's rule for unknown ids.
        unknown: by table, what an id without a row gets; "initializer" unless given.

    Raises:
        InvalidInputError: an option is out of range.
        ConfigError, StorageError: as of `kvemb.connect`.
        UnknownTableError: `unknown` names a table that does not exist.
        UnknownViewError: the target has no such view, or none in use and no projection.

    Example:
        >>> import kvemb.serve
        >>> with kvemb.local() as url, kvemb.connect(url) as trainer:
        ...     users = trainer.create_table("user", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        ...     users.assign([7], [[1.0, 2.0]])
        ...     with kvemb.serve.connect(url, unknown={"user": [0.5, 0.5]}) as client:
        ...         rows, sources = client.lookup("user", [7, 8], return_sources=True)
        >>> rows, [kvemb.serve.ServedFrom(one).name for one in sources]
        (array([[1. , 2. ],
               [0.5, 0.5]], dtype=float32), ['STORAGE', 'UNKNOWN'])
    """
    if degraded not in ("cached", "default"):
        raise InvalidInputError(f'degraded is {degraded!r}; give "cached" or "default"')
    for name, value in (("cache_mb", cache_mb), ("filter_mb", filter_mb), ("max_age_ms", max_age_ms)):
        if not 0 <= value <= _LONGEST_MS:
            raise InvalidInputError(f"{name} is {value!r}; give a number from 0 to {_LONGEST_MS:g}")
    if timeout_ms is not None and not 0 < timeout_ms <= _LONGEST_MS:
        raise InvalidInputError(f"timeout_ms is {timeout_ms!r}; give a number above 0, up to {_LONGEST_MS:g}")
    rows: ServingSource
    if isinstance(source, str) and re.match("rediss?://", source):
        timeout_s = _TARGET_TIMEOUT_S if timeout_ms is None else timeout_ms / 1e3
        rows = _rows_of_target(source, lambda: ServedTables(cache_mb, 0, max_age_ms / 1e3))
    else:
        cluster = connect_to_serve(source)
        timeout_s = cluster.config.storage.timeout_s if timeout_ms is None else timeout_ms / 1e3
        rows = ClusterSource(cluster, ServedTables(cache_mb, filter_mb, max_age_ms / 1e3))
    client = ServingClient(rows, timeout_s=timeout_s, defaults=degraded == "default", unknown=dict(unknown or {}))
    try:
        client.check_rules()
    except BaseException:
        client.close()
        raise
    return client


def _rows_of_target(source: str, new_tables: Callable[[], ServedTables]) -> ViewSource:
    url = TargetUrl.parse(source)
    reader = ProjectionReader(url.address, url.access(os.environ, url.options.get("password_env", ""), None))
    try:
        return ViewSource(reader, url.options.get("view", ""), new_tables, _TARGET_TIMEOUT_S)
    except BaseException:
        reader.close()
        raise


class ServingClient:
    """Looks rows up; made by `connect`. Close it, or use it as a context manager. Thread-safe, fork-aware.

    One class of many methods: it is the one object that programs hold, and it has a form of its look-up to await, too.

    Args:
        source: of rows; closed with the client.
        timeout_s: of a look-up.
        defaults: whether ids of which nothing is known get the table's rule when storage does not answer.
        unknown: the rules, by table.
    """

    def __init__(self, source: ServingSource, *, timeout_s: float, defaults: bool, unknown: Mapping[str, UnknownRule]) -> None:
        self.source = source
        """Where the rows come from."""
        self.timeout_s, self._defaults, self._unknown = timeout_s, defaults, unknown
        self._lock, self._waiting, self._closed = ForkLock(), WhyWaiting(), False
        self._counts: dict[str, NDArray[np.int64]] = {}  # of each table the ids by source, and last those that storage was asked for
        self._took_s, self._ages_s = BucketCounts(SECONDS), BucketCounts(SECONDS)

    @overload
    def lookup(
        self, table: str, ids: ArrayLike, *, return_sources: Literal[False] = False, timeout_ms: float | None = None
    ) -> NDArray[np.float32]: ...

    @overload
    def lookup(
        self, table: str, ids: ArrayLike, *, return_sources: Literal[True], timeout_ms: float | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8]]: ...

    def lookup(self, table: str, ids: ArrayLike, *, return_sources: bool = False, timeout_ms: float | None = None) -> Any:
        """Return rows of a table.

        Args:
            table: its name.
            ids: any integer array, any shape, duplicates fine.
            return_sources: also return where each row comes from, `ServedFrom`; from `ServedFrom.OLD` on the answer is degraded.
            timeout_ms: of the whole call; the client's unless given.

        Returns:
            float32 [*ids.shape, dim], of a table of opaque bytes uint8; with `return_sources` also uint8 [*ids.shape].

        Raises:
            UnknownTableError, InvalidInputError: as `Table.pull`.
            StorageError: storage did not answer in time, and there is no degraded answer for all ids.
        """
        return self.lookup_tables({table: ids}, return_sources=return_sources, timeout_ms=timeout_ms)[table]

    def lookup_tables(
        self,
        ids: Mapping[str, ArrayLike],
        *,
        return_sources: bool = False,
        return_view: bool = False,
        timeout_ms: float | None = None,
    ) -> Any:
        """Look up in several tables, with one round trip per node.

        Args:
            ids: by table, as of `lookup`.
            return_sources: as of `lookup`.
            return_view: also return the name of the view that all these rows are of: "live" for the projection that is maintained, "" for
                a cluster's.
            timeout_ms: as of `lookup`.

        Returns:
            By table what `lookup` returns; with `return_view` (that, name).
        """
        rows, deadline = self.source.now(), Deadline.of_caller(self.timeout_s if timeout_ms is None else timeout_ms / 1e3)
        try:
            found = self.lookup_in(rows, ids, return_sources=return_sources, timeout_ms=timeout_ms)
        except UnknownViewError as error:  # it was dropped meanwhile
            rows, left_ms = self.source.again(rows, error, deadline), 1e3 * max(deadline.remaining_s(), 1e-3)
            found = self.lookup_in(rows, ids, return_sources=return_sources, timeout_ms=left_ms)
        return (found, rows.view) if return_view else found

    def lookup_in(
        self, rows: RowSet, ids: Mapping[str, ArrayLike], *, return_sources: bool = False, timeout_ms: float | None = None
    ) -> dict[str, Any]:
        """Look up in one set of rows of `source`, as `lookup_tables`; UnknownViewError where it is not there any more."""
        return self._end(self._begin(rows, ids, timeout_ms), return_sources)

    async def lookup_async(self, table: str, ids: ArrayLike, *, return_sources: bool = False, timeout_ms: float | None = None) -> Any:
        """As `lookup`; where storage has to be asked, a thread of the loop's pool waits for it."""
        loop = asyncio.get_running_loop()
        whole = partial(self.lookup, table, ids, return_sources=return_sources, timeout_ms=timeout_ms)
        rows = self.source.now()
        if table not in rows.tables.by_name or isinstance(self._unknown.get(table), MeanOf):
            return await loop.run_in_executor(None, whole)
        begun = self._begin(rows, {table: ids}, timeout_ms)
        if not len(begun[1][0].left):
            return self._end(begun, return_sources)[table]
        try:
            return (await loop.run_in_executor(None, self._end, begun, return_sources))[table]
        except UnknownViewError:
            return await loop.run_in_executor(None, whole)

    def wait_ready(self, timeout_s: float) -> bool:
        """Return whether, within the time, the feed is followed, and the tables that were looked up have their filters."""
        tables, deadline = self.source.now().tables, Deadline.of_caller(timeout_s)
        while not (tables.followed and tables.unfiltered() is None):
            if deadline.expired:
                return False
            self.source.wait(min(0.01, deadline.remaining_s()))
        return True

    def collect(self) -> Iterable[Metric]:
        """Return this client's figures, as a collector for a registry of prometheus-client: `REGISTRY.register(client)`."""
        families, kept = MetricFamilies({"cluster": self.source.name}), self.source.now().tables
        counts, tables = sorted(self._counts.items()), sorted(kept.by_name.items())
        ids = [({"table": name, "source": source.name.lower()}, float(some[source])) for name, some in counts for source in ServedFrom]
        asked = [({"table": name}, float(some[-1])) for name, some in counts]
        filters = [({"table": name}, 0.0 if one.filter is None else one.filter.size_bytes) for name, one in tables]
        families.counter("kvemb_serve_ids_total", "Ids looked up, by where their rows came from; old and default are degraded.", ids)
        families.counter("kvemb_serve_asked_ids_total", "Ids looked up that storage was asked for.", asked)
        families.histogram("kvemb_serve_lookup_seconds", "Time of a look-up.", [({}, self._took_s)])
        families.histogram("kvemb_serve_age_seconds", "How long ago a look-up's oldest row was known to be current.", [({}, self._ages_s)])
        families.gauge("kvemb_serve_following", "1 while the feed tells every change.", float(kept.followed))
        families.gauge("kvemb_serve_filter_bytes", "Memory of a table's filter of ids; 0 while there is none.", filters)
        return families

    def close(self) -> None:
        """End the feed and close every connection. Idempotent."""
        self._closed = True
        self.source.close()

    def __repr__(self) -> str:
        view = f", view {self.source.current.view!r}" if self.source.current.view else ""
        return f"<ServingClient of {self.source.name!r}{view}: {'closed' if self._closed else 'open'}>"

    def __enter__(self) -> ServingClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- one look-up -----------------------------------------------------------------------------------------------------------------

    def _begin(self, rows: RowSet, ids: Mapping[str, ArrayLike], timeout_ms: float | None) -> _Begun:
        if self._closed:
            raise ClosedError("this serving client was closed; kvemb.serve.connect(source) opens another one")
        begun_s = time.monotonic()
        deadline = Deadline.of_caller(self.timeout_s if timeout_ms is None else timeout_ms / 1e3)
        parts, shapes = [], []
        for name, wanted in ids.items():
            served = rows.tables.by_name.get(name) or self._open(rows, name)
            definition = served.definition
            flat, shape = normalize(wanted, definition.id_dtype, name, definition.num_ids, minus_one=False)
            parts.append(_found(rows, served, flat.copy(), begun_s))  # the caller may change its array meanwhile
            shapes.append(shape)
        return rows, parts, shapes, deadline

    def _end(self, begun: _Begun, return_sources: bool) -> dict[str, Any]:
        origin, parts, shapes, deadline = begun
        self._ask(origin, parts, deadline)
        answers: dict[str, Any] = {}
        for found, shape in zip(parts, shapes, strict=True):
            self._fill_unknown(origin, found, deadline)
            rows = found.rows.reshape(*shape, found.rows.shape[1])
            answers[found.served.definition.name] = (rows, found.sources.reshape(shape)) if return_sources else rows
        self._count(parts, time.monotonic() - deadline.at_s + deadline.timeout_s)
        return answers

    def _ask(self, origin: RowSet, parts: Sequence[RowsFound], deadline: Deadline) -> None:
        """Ask storage for what is left; where it does not answer, fill in what is known."""
        asking = [found for found in parts if len(found.left)]
        if not asking:
            return
        wanted = [unique(found.ids if len(found.left) == len(found.ids) else found.ids[found.left]) for found in asking]
        for found in asking:
            found.n_asked = len(found.left)
        began_s = time.monotonic()
        try:
            each = [(found.served.definition, one.ids) for found, one in zip(asking, wanted, strict=True)]
            pulled = origin.pull(each, max(deadline.remaining_s(), 1e-3))
        except StorageError as error:
            self._degrade(origin, asking, error)
            return
        self._waiting.over()
        for found, one, (rows, versions) in zip(asking, wanted, pulled, strict=True):
            origin.tables.keep(found, one.ids, rows, versions, began_s)
            if one.inverse is not None:
                rows, versions = rows[one.inverse], versions[one.inverse]
            if found.n_asked == len(found.ids):
                found.rows, found.versions = rows, versions
            else:
                found.rows[found.left], found.versions[found.left] = rows, versions

    def _degrade(self, origin: RowSet, parts: Sequence[RowsFound], error: StorageError) -> None:
        with self._lock:
            news = self._waiting.is_news(type(error).__name__)
        if news:
            log.warning("look-ups are answered from the cache as far as it goes, since storage does not answer: %s", error)
        for found in parts:
            origin.tables.find_old(found, time.monotonic())
            if len(found.left) and not self._defaults:
                raise error
            found.sources[found.left] = ServedFrom.DEFAULT
            found.absent = np.concatenate([found.absent, found.left])

    def _fill_unknown(self, origin: RowSet, found: RowsFound, deadline: Deadline) -> None:
        """Give ids without a row what the table's rule says; those that storage or the cache had no row for have the initializer's."""
        definition = found.served.definition
        rule = self._unknown.get(definition.name, "initializer")
        none = np.flatnonzero(found.versions == 0)
        if not len(none):
            return
        found.sources[none[found.sources[none] < ServedFrom.OLD]] = ServedFrom.UNKNOWN
        if isinstance(rule, str) and rule == "initializer":
            if len(found.absent):
                found.rows[found.absent] = definition.initial_rows(found.ids[found.absent])
            return
        if not isinstance(rule, MeanOf):
            found.rows[none] = _row_of(definition, rule)
            return
        found.rows[none], current = self._mean(origin, found.served, rule, deadline)
        if not current:
            found.sources[none] = ServedFrom.DEFAULT

    def _mean(self, origin: RowSet, served: ServedTable, rule: MeanOf, deadline: Deadline) -> tuple[NDArray[Any], bool]:
        """Return the mean of the rule's rows, and whether storage answered for it; if not, it is one of before, or of what is known."""
        definition, now_s = served.definition, time.monotonic()
        if served.mean is not None and now_s - served.mean[0] <= origin.tables.max_age_s:
            return served.mean[1], True
        ids, _ = normalize(rule.ids, definition.id_dtype, definition.name, definition.num_ids, minus_one=False)
        found = _found(origin, served, ids, now_s)
        self._ask(origin, [found], deadline)
        current = bool((found.sources < ServedFrom.OLD).all())
        if served.mean is not None and not current:
            return served.mean[1], False
        if len(found.absent):
            found.rows[found.absent] = definition.initial_rows(found.ids[found.absent])
        row: NDArray[Any] = found.rows.mean(axis=0, dtype=np.float32)
        if current:
            served.mean = now_s, row
        return row, current

    def check_rules(self) -> None:
        """Refuse rules for unknown ids that fit no table; UnknownTableError where there is none of that name."""
        for name in self._unknown:
            self._checked(self.source.current, name)

    def _open(self, rows: RowSet, name: str) -> ServedTable:
        return rows.tables.add(self._checked(rows, name))

    def _checked(self, rows: RowSet, name: str) -> TableDef:
        definition = rows.definition(name)
        rule = self._unknown.get(name, "initializer")
        if isinstance(rule, MeanOf) and definition.row_dtype == np.uint8:
            raise InvalidInputError(f"table {name!r} holds opaque bytes, which have no mean")
        if not isinstance(rule, MeanOf) and not (isinstance(rule, str) and rule == "initializer"):
            _row_of(definition, rule)  # a rule that is none is refused before anything is asked
        return definition

    def _count(self, parts: Sequence[RowsFound], took_s: float) -> None:
        with self._lock:
            self._took_s.add(took_s)
            self._ages_s.add(max((found.age_s for found in parts), default=0.0))
            for found in parts:
                counts = self._counts.setdefault(found.served.definition.name, np.zeros(len(ServedFrom) + 1, np.int64))
                counts[:-1] += np.bincount(found.sources, minlength=len(ServedFrom))
                counts[-1] += found.n_asked


def _found(origin: RowSet, served: ServedTable, ids: NDArray[np.uint64], now_s: float) -> RowsFound:
    """Begin with what is kept."""
    definition, m = served.definition, len(ids)
    rows = np.empty((m, definition.dim), definition.row_dtype)
    found = RowsFound(served, ids, mix64(ids), rows, np.zeros(m, np.uint64), np.zeros(m, np.uint8))
    origin.tables.find(found, now_s)
    return found


def _row_of(definition: TableDef, rule: ArrayLike) -> NDArray[Any]:
    """The row that a rule names."""
    if isinstance(rule, str) and rule == "zeros":
        return np.zeros(definition.dim, definition.row_dtype)
    try:
        row = np.asarray(rule, definition.row_dtype)
    except (TypeError, ValueError):
        row = np.empty(0, definition.row_dtype)
    if row.shape != (definition.dim,):
        raise InvalidInputError(
            f'table {definition.name!r}: the rule for unknown ids is {rule!r}; give "initializer", "zeros", kvemb.serve.MeanOf(ids), or '
            f"a row of {definition.dim} numbers"
        )
    return row
