"""The walk of tables that finds the rows their policies send away, and has them erased: a small portion at a time, between two batches.

A walk goes through a table in the order of its keys, a slice at a time (several while it is behind), from the index or the row log.
Weights are looked at only for `l2_below`, and only of rows that are old enough: in the cache, else in storage. Rows that go are handed to
ingest, some thousand a batch, one batch at a time. Whether a row is still as it was chosen is found when the batch is numbered
(`EvictionWork`).

Slices and erases together take a share of the apply thread's time. After a restart a walk begins at the first key again. Apply thread only;
`report` and `dry_run` for any thread.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.row_index import END
from kvemb.errors import DeadlineExceededError, StorageError
from kvemb.evict import Eviction
from kvemb.net.deadline import Deadline
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef

from ..engine.storage_pace import Pause
from ..model.batch import ERASE, EVICTED, CheckedRows, EvictionWork
from ..model.tables import TableState
from ..recovery.shard_parts import ShardParts
from ..row_log.log_flush import ReadRecords, from_storage, without_cache
from .eviction_verdicts import EvictionLimits, Norms, PushCounts, judge, terms

Ids = NDArray[np.uint64]
_SLICE_ROWS, _SLICE_READ = 1 << 15, 1 << 12  # rows looked at between two batches; the second where weights are read
_ERASED_ROWS = 4096
_SLICES_BEHIND, _ERASED_BEHIND = 16, 1 << 14  # at once while a table has many more rows than `keep` says: large batches leave few pauses
_REST, _REST_BEHIND = 20, 2  # as long as the work took; the second while a table has many more rows than `keep` says
_AIM, _BEGIN, _BEHIND = 0.98, 1.0, 1.005  # of the rows that `keep` says: to the first a walk brings a table, above the second it begins
_ROUND_S, _MARK_S, _RETRY_S, _LOG_S = 60.0, 60.0, 5.0, 60.0
_LOOK_SOON_S, _LOOK_S, _NO_POLICY_S = (
    0.25,
    1.0,
    5.0,
)  # from one look at rows and policies to the next: with batches, without, without policy
_DAY_S = 86_400
log = logging.getLogger("paramserver")


@dataclass
class TableEvictions:
    """What one shard's process has erased of a table by its policy, or what a dry run says it would.

    Args:
        by_policy: rows by the policy that sent them.
        size_bytes: of their records.
        oldest: batch of the last push of the one that was pushed longest ago; -1 for none.
        walks: ended so far.
    """

    by_policy: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0
    oldest: int = -1
    walks: int = 0

    @property
    def n_rows(self) -> int:
        return sum(self.by_policy.values())

    def add(self, policy: Eviction, why: NDArray[np.intp], pushed: NDArray[np.int64], record_bytes: int) -> None:
        """Count rows that go: the policy of each by its number among the terms, and the batch of its last push."""
        if not len(why):
            return
        counts = np.bincount(why, minlength=len(terms(policy)))
        for term, n_rows in zip(terms(policy), counts.tolist(), strict=True):
            if n_rows:
                self.by_policy[str(term)] = self.by_policy.get(str(term), 0) + n_rows
        self.size_bytes += len(why) * record_bytes
        lowest = int(pushed.min())
        self.oldest = lowest if self.oldest < 0 else min(self.oldest, lowest)


@dataclass(eq=False)
class _TableWalk:
    """One walk under way.

    Args:
        table, policy: as of its beginning.
        counts: of the rows that it sees.
        at: key at which it goes on.
        doomed: (ids, versions, why, pushed) of rows to be erased, portion by portion.
        n_sent: portions of such rows so far.
    """

    table: TableState
    policy: Eviction
    counts: PushCounts
    at: int = 0
    doomed: list[tuple[Ids, Ids, NDArray[np.intp], NDArray[np.int64]]] = field(default_factory=list)
    n_sent: int = 0

    @property
    def n_doomed(self) -> int:
        return sum(len(ids) for ids, *_ in self.doomed)


@dataclass(eq=False)
class _LastWalk:
    """What is known of a table from its last walk.

    Args:
        counts: of the rows that it has left.
        due_s: of the next walk, unless the table has too many rows.
        policy: of it.
        hot: whether it found too many rows, and all of them pushed again since the walk before: then any row may go.
    """

    counts: PushCounts | None = None
    due_s: float = 0.0
    policy: Eviction | None = None
    hot: bool = False


class Evictor:
    """Walks one shard's tables and has rows erased.

    One class: all its methods read or change one walk, and what is known of the walks before.

    Attributes:
        sent: the erase under way; its apply makes a step due.
    """

    name, passing = "the walk for rows that their table's policy sends away", (StorageError,)

    def __init__(
        self,
        parts: ShardParts,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_s: float | None = None,
    ) -> None:
        self._parts, self._tables, self._ages, self._clock = parts, parts.tables, parts.ages, clock
        self._read, self._stored = from_storage(parts.store, parts.timeout_s), partial(without_cache, parts.store, parts.timeout_s)
        self._serial = 0  # of the registry, whose policies it has looked at
        self._wall_ahead_s = (time.time() if wall_s is None else wall_s) - clock()
        self._known: dict[str, _LastWalk] = {}
        self._done: dict[str, TableEvictions] = {}
        self._unsaid: dict[str, tuple[float, TableEvictions]] = {}
        self._walk: _TableWalk | None = None
        self.sent: EvictionWork | None = None
        self._of_sent: tuple[_TableWalk, NDArray[np.intp], NDArray[np.int64]] | None = None
        self._due_s = self._next_s = self._marked_s = self._ended_s = clock() - _MARK_S
        self._worked_s = 0.0  # for which it has rested since `_ended_s`, and not long enough yet
        self._k = 0  # the last batch applied, at the last look

    # --- on the apply thread -----------------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        """When the next step is due, by that clock."""
        return 0.0 if self._serial != self._parts.registry.serial or (self.sent is not None and self.sent.applied) else self._due_s

    def step(self, pause: Pause) -> bool:
        """Do a slice of a walk, or have a portion of rows erased."""
        before, self._serial = self._serial, self._parts.registry.serial
        try:
            self._step(self._clock(), policies_changed=before != self._serial)
        finally:
            marks_s = self._marked_s + _MARK_S
            self._due_s = marks_s if self.sent is not None else min(self._next_s, marks_s)
        return False

    def _step(self, now_s: float, *, policies_changed: bool) -> None:
        if now_s - self._marked_s >= _MARK_S:
            self._ages.mark(now_s + self._wall_ahead_s, self._parts.engine.k)
            self._marked_s = now_s
        if self.sent is not None:
            if not self.sent.applied:
                return
            took_s = self.sent.took_s
            self._end_portion(self.sent)
            self._rest_after(took_s, now_s)
        if now_s < max(self._next_s, self._rested_s) and not policies_changed:
            self._next_s = max(self._next_s, min(self._rested_s, now_s + _LOOK_SOON_S))
            return
        self._next_s, self._worked_s = now_s + _RETRY_S, 0.0  # the former unless all goes well
        if self._walk is not None and self._policy(self._walk.table.definition) != self._walk.policy:
            self._walk = None  # it was changed, or the table dropped
        walk = self._walk = self._walk or self._next_walk(now_s)
        if walk is None:
            self._say_what_went(now_s)
            before, self._k = self._k, self._parts.engine.k
            self._next_s = now_s + (_NO_POLICY_S if not self._known else _LOOK_S if self._k == before else _LOOK_SOON_S)
            return
        n_slices, n_erased = (_SLICES_BEHIND, _ERASED_BEHIND) if self._is_behind else (1, _ERASED_ROWS)
        while n_slices and walk.at < END and walk.n_doomed < n_erased:
            self._look(walk)
            n_slices -= 1
        if walk.doomed:
            self._send(walk, n_erased)
        elif walk.at >= END:
            self._end_walk(walk)
        ended_s = self._clock()
        self._rest_after(ended_s - now_s, ended_s)

    def _rest_after(self, took_s: float, ended_s: float) -> None:
        if self._rested_s <= ended_s:
            self._worked_s, self._ended_s = 0.0, ended_s
        self._worked_s += took_s
        self._next_s = min(self._rested_s, ended_s + _LOOK_SOON_S)

    @property
    def _rested_s(self) -> float:
        """When it will have rested: sooner once a table falls behind meanwhile."""
        return self._ended_s + self._rest * self._worked_s

    @property
    def _rest(self) -> int:
        return _REST_BEHIND if self._is_behind else _REST

    @property
    def _is_behind(self) -> bool:
        walk = self._walk
        return walk is not None and self._has_above(_BEHIND, walk.table, walk.policy)

    def _has_above(self, share: float, table: TableState, policy: Eviction) -> bool:
        """Whether a table has more than a share of the rows that a `keep` says which needs nothing else to be true."""
        alone = {int(term.limit) for term in terms(policy) if term.kind == "keep"}
        return any(table.n_rows > share * kept for limit, kept in self._kept(policy, table.definition).items() if limit in alone)

    def _next_walk(self, now_s: float) -> _TableWalk | None:
        """The table whose walk is due, that which waits longest first."""
        due: list[tuple[float, TableState, Eviction]] = []
        for table in self._tables.all():
            policy, key = self._policy(table.definition), table.definition.key
            if policy.kind == "never":
                self._known.pop(key, None)
                continue
            known = self._known.setdefault(key, _LastWalk())
            if known.policy != policy:
                known.policy, known.due_s = policy, now_s
            if self._has_to_do(table, policy, known, now_s):
                due.append((known.due_s, table, policy))
        if not due:
            return None
        _, table, policy = min(due, key=lambda one: (one[0], one[1].definition.key))
        counts, k = self._known[table.definition.key].counts, self._parts.engine.k
        return _TableWalk(table, policy, PushCounts(counts.lowest if counts is not None else 0, max(k, 0)))

    def _has_to_do(self, table: TableState, policy: Eviction, known: _LastWalk, now_s: float) -> bool:
        if not table.n_rows:
            return False
        if self._has_above(_BEGIN, table, policy):
            return True
        if now_s < known.due_s or all(leaf.kind == "keep" for leaf in policy.parts):
            return False
        limits = self._limits(table, policy, known)
        return known.counts is None or any(limits.up_to(leaf) >= known.counts.lowest for leaf in policy.parts if leaf.kind != "keep")

    def _kept(self, policy: Eviction, definition: TableDef) -> dict[int, float]:
        """This shard's part of the rows of each `keep`, by its number of rows."""
        rows = {int(leaf.limit) for leaf in policy.parts if leaf.kind == "keep"}
        return {limit: limit * self._share(definition) for limit in rows}

    def _limits(self, table: TableState, policy: Eviction, known: _LastWalk, n_doomed: int = 0) -> EvictionLimits:
        n_rows = table.n_rows - n_doomed
        excess = {limit: max(0, n_rows - int(_AIM * kept)) for limit, kept in self._kept(policy, table.definition).items()}
        k, now_s = self._parts.engine.k, self._clock() + self._wall_ahead_s
        oldest = {limit: k if known.hot else -1 if known.counts is None else known.counts.oldest(n) for limit, n in excess.items()}
        return EvictionLimits(k, lambda days: self._ages.k_at(now_s - days * _DAY_S), excess, oldest)

    def _look(self, walk: _TableWalk) -> None:
        """Judge the next slice of rows."""
        table, known = walk.table, self._known.get(walk.table.definition.key, _LastWalk())
        reads = any(leaf.kind == "l2_below" for leaf in walk.policy.parts)
        ids, versions, next_ = table.portion(walk.at, n_rows=_SLICE_READ if reads else _SLICE_ROWS)
        pushed = self._ages.last_push(table.definition, ids, versions)
        limits = self._limits(table, walk.policy, known, walk.n_doomed)
        goes, why = judge(walk.policy, pushed, norms_of(table, ids, versions, self._read), limits)
        walk.counts.add(pushed[~goes])
        walk.at = next_
        rows = np.flatnonzero(goes)
        walk.doomed += [
            (ids[some], versions[some], why[some], pushed[some])
            for some in (rows[start : start + _ERASED_ROWS] for start in range(0, len(rows), _ERASED_ROWS))
        ]

    def _send(self, walk: _TableWalk, n_rows: int) -> None:
        portions = [walk.doomed.pop(0)]
        while walk.doomed and sum(len(ids) for ids, *_ in portions) + len(walk.doomed[0][0]) <= n_rows:
            portions.append(walk.doomed.pop(0))
        ids, versions, why, pushed = (np.concatenate(arrays) for arrays in zip(*portions, strict=True))
        definition = walk.table.definition
        walk.n_sent += 1
        rows = CheckedRows(definition, ids, np.empty((len(ids), 0), np.float32), versions, definition.optimizer.check_hyper({}))
        work = EvictionWork(ERASE, rows, EVICTED)
        self.sent, self._of_sent = work, (walk, why, pushed)
        self._parts.ingest.evict(work)

    def _end_portion(self, work: EvictionWork) -> None:
        assert self._of_sent is not None
        walk, why, pushed = self._of_sent
        self.sent = self._of_sent = None
        if work.unchanged is None:
            return
        definition, key = walk.table.definition, walk.table.definition.key
        for done in (self._done.setdefault(key, TableEvictions()), self._unsaid.setdefault(key, (0.0, TableEvictions()))[1]):
            done.add(walk.policy, why[work.unchanged], pushed[work.unchanged], definition.record.size_bytes)

    def _end_walk(self, walk: _TableWalk) -> None:
        now_s, table = self._clock(), walk.table
        known = self._known.get(table.definition.key, _LastWalk())
        known.hot = known.counts is not None and not walk.n_sent and self._has_above(_BEGIN, table, walk.policy)
        known.counts, known.due_s = walk.counts, now_s + _ROUND_S
        self._walk = None
        self._done.setdefault(table.definition.key, TableEvictions()).walks += 1
        self._say_what_went(now_s)

    def _say_what_went(self, now_s: float) -> None:
        """Write one line for each table of which walks have erased rows: of several walks within a minute together."""
        for key, (said_s, done) in self._unsaid.items():
            if not done.n_rows or now_s - said_s < _LOG_S:
                continue
            self._unsaid[key] = now_s, TableEvictions()
            by = ", ".join(f"{n:,} by {policy}" for policy, n in done.by_policy.items())
            said = f"{done.n_rows:,} rows erased by its policy ({by}), {done.size_bytes / 1e6:.1f} MB of records"
            log.info("table %s: %s; the one pushed longest ago was in %s", key, said, self._said_age(done.oldest))

    def _said_age(self, k: int) -> str:
        age_s = self.age_s(k)
        return f"batch {k}" + ("" if age_s is None else f", about {age_s / 3600:.1f} hours ago")

    def _policy(self, definition: TableDef) -> Eviction:
        return self._parts.registry.policies(definition.key).eviction

    def _share(self, definition: TableDef) -> float:
        """The part of a table's rows that is this shard's, evenly spread as they are."""
        groups, owners = definition.placement.n_groups, self._parts.maps.cluster_map.slot_shards
        slots = definition.placement.slots_of(np.arange(min(groups, N_SLOTS)) * max(1, groups // N_SLOTS))
        return float(np.mean(owners[slots] == self._parts.shard))

    # --- any thread ----------------------------------------------------------------------------------------------------------------

    def age_s(self, k: int) -> float | None:
        """Return how long ago a batch was applied, in seconds, at least; None where that is not known."""
        time_s = self._ages.time_of(k) if k >= 0 else 0
        return max(0.0, self._clock() + self._wall_ahead_s - time_s) if time_s else None

    def report(self) -> dict[str, TableEvictions]:
        """Return what this process has erased, by the table's key."""
        return dict(self._done)

    def described(self, definition: TableDef, done: TableEvictions, n_rows: int) -> dict[str, Any]:
        """Return a report as plain values."""
        return {
            "table": definition.name,
            "policy": str(self._policy(definition)),
            "rows": n_rows,
            "evicted": done.n_rows,
            "by_policy": dict(done.by_policy),
            "bytes": done.size_bytes,
            "oldest_batch": done.oldest,
            "oldest_s": self.age_s(done.oldest) or 0.0,
            "walks": done.walks,
        }

    def dry_run(self, table: TableState, deadline: Deadline) -> TableEvictions:
        """Return what a table's policy would send away now; nothing is erased, and rows that batches change meanwhile may be counted."""
        policy, known, would = self._policy(table.definition), _LastWalk(), TableEvictions()
        if policy.kind == "never":
            return would
        if self._kept(policy, table.definition):
            known.counts = PushCounts(0, max(self._parts.engine.k, 0))
            for _, _, pushed in self._slices(table, deadline):
                known.counts.add(pushed)
        for ids, versions, pushed in self._slices(table, deadline):  # of 32,768 rows: an operator waits, and no batch
            limits = self._limits(table, policy, known, would.n_rows)
            goes, why = judge(policy, pushed, norms_of(table, ids, versions, self._stored()), limits)
            would.add(policy, why[goes], pushed[goes], table.definition.record.size_bytes)
        return would

    def _slices(self, table: TableState, deadline: Deadline) -> Iterator[tuple[Ids, Ids, NDArray[np.int64]]]:
        for ids, versions in table.portions(n_rows=_SLICE_ROWS):
            if deadline.expired:
                raise DeadlineExceededError(f"table {table.definition.name!r}: not all rows were looked at within {deadline.timeout_s:g} s")
            yield ids, versions, self._ages.last_push(table.definition, ids, versions)


def norms_of(table: TableState, ids: Ids, versions: Ids, read: ReadRecords) -> Norms:
    """Return a function that reads the L2 norms of rows' weights; of one that is not as the index knows it, infinity."""
    record = table.definition.record

    def norms(rows: NDArray[np.intp]) -> NDArray[np.float64]:
        found = np.full(len(rows), np.inf)
        if len(rows):
            records, there = read(table, ids[rows])
            there &= record.versions(records) == versions[rows]
            found[there] = np.sqrt(np.square(record.weights(records[there]).astype(np.float64)).sum(axis=1))
        return found

    return norms
