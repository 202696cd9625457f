"""The messages of the feed: a subscriber says where to begin, and a shard tells one change after the other. Pure."""

from dataclasses import field
from typing import Any, NamedTuple

from kvemb.protocol.message_format import Message, TableRows
from kvemb.protocol.verb import EVERYBODY, Verb

NOW, START, POSITION, MOVE = "now", "start", "position", "move"
BEGIN, ROW, CAUGHT_UP, REFUSED = "begin", "row", "caught-up", "refused"


class FeedPosition(NamedTuple):
    """How far a subscriber is with one shard: all up to batch k of this epoch was told."""

    # epoch, k: of the last batch told
    epoch: int
    k: int
    serial: int = 0  # of the last move of slots that was told. With epoch 0 instead: nothing was told, and the feed begins with this move.
    # segment, offset: after the last entry told, in the shard's journal; 0 where that is to be found from k
    segment: int = 0
    offset: int = 0


class FeedRequest(Message):
    """Subscribe to a shard's changes, of the tables of these names; [] for all."""

    start: str
    tables: list[str]
    epoch: int = 0
    k: int = 0
    serial: int = 0
    segment: int = 0
    offset: int = 0


class FeedReply(Message):
    """One change, or a piece of it."""

    kind: str
    whole: bool
    epoch: int
    k: int
    serial: int
    segment: int
    offset: int
    tables: list[TableRows] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> FeedPosition:
        return FeedPosition(self.epoch, self.k, self.serial, self.segment, self.offset)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays, about."""
        return 256 + sum(rows.size_bytes for rows in self.tables)


FEED = Verb("Feed", FeedRequest, FeedReply, EVERYBODY, streams=True)
