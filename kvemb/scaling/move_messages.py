"""The messages of moves of slots: plans, their progress, and the knowledge of rows that one shard hands over to another. Pure."""

from dataclasses import field
from typing import Any

from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import Empty, MoveStatusReply, WatermarksReply
from kvemb.protocol.verb import ADMINS, EVERYBODY, SHARDS, Verb


class MoveRequest(Message):
    """Begin to move slots between nodes, or between shards (shard 0); answered once the plan is on the nodes."""

    version: int
    slot_nodes: bytes
    join: list[str]
    leave: list[str]
    max_bytes_per_s: int
    slot_shards: bytes = b""
    join_shards: list[str] = field(default_factory=list)
    leave_shards: list[int] = field(default_factory=list)


class ReplaceNodeRequest(Message):
    """Let a node that is gone for good be at another, empty address (shard 0); the shards bring its rows back there."""

    version: int
    old: str
    new: str


class AbortMoveRequest(Message):
    """Take the plan under way back (shard 0)."""

    why: str


class SlotSizesReply(Message):
    """This shard's rows in each slot: uint64 [16384] rows, and bytes of their records, least significant byte first."""

    rows: bytes
    record_bytes: bytes


class SlotEntriesRequest(Message):
    """A shard that takes slots over asks the one that has them for its knowledge of their rows, a page at a time."""

    version: int
    shard: int
    start: int


class SlotEntriesReply(Message):
    """A page of that knowledge: ids and versions are uint64, least significant byte first, ascending within a table."""

    ready: bool
    epoch: int
    tables: list[dict[str, Any]]
    ids: bytes
    versions: bytes
    trainers: list[str] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)


class WatermarksRequest(Message):
    """Shard 0 asks a shard that leaves how far it has taken each trainer's pushes, by this version of the cluster map."""

    version: int


MOVE_SLOTS = Verb("MoveSlots", MoveRequest, MoveStatusReply, ADMINS, waits=True)
REPLACE_NODE = Verb("ReplaceNode", ReplaceNodeRequest, MoveStatusReply, ADMINS, waits=True)
ABORT_MOVE = Verb("AbortMove", AbortMoveRequest, MoveStatusReply, ADMINS, waits=True)
MOVE_NEWS = Verb("MoveNews", Empty, Empty, SHARDS)
SLOT_SIZES = Verb("SlotSizes", Empty, SlotSizesReply, EVERYBODY, waits=True)
SLOT_ENTRIES = Verb("SlotEntries", SlotEntriesRequest, SlotEntriesReply, SHARDS, waits=True)
WATERMARKS = Verb("Watermarks", WatermarksRequest, WatermarksReply, SHARDS)
