"""The messages by which operators look at a shard. Pure."""

from dataclasses import field

from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import Empty
from kvemb.protocol.verb import EVERYBODY, Verb


class ShowRowRequest(Message):
    """Ask for the shard's knowledge of one row. The id as uint64."""

    table: str
    id: int


class ShowRowReply(Message):
    """One row as its shard knows it between two batches, and the trainers of its last batch; [] where the journal has it no more."""

    version: int
    cached: bytes
    k: int
    trainers: list[str] = field(default_factory=list)


class ExamineReply(Message):
    """A shard's process and host, as `kvemb doctor` wants to know them."""

    version: str
    now_s: float
    shards: list[str]
    nodes: list[str]
    durability: str
    sync_s: float
    disk_free: int
    disk_bytes: int
    open_files: int
    most_files: int
    journal_max_bytes: int
    lacks: str = ""


SHOW_ROW = Verb("ShowRow", ShowRowRequest, ShowRowReply, EVERYBODY, repeatable=True, waits=True)
EXAMINE = Verb("Examine", Empty, ExamineReply, EVERYBODY, repeatable=True, waits=True)
