"""The feed of a cluster: what its shards have changed, event by event, as an iterator. See docs/feed.md."""

from __future__ import annotations  # help() shows types as they are written here

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import to_caller
from kvemb.config import Config
from kvemb.connection import Connection
from kvemb.errors import InvalidInputError, UnknownTableError
from kvemb.feed.feed_messages import BEGIN, NOW, START, FeedPosition, FeedReply
from kvemb.process import ForkLock
from kvemb.protocol.message_format import TableRows
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef, check_table_name

if TYPE_CHECKING:  # gRPC is imported when a feed is opened
    from kvemb.client.all_shards import AllShards
    from kvemb.feed.change_feed import ChangeFeed

_ASYNC_SLICE_S = 0.5  # a thread that waits for an event cannot be cancelled: it looks up this often
_LEAST_READ_S = 5.0  # for the weights of an event
_DROP = "drop"
_NO_SLOTS: Mapping[int, NDArray[np.uint16]] = {}
ReadRows = Callable[[Sequence[tuple[TableDef, NDArray[np.uint64]]], float | None], list[tuple[NDArray[Any], NDArray[np.uint64]]]]


@dataclass(frozen=True, eq=False)
class FeedEvent:
    """One change that a shard tells.

    Args:
        kind: "apply", "assign", "erase": rows changed by a batch. "row": a row as the row log has it, where the journal does not reach.
            "caught-up": all of these are told. "epoch", "moved", "load", "drop": see docs/feed.md.
        shard: that changed it.
        epoch, k: of the batch; of other events those of the batch before.
        table: its name, "" for events of the whole shard.
        ids: [n] in the table's id_dtype.
        versions: uint64 [n], epoch << 48 | k of each row: as of the event; with weights, as they were read with them (0: no such row now).
        weights: float32 [n, dim] if they were asked for, read from storage when the event came: as of it, or newer.
        reason: of "erase": "evicted" by the table's policy, "dropped" with its table; "" where a program erased these ids, or the row log
            tells them, which knows no reasons.
        gone, came: of "moved": the slots that went to other shards, or came from them, by shard; uint16 [n] each.
    """

    kind: str
    shard: int
    epoch: int
    k: int
    table: str = ""
    ids: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.int64))
    versions: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    weights: NDArray[np.float32] | None = None
    reason: str = ""
    gone: Mapping[int, NDArray[np.uint16]] = field(default_factory=lambda: _NO_SLOTS)
    came: Mapping[int, NDArray[np.uint16]] = field(default_factory=lambda: _NO_SLOTS)


class ClusterFeed:
    """What the shards of a cluster change, as an iterator without an end; made by `Feeds.open`.

    One thread iterates, with `for` or `async for`; any may call `close`. Not fork-safe.

    Args:
        changes: of the shards.
        definition: returns a table's by its name, as it is now.
        read: reads the rows of an event, as `Connection.pull_known`; None: events carry no weights.
    """

    def __init__(self, changes: ChangeFeed, definition: Callable[[str], TableDef], read: ReadRows | None = None) -> None:
        self._changes, self._open, self._read = changes, definition, read
        self._tables: dict[str, TableDef] = {}  # as this feed has opened them: one that another process makes anew is another table
        self._position = dict(changes.begun)
        self._left = set[int]()  # shards that were told to their end
        self._epochs: dict[int, int] = {shard: at.epoch for shard, at in changes.begun.items() if at.epoch}
        self._reply: tuple[int, FeedReply] | None = None  # whose events wait; its position holds when the last of them is handed out
        self._waiting: deque[FeedEvent] = deque()
        self._lock = ForkLock()

    @property
    def position(self) -> dict[int, FeedPosition]:
        """How far each shard's events were handed out: `cluster.feed.open(from_=…)` resumes there, in this process or another one."""
        return dict(self._position)

    def has_told(self, heads: Mapping[int, int]) -> bool:
        """Return whether all was handed out up to these batches, a k of each shard; of one that has joined, the feed may not know yet."""
        position = self._position
        return all(position[shard].k >= k if shard in position else shard in self._left for shard, k in heads.items())

    @property
    def away_since_s(self) -> float | None:
        """Since when, on the monotonic clock, a shard has not been heard: it may have changed rows meanwhile. None while all are."""
        return self._changes.away_since_s

    def take(self, timeout_s: float | None = None) -> FeedEvent | None:
        """Return the next event; None when there was none within the timeout, or the feed was closed.

        Raises:
            FeedBehindError: what changed is not known any more; the message says how to begin again.
            ShardUnavailableError: a shard was away for longer than it may.
            StorageError: the event's weights could not be read within the timeout (5 s at least); the next call tries again.
        """
        with self._lock:
            if not self._has_next(timeout_s):
                return None
            event = self._waiting.popleft()
            if not self._waiting:
                self._advance()
            return event

    def close(self) -> None:
        """End the feed: who iterates comes to the end. Idempotent."""
        self._changes.close()

    def __iter__(self) -> Iterator[FeedEvent]:
        while (event := self.take()) is not None:
            yield event

    async def __aiter__(self) -> AsyncIterator[FeedEvent]:
        while not self._changes.closed:
            # The thread goes on if this is cancelled: so it hands nothing out. Another task may have been first.
            if await asyncio.to_thread(self._has_next, _ASYNC_SLICE_S) and (event := self.take(0)) is not None:
                yield event

    def __enter__(self) -> ClusterFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _has_next(self, timeout_s: float | None) -> bool:
        """Whether there is an event, within the timeout; with its weights. Raises as `take`, and nothing is lost then."""
        with self._lock:
            while not self._waiting:
                if self._reply is None:
                    self._reply = self._changes.take(timeout_s)
                if self._reply is None:
                    return False
                self._waiting.extend(self._events(*self._reply))
                if not self._waiting:
                    self._advance()
            event = self._waiting[0]
            if self._read is not None and event.weights is None and len(event.ids) and event.kind != "erase":
                self._waiting[0] = self._with_weights(event, self._read, None if timeout_s is None else max(timeout_s, _LEAST_READ_S))
            return True

    def _events(self, shard: int, reply: FeedReply) -> list[FeedEvent]:
        """The events of a reply, one per table."""
        about = FeedEvent(reply.kind, shard, reply.epoch, reply.k, reason=str(reply.details.get("reason", "")))
        events = list[FeedEvent]()
        if reply.epoch > self._epochs.get(shard, reply.epoch):
            events.append(FeedEvent("epoch", shard, reply.epoch, reply.k))
        for rows in reply.tables:
            events.append(replace(about, table=rows.table, ids=self._ids(rows), versions=_versions(rows, reply)))
        if not reply.tables and reply.kind not in (BEGIN, "apply", "assign", "erase"):
            gone, came = ({int(to): np.frombuffer(raw, "<u2") for to, raw in reply.details.get(name, ())} for name in ("gone", "came"))
            events.append(replace(about, table=str(reply.details.get("table", "")), gone=gone, came=came))
        if reply.kind == _DROP:
            self._tables.pop(events[-1].table, None)
        self._epochs[shard] = max(reply.epoch, self._epochs.get(shard, 0))
        return events

    def _advance(self) -> None:
        """Note the position of the reply whose last event is handed out."""
        assert self._reply is not None
        (shard, reply), self._reply = self._reply, None
        if not reply.whole or reply.kind == BEGIN:
            return
        self._position[shard] = reply.position
        for taker, _ in reply.details.get("gone", ()):
            self._position.setdefault(int(taker), FeedPosition(0, 0, reply.serial))
            self._left.discard(int(taker))
        if reply.details.get("left"):
            del self._position[shard]
            self._left.add(shard)

    def _table(self, name: str) -> TableDef:
        if name not in self._tables:
            self._tables[name] = self._open(name)
        return self._tables[name]

    def _ids(self, rows: TableRows) -> NDArray[Any]:
        try:
            return to_caller(rows.ids, self._table(rows.table).id_dtype)
        except UnknownTableError:  # dropped since
            return rows.ids.view(np.int64)

    def _with_weights(self, event: FeedEvent, read: ReadRows, timeout_s: float | None) -> FeedEvent:
        try:
            [(weights, versions)] = read([(self._table(event.table), event.ids.view(np.uint64))], timeout_s)
        except UnknownTableError:  # dropped since
            return event
        return replace(event, weights=weights, versions=versions)


class Feeds:
    """The feed of an open cluster, as its users see it: `cluster.feed`. Thread-safe."""

    def __init__(self, config: Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def open(
        self,
        tables: Iterable[str] | None = None,
        *,
        from_: str | Mapping[int, Sequence[int]] = "now",
        weights: bool = False,
        max_mb: float = 16.0,
    ) -> ClusterFeed:
        """Return what the shards change from now on, or from an earlier position, event by event; see docs/feed.md.

        Every acknowledged batch is told once it is in storage, in order, without gaps. After a restart of a shard or of the subscriber,
        what is told again has the versions it had.

        Args:
            tables: names of those that are wanted, also of tables that are created later; None for all.
            from_: "now": what is pushed after this call. "start": every row that there is, then what changes. Or the `position` of an
                earlier feed, or (epoch, k) by shard: what changed after that.
            weights: read the rows of each event from storage.
            max_mb: memory, per shard, for events that are not taken yet; a shard whose subscriber takes nothing for long ends its stream,
                which is opened again by itself.

        Raises:
            InvalidInputError: from_, or max_mb, is none of these.
            ShardUnavailableError: a shard did not answer.

        Example:
            >>> import kvemb
            >>> with kvemb.local() as url, kvemb.connect(url) as cluster:
            ...     table = cluster.create_table("user", dim=2, optimizer=kvemb.optim.sgd(lr=1.0))
            ...     with cluster.feed.open() as feed:
            ...         ack = table.push([7, 3], np.ones((2, 2)))
            ...         event = feed.take(timeout_s=30)
            >>> event.kind, event.table, event.ids.tolist()
            ('apply', 'user', [3, 7])
        """
        shards = self._connection.require_shards("feed")
        if isinstance(tables, str):
            raise InvalidInputError(f"feed: tables is the text {tables!r}; give a list of names: [{tables!r}], or None for all tables")
        names = None if tables is None else tuple(map(check_table_name, tables))
        read = self._connection.pull_known if weights else None
        feed = open_feed(
            shards.servers,
            shards.questions.get_table,
            names,
            from_,
            read=read,
            max_mb=max_mb,
            away_timeout_s=self._config.servers.away_timeout_s,
        )
        self._connection.closes_with.add(feed)
        return feed


def open_feed(
    servers: AllShards,
    definition: Callable[[str], TableDef],
    names: tuple[str, ...] | None,
    from_: str | Mapping[int, Sequence[int]],
    *,
    max_mb: float,
    away_timeout_s: float,
    read: ReadRows | None = None,
) -> ClusterFeed:
    """Open a feed; see `Feeds.open`."""
    from kvemb.feed.change_feed import ChangeFeed

    if not 0 < max_mb < 1 << 20:
        raise InvalidInputError(f"max_mb is {max_mb}; give a number of megabytes above 0")
    if from_ not in (NOW, START) and not (isinstance(from_, Mapping) and from_):
        raise InvalidInputError(f'from_ is {from_!r}; give "now", "start", or the position of an earlier feed, by shard')
    start = from_ if isinstance(from_, str) else dict(_position(shard, at) for shard, at in from_.items())
    changes = ChangeFeed(servers, start, names or (), max_bytes=int(max_mb * (1 << 20)), away_timeout_s=away_timeout_s)
    return ClusterFeed(changes, definition, read)


def _position(shard: int | str, at: Sequence[int]) -> tuple[int, FeedPosition]:
    """A shard and its position; JSON has made text of the number."""
    numbers = [*at] if isinstance(at, list | tuple) else []
    if not str(shard).isdecimal() or not 2 <= len(numbers) <= 5 or not all(type(one) is int and 0 <= one < 1 << 63 for one in numbers):
        raise InvalidInputError(f"from_[{shard!r}] is {at!r}; give (epoch, k) of each shard, or what ClusterFeed.position has")
    return int(shard), FeedPosition(*numbers)


def _versions(rows: TableRows, reply: FeedReply) -> NDArray[np.uint64]:
    return rows.versions if len(rows.versions) else np.full(len(rows.ids), make_version(reply.epoch, reply.k), np.uint64)
