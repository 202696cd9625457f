"""What one subscriber is told by a shard: the journal's batches in order, once they are applied; rows of the row log where it is behind.

The feed reads files that are there anyway, with descriptors of its own, so an apply does nothing for it but to move a mark. A batch is
told when the mark has reached it: all of its rows are in storage then. The journal is cut by flushes. A subscriber that is behind its
beginning is told the rows of the row log that changed since, in the order of keys, and then the journal from the log's cut on. Nothing is
kept for a subscriber: it says itself where it goes on.

A row of the log may be newer than the cut, since it was written while training went on, or since it came from another shard with an older
version of ours. It is told with the cut's version at most: later batches of it follow from the journal, and its version never goes back.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import FeedBehindError, JournalDamagedError, ShardUnavailableError, to_wire
from kvemb.feed.feed_messages import BEGIN, CAUGHT_UP, MOVE, NOW, POSITION, REFUSED, ROW, START, FeedReply, FeedRequest
from kvemb.protocol.message_format import TableRows
from kvemb.schema.record import make_version, split_version
from kvemb.schema.table_def import TableDef

from ..apply.shard_events import ShardEvents
from ..journal import BatchEntry, EventEntry, Position, decode_entry
from ..journal.batch_search import before_move, behind_version, first_batch
from ..journal.entry import ALTER, LOAD, MOVED, Slots
from ..journal.write_ahead_log import AppliedMark
from ..model.batch import ERASE
from ..recovery.shard_parts import ShardParts
from ..row_log.run_merge import merged
from ..row_log.run_set import RunView
from ..row_log.sorted_run import ROWS

PIECE_IDS = 1 << 20  # of one reply; with their versions 16 MB
_LOOK_S = 1.0
_TRIES = 5
Ids = NDArray[np.uint64]
T = TypeVar("T")


class _BehindError(Exception):
    """The journal does not have the next batch any more: the row log is to be told. Internal."""


class ShardChanges:
    """One subscriber's stream. `replies` is for one thread, `end` for any."""

    def __init__(self, parts: ShardParts, mark: AppliedMark, events: ShardEvents, request: FeedRequest) -> None:
        self._parts, self._mark, self._events, self._request = parts, mark, events, request
        self._journal, self._tables, self._registry = parts.fenced_log.journal, frozenset(request.tables), parts.registry
        self._at = Position(request.segment, request.offset)
        self._epoch, self._k, self._serial = request.epoch, request.k, request.serial or 1  # the first map of a cluster has 1
        self._foreign_until, self._owned = 0, events.told[1]
        self._ended = False
        # Alterations that are over: of a stream from here on, all rows of the altered tables are told after their events.
        self._over = frozenset(self._registry.known_keys) if request.start in (NOW, START) else frozenset[str]()

    def end(self) -> None:
        """End the stream soon."""
        self._ended = True
        self._mark.wake()

    def replies(self) -> Iterator[FeedReply]:
        """Yield what is to be told, without an end."""
        try:
            above = self._begin()
            yield self._reply(BEGIN)
            while not self._ended:
                try:
                    if above is not None:
                        yield from self._row_log(above)
                        above = None
                    yield from self._follow()
                except _BehindError:
                    above = self._version
        except (FeedBehindError, JournalDamagedError) as error:
            yield replace(self._reply(REFUSED), details=to_wire(error))

    @property
    def _version(self) -> int:
        return make_version(self._epoch, self._k) if self._k else 0

    # --- where to begin --------------------------------------------------------------------------------------------------------------

    def _begin(self) -> int | None:
        """Find the place in the journal; return the version above which rows of the row log are to be told first, if any are."""
        start, engine = self._request.start, self._parts.engine
        if start in (NOW, START) and any(self._wants(table) for table in self._registry.altering.values()):
            raise ShardUnavailableError(f"shard {self._parts.shard}: {self._registry.unfinished}; ask again")
        if start == NOW:
            self._k, self._at = self._mark.now
            self._epoch, (self._serial, _) = split_version(engine.version)[0], self._events.told
            return None
        if start == START or (start == POSITION and not (self._k or self._at.segment)):
            self._foreign_until = self._mark.now[0]
            self._epoch, self._k, self._at, self._serial = engine.epoch, 0, Position(0, 0), self._events.told[0]
            return 0
        if start == MOVE:
            self._begin_at_move()
            return None
        if self._k > self._mark.now[0]:
            raise self._refused(f"this shard has applied {self._mark.now[0]} batches: it has gone back, or is another cluster's")
        if not self._at.segment or self._at.segment < self._journal.start.segment:
            try:
                self._at = self._find()
            except _BehindError:
                return self._version
        return None

    def _begin_at_move(self) -> None:
        settled = self._events.told[0]
        found = self._read(lambda: before_move(self._journal, self._serial, self._parts.registry.find_key))
        if found is None and settled < self._serial:
            raise ShardUnavailableError(f"shard {self._parts.shard}: slots of move {self._serial} are still on their way; ask again")
        if found is None:
            raise self._refused(f"its journal does not have move {self._serial} any more")
        self._at, self._k = found
        self._epoch, self._serial = self._parts.engine.epoch, self._serial - 1
        if not self._k:
            self._k = (first_batch(self._journal) or self._mark.now[0] + 1) - 1

    def _find(self) -> Position:
        """The place in the journal after the subscriber's last batch."""
        found = self._read(lambda: behind_version(self._journal, self._version))
        if found is not None:
            if found[1] != self._k:
                raise self._refused(f"its batch {self._k} of epoch {self._epoch} is not in this shard's journal: the shard has gone back")
            return found[0]
        first = self._read(lambda: first_batch(self._journal))
        if (self._mark.now[0] + 1 if first is None else first) != self._k + 1:
            raise _BehindError
        return self._journal.start

    def _read(self, look: Callable[[], T]) -> T:
        """Look at the journal, again where a segment was discarded meanwhile."""
        for _ in range(_TRIES):
            start = self._journal.start
            try:
                return look()
            except JournalDamagedError:
                if self._journal.start == start:
                    raise
        raise ShardUnavailableError(f"shard {self._parts.shard}: its journal is being cut; ask again")

    # --- the journal -----------------------------------------------------------------------------------------------------------------

    def _follow(self) -> Iterator[FeedReply]:
        """Tell the journal from the present place on."""
        while not self._ended:
            n_changes = self._mark.n_changes
            self._events.look()
            try:
                for after, payload in self._journal.read(self._at):
                    entry = decode_entry(payload, self._parts.registry.find_key)
                    if isinstance(entry, BatchEntry):
                        yield from self._batch(entry, after)
                    elif isinstance(entry, EventEntry):
                        yield from self._event(entry, after)
                    else:
                        self._at = after
                    if self._ended:
                        return
            except JournalDamagedError as error:
                if self._at.segment >= self._journal.start.segment:
                    raise
                raise _BehindError from error
            self._mark.wait(n_changes, _LOOK_S)  # a new map wakes nobody

    def _batch(self, entry: BatchEntry, after: Position) -> Iterator[FeedReply]:
        epoch, k = split_version(entry.version)
        if k <= self._k:  # a failed sync has moved its entry after a place that was noted before
            self._at = after
            return
        if k != self._k + 1:
            raise _BehindError
        while self._mark.now[0] < k:
            n_changes = self._mark.n_changes
            if self._ended:
                return
            if self._mark.now[0] < k:
                self._mark.wait(n_changes, _LOOK_S)
        tables = [
            _rows(table.definition, self._ours(table.definition, table.ids))
            for table in entry.batch.tables
            if self._wants(table.definition)
        ]
        pieces = list(_pieces([rows for rows in tables if len(rows.ids)]))
        details = {"reason": entry.batch.reason} if entry.batch.reason else {}
        for piece in pieces[:-1]:
            yield replace(self._reply(entry.batch.kind, whole=False), epoch=epoch, k=k, tables=piece, details=details)
        self._epoch, self._k, self._at = epoch, k, after
        yield replace(self._reply(entry.batch.kind), tables=pieces[-1] if pieces else [], details=details)

    def _ours(self, definition: TableDef, ids: Ids) -> Ids:
        """Those ids that the row log would tell, too: others have gone to another shard, which tells them."""
        if self._k >= self._foreign_until:
            return ids
        return ids[self._owned[definition.placement.slots(ids)]]

    def _event(self, event: EventEntry, after: Position) -> Iterator[FeedReply]:
        if event.name == MOVED and event.serial <= self._serial:  # a stream from the start begins behind it, and its journal before
            self._at = after
            return
        details = {"gone": _slots(event.gone), "came": _slots(event.came), "left": event.left} if event.name == MOVED else {}
        if event.name not in (MOVED, LOAD):
            definition = self._parts.registry.find_key(event.table)
            if event.name == ALTER and self._names(definition) and event.table not in self._over:
                raise self._refused(f"table {definition.name!r} was altered, or is being altered")
            if event.name == ALTER or not self._wants(definition):
                self._at = after
                return
            details = {"table": definition.name}
        if event.name == LOAD:  # until its rows are told, the subscriber is where it was
            yield replace(self._reply(LOAD, whole=False), details=details)
            yield from self._row_log(0, behind=after)
            return
        self._at, self._serial = after, max(self._serial, event.serial)  # only a move has one
        yield replace(self._reply(event.name), details=details)

    # --- the row log -----------------------------------------------------------------------------------------------------------------

    def _row_log(self, above: int, behind: Position | None = None) -> Iterator[FeedReply]:
        """Tell the rows that have changed since a version, and go on in the journal after the log's cut, and after a place.

        Raises:
            FeedBehindError: that cannot be told: rows have been erased, or have gone to other shards, of which nothing is known any more.
        """
        view, at, k = self._cut()
        if behind is None:
            self._require_told(above)
        for logged in self._parts.saved.now.tables:
            definition = logged.definition
            if self._wants(definition):
                for kind, ids, versions in _rows_above(view, definition, above, self._owned):
                    # without a cut, all of these have come from other shards, and ours have a higher epoch
                    versions = np.minimum(versions, np.uint64(view.cut)) if view.cut else versions
                    told = replace(_rows(definition, ids), versions=versions)
                    yield replace(self._reply(kind, whole=False), tables=[told])
        if behind is not None and behind > at:
            at = behind
        if k > self._k:
            self._epoch, self._k = split_version(view.cut)[0], k
        self._at = at
        yield self._reply(CAUGHT_UP)

    def _cut(self) -> tuple[RunView, Position, int]:
        """The row log, the place in the journal after its cut, and the k of the last batch before that."""
        for _ in range(_TRIES):
            view = self._parts.runs.view
            found = self._read(lambda: behind_version(self._journal, view.cut))  # noqa: B023
            if found is None:
                first, start = self._read(lambda: first_batch(self._journal)), self._journal.start
                found = start, (self._mark.now[0] if first is None else first - 1)
            if self._parts.runs.view.cut == view.cut:  # nothing after the cut was discarded meanwhile
                return view, *found
        raise ShardUnavailableError(f"shard {self._parts.shard}: its row log is being written; ask again")

    def _require_told(self, above: int) -> None:
        """Refuse where the row log, as it is now, does not know what the subscriber lacks."""
        serial, self._owned = self._events.told
        if serial != self._serial and not above:
            raise ShardUnavailableError(f"shard {self._parts.shard}: slots have moved while its feed began; ask again")
        if serial != self._serial:
            raise self._refused("slots have moved since, and the journal does not have what changed before")
        for table in self._parts.saved.now.tables:
            if table.erased_since > above > 0 and self._wants(table.definition):
                raise self._refused(f"which rows of table {table.definition.name!r} were erased since is not known any more")

    # --- replies ---------------------------------------------------------------------------------------------------------------------

    def _names(self, definition: TableDef) -> bool:
        return not self._tables or definition.name in self._tables

    def _wants(self, definition: TableDef) -> bool:
        return self._names(definition) and self._registry.is_told(definition.key)

    def _reply(self, kind: str, *, whole: bool = True) -> FeedReply:
        return FeedReply(kind, whole, self._epoch, self._k, self._serial, self._at.segment, self._at.offset)

    def _refused(self, why: str) -> FeedBehindError:
        return FeedBehindError(
            f"shard {self._parts.shard}: the feed cannot go on from batch {self._request.k} of epoch {self._request.epoch}: {why}. Begin "
            'again with from_="start", which tells every row that there is; rows that it does not tell are gone.'
        )


def _rows(definition: TableDef, ids: Ids) -> TableRows:
    return TableRows(definition.name, definition.schema, ids, np.empty((len(ids), 0), np.float32))


def _pieces(tables: list[TableRows]) -> Iterator[list[TableRows]]:
    """Cut a batch into replies: small tables together, a large one in pieces."""
    together: list[TableRows] = []
    for rows in tables:
        for start in range(0, len(rows.ids), PIECE_IDS):
            piece = rows.take(slice(start, start + PIECE_IDS))
            if together and sum(len(one.ids) for one in together) + len(piece.ids) > PIECE_IDS:
                yield together
                together = []
            together.append(piece)
    if together:
        yield together


def _rows_above(view: RunView, definition: TableDef, above: int, owned: NDArray[np.bool_]) -> Iterator[tuple[str, Ids, Ids]]:
    """Yield (kind, ids, versions) of the rows that changed, or are gone, since a version, some ten thousand at a time."""
    waiting: dict[str, list[tuple[Ids, Ids]]] = {ROW: [], ERASE: []}
    for kind, keys, versions, _ in merged(view.of(definition), forget_up_to=0, records=False):
        ids = definition.order.ids(keys)
        some = owned[definition.placement.slots(ids)]
        if above:
            some &= versions > np.uint64(above)
        of_kind = waiting[ROW if kind == ROWS else ERASE]
        of_kind.append((ids[some], versions[some]))
        if sum(len(one) for one, _ in of_kind) >= PIECE_IDS // 8:
            yield ROW if kind == ROWS else ERASE, *_joined(of_kind)
            of_kind.clear()
    for name, of_kind in waiting.items():
        if of_kind and len((joined := _joined(of_kind))[0]):
            yield name, *joined


def _joined(parts: list[tuple[Ids, Ids]]) -> tuple[Ids, Ids]:
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([versions for _, versions in parts])


def _slots(moved: Slots) -> list[list[object]]:
    return [[shard, np.array(slots, "<u2").tobytes()] for shard, slots in moved]
