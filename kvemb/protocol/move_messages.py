"""The messages of moves of slots: plans, their progress, and the knowledge of rows that one shard hands over to another. Pure."""

from dataclasses import field
from typing import Any

from kvemb.protocol.message_format import Message


class MoveRequest(Message):
    """Begin to move slots between nodes, or between shards (shard 0); answered once the plan is on the nodes.

    Args:
        version: of the cluster map that it was worked out from.
        slot_nodes: runs of slots, see `kvemb.schema.slots.runs_of`; new nodes have the numbers behind those there are. b"" for shards.
        join: addresses of new nodes.
        leave: addresses of nodes that are to hold no rows in the end.
        max_bytes_per_s: of copies, all shards together; 0 for no bound.
        slot_shards: runs of slots likewise, of a move between shards; b"" for nodes.
        join_shards: addresses of new shards.
        leave_shards: numbers of shards that are to write no slots in the end.
    """

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


class MoveStatusReply(Message):
    """How far a plan is, as shard 0 knows it.

    Args:
        cluster_map: its bytes.
        reports: of each shard, b"" where it has said nothing of this map. While nothing moves shard 0's says why the last move was taken
            back.
        places: the address of every node number, "" of those that are gone.
    """

    cluster_map: bytes
    reports: list[bytes]
    places: list[str]


class SlotSizesReply(Message):
    """This shard's rows in each slot: uint64 [16384] rows, and bytes of their records, least significant byte first."""

    rows: bytes
    record_bytes: bytes


class SlotEntriesRequest(Message):
    """A shard that takes slots over asks the one that has them for its knowledge of their rows, a page at a time.

    Args:
        version: of the cluster map whose plan says so.
        shard: the one that asks.
        start: how many rows it has had of this version already.
    """

    version: int
    shard: int
    start: int


class SlotEntriesReply(Message):
    """A page of that knowledge.

    Args:
        ready: whether the shard follows that version and, where they are to be final, has written all that it had taken; else ask again.
        epoch: of the shard that answers.
        tables: of each its "definition", how often it was applied there ("step"), and how many "rows" are handed over, in their order.
        ids, versions: uint64, least significant byte first; ascending within a table.
        trainers, incarnations: of the members of a sync job of which every trainer has been here; none of another job.
    """

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


class WatermarksReply(Message):
    """These, as `paramserver.moves.left_sessions` keeps them; not `ready` while the shard may still take pushes."""

    ready: bool
    sessions: bytes


class LeftSessionsRequest(Message):
    """A process given the number of a departed shard asks shard 0 which pushes that shard took; answered by a `WatermarksReply`."""

    shard: int


class LeftSessionRequest(Message):
    """A trainer asks shard 0 which of its pushes a shard that has left took; answered by a `HelloReply`."""

    shard: int
    trainer: str
    incarnation: int
