"""The messages between trainers and parameter servers, and the verbs that they belong to. Those of a capability are in its folder. Pure."""

from dataclasses import field
from typing import Any

from kvemb.errors import MessageError
from kvemb.protocol.message_format import ChangedRowsBlock, Message, TableRows
from kvemb.protocol.verb import ADMINS, EVERYBODY, SHARDS, TRAINERS, WRITERS, Verb

SERVICE = "kvemb.ParameterServer"
MAX_PART_BYTES = 16 << 20
"""Of the arrays in one message of a push; rows that the trainer holds may take as much again."""
MAX_REQUEST_BYTES = 2 * MAX_PART_BYTES + (4 << 20)
"""The longest message that a shard takes."""
_MOST_ROWS = 1 << 48


class Empty(Message):
    """A request or reply without fields."""


class HelloRequest(Message):
    """A trainer introduces itself to a shard before its first push; incarnation 0 asks shard 0 to issue one."""

    trainer: str
    incarnation: int
    cluster_id: bytes
    map_serial: int


class HelloReply(Message):
    """The incarnation in force and the last sequence this shard has accepted from it (0 = none).

    first_step is the number of the sync step that this shard awaits from the trainer; 0 in async mode, and while it is not known.
    tables_serial is that of the registry of tables, as far as this shard knows; load_serial that of the last load that it has carried out.
    """

    incarnation: int
    last_sequence: int
    mode: str
    first_step: int = 0
    tables_serial: int = 0
    load_serial: int = 0


class PushPart(Message):
    """The part of one push for one shard, or a piece of it where it is large."""

    trainer: str
    incarnation: int
    sequence: int
    step: int
    more: bool
    tables: list[TableRows]
    digest: int
    prefetched: list[TableRows] = field(default_factory=list)
    map_serial: int = 1
    tables_serial: int = 0
    load_serial: int = -1


class PushReply(Message):
    """State of one part: "accepted", then "applied"; or "failed" with an error.

    A part with prefetched rows may hear "released" between these: its batch is computed and in the journal, and not in storage yet.
    "released" then has all fields of the outcome, and the changed rows; the outcome comes without them.

    Args:
        changed_rows: for each table of the part's prefetched rows those that changed; [] when it has none, and when it is not known. Then
            the part was answered before (perhaps by a process that was killed since), or storage did not give the rows. Pull them then.
    """

    sequence: int
    state: str
    k: int = 0
    changed: float = -1.0
    elapsed: int = 0
    error: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    changed_rows: list[ChangedRowsBlock] = field(default_factory=list)
    tables_serial: int = 0
    held_back: int = 0


class Reply(Message):
    """Reply of every unary call: an error, or the encoded message of the call's own reply type."""

    error: dict[str, str]
    body: bytes


class DescribeReply(Message):
    """The facts that a client needs: identity, mode, the node markers' cluster id, and the registry's tables (as plain dicts)."""

    cluster: str
    cluster_id: bytes
    shard: int
    n_shards: int
    mode: str
    trainers: int
    tables: list[dict[str, Any]]


class CreateTableRequest(Message):
    """Create a table; exist_ok accepts an existing one of the same identity, which keeps its policies."""

    table: dict[str, Any]
    exist_ok: bool
    policies: dict[str, Any] = field(default_factory=dict)


class TableReply(Message):
    """The definition of a table as the registry has it, its newest policies, and the registry's serial; {} and 0 of an older release.

    load_serial is that of the newest load, if that has the table (GetTable with a schema).
    """

    table: dict[str, Any]
    policies: dict[str, Any] = field(default_factory=dict)
    tables_serial: int = 0
    load_serial: int = 0


class SetPoliciesRequest(Message):
    """Change policies of a table, those that are given: shard 0. With a serial: know the registry as of it, any shard."""

    table: str
    policies: dict[str, Any]
    tables_serial: int = 0


class RowsRequest(Message):
    """assign (rows given) or erase (dim 0): applied in order with pushes, answered once applied, or after timeout_s."""

    rows: TableRows
    timeout_s: float


class TableRequest(Message):
    """Ask about one table by name; the empty name means all of them (flush).

    schema is that of rows which a caller has (GetTable): asked for is what their table is now. -1: whatever has the name.
    """

    table: str
    schema: int = -1


class FlushRequest(Message):
    """Wait until everything this shard accepted before the call is applied; at most timeout_s."""

    timeout_s: float


class FlushReply(Message):
    """All is applied. left_out names pushes not waited for, as their sync step is incomplete, and the missing trainers; "" for none."""

    left_out: str


class CompareRequest(Message):
    """Compare rows of this shard's with storage and restore those that differ; answered with their number. Ids are raw '<u8' bytes.

    The schema tells a table from an earlier one of its name; -1 asks about the present one, of any schema.
    """

    table: str
    ids: bytes
    schema: int = -1


class EraseTableRequest(Message):
    """Erase rows of a table that is being dropped, as many as one batch takes."""

    key: str
    timeout_s: float


class EraseTableReply(Message):
    """How many rows of the table were erased, and how many this shard still has."""

    n_erased: int
    n_left: int


class CountReply(Message):
    """How many rows: the answer to Count, Erase and Compare."""

    n_rows: int

    def __post_init__(self) -> None:
        if not 0 <= self.n_rows <= _MOST_ROWS:
            raise MessageError(f"malformed message: CountReply.n_rows: got {self.n_rows}, expected 0 to {_MOST_ROWS}")


class StepReply(Message):
    """How often the optimizer was applied to a table on one shard, and to how many rows since the shard's process started."""

    step: int
    rows_applied: int = 0


class IdsRequest(Message):
    """List a table's ids in the order of their keys, from the first one after the id `after` (inclusive when `first`), at most `limit`."""

    table: str
    first: bool
    after: int
    limit: int


class IdsReply(Message):
    """Ids as raw '<u8' bytes, in the order of their keys (`TableDef.order`); fewer than the limit = the end."""

    ids: bytes


class StatusReply(Message):
    """One shard as operators see it; the cache's figures count rows since the shard started, the recovery's are of its start.

    `starting` says how far its start is; "" once it serves. Until then the other fields say nothing. `step` names a sync
    job's step that lacks a trainer's push, and that trainer.
    """

    shard: int
    epoch: int
    k: int
    rows_applied: int
    pending_parts: int
    lag_s: float
    n_rows: int
    n_trainers: int
    cache_bytes: int
    cache_lookups: int
    cache_hits: int
    failure: str
    journal_bytes: int = 0
    recovered_rows: int = 0
    recovery_s: float = 0.0
    repair: str = ""
    compared: str = ""
    starting: str = ""
    step: str = ""


class ProgressReply(Message):
    """How far the shard has come: every batch up to k of this epoch is in storage, for all to see."""

    epoch: int
    k: int


class RepairRequest(Message):
    """Restore this shard's rows on every lost node, and compare them row by row on these nodes (`all_nodes`: on every node).

    Answered when it is done, or after timeout_s. No repair ends before every shard has done its part: ask them all at once.
    """

    addresses: list[str]
    all_nodes: bool
    timeout_s: float


class RepairReply(Message):
    """How many nodes took part, how many rows of this shard were rewritten there, and how long that took, waiting included."""

    nodes: int
    rows: int
    seconds: float


class MoveStatusReply(Message):
    """How far a plan is, as shard 0 knows it."""

    cluster_map: bytes
    reports: list[bytes]
    places: list[str]


class WatermarksReply(Message):
    """These, packed as `paramserver.ingest.sessions` does; not `ready` while the shard may still take pushes."""

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


class ByeRequest(Message):
    """A trainer leaves; a sync job goes on without it."""

    trainer: str
    incarnation: int


HELLO = Verb("Hello", HelloRequest, HelloReply, TRAINERS, repeatable=True)
BYE = Verb("Bye", ByeRequest, Empty, TRAINERS)
PUSH = Verb("Push", PushPart, PushReply, TRAINERS)  # a stream both ways
DESCRIBE = Verb("Describe", Empty, DescribeReply, EVERYBODY, repeatable=True)
GET_TABLE = Verb("GetTable", TableRequest, TableReply, EVERYBODY, repeatable=True)
CREATE_TABLE = Verb("CreateTable", CreateTableRequest, TableReply, WRITERS, waits=True)
SET_POLICIES = Verb("SetPolicies", SetPoliciesRequest, TableReply, ADMINS, waits=True)
DROP_TABLE = Verb("DropTable", TableRequest, TableReply, ADMINS, waits=True)
ERASE_TABLE = Verb("EraseTable", EraseTableRequest, EraseTableReply, ADMINS, waits=True)
END_DROP = Verb("EndDrop", TableRequest, Empty, ADMINS, waits=True)
ASSIGN_ROWS = Verb("Assign", RowsRequest, Empty, WRITERS, waits=True)
ERASE_ROWS = Verb("Erase", RowsRequest, CountReply, ADMINS, waits=True)
FLUSH = Verb("Flush", FlushRequest, FlushReply, WRITERS, repeatable=True, waits=True)
COUNT = Verb("Count", TableRequest, CountReply, EVERYBODY, repeatable=True)
STEP = Verb("Step", TableRequest, StepReply, EVERYBODY)
LIST_IDS = Verb("Ids", IdsRequest, IdsReply, EVERYBODY, repeatable=True)
GET_STATUS = Verb("Status", Empty, StatusReply, EVERYBODY)
PROGRESS = Verb("Progress", Empty, ProgressReply, EVERYBODY, repeatable=True)
COMPARE = Verb("Compare", CompareRequest, CountReply, EVERYBODY, waits=True)
REPAIR = Verb("Repair", RepairRequest, RepairReply, ADMINS, waits=True)
MOVE_STATUS = Verb("MoveStatus", Empty, MoveStatusReply, EVERYBODY, waits=True)
LEFT_SESSIONS = Verb("LeftSessions", LeftSessionsRequest, WatermarksReply, SHARDS)
LEFT_SESSION = Verb("LeftSession", LeftSessionRequest, HelloReply, TRAINERS)
