"""The messages by which a table is altered. Pure."""

from dataclasses import field
from typing import Any

from kvemb.protocol.message_format import Message
from kvemb.protocol.verb import ADMINS, Verb


class AlterTableRequest(Message):
    """Take a step of an alteration of a table: shard 0."""

    table: str
    step: str
    key: str = ""
    definition: dict[str, Any] = field(default_factory=dict)


class AlterTableReply(Message):
    """The definition of the table that is to be filled (of "begin"), and the keys of tables whose rows are to be erased now."""

    staged: dict[str, Any]
    left: list[str]


class FollowAlterRequest(Message):
    """Hold the pushes of a table that is being altered, and apply what was taken before: every shard."""

    key: str
    staged: str
    begin: bool
    steps: bool
    last_step: int
    timeout_s: float


class FollowAlterReply(Message):
    """Rows of both tables on this shard, its epoch; of a sync job the last step handed out, and whether that to go on to is coming."""

    n_rows: int
    n_staged: int
    epoch: int
    last_step: int
    coming: bool


ALTER_TABLE = Verb("AlterTable", AlterTableRequest, AlterTableReply, ADMINS, waits=True)
FOLLOW_ALTER = Verb("FollowAlter", FollowAlterRequest, FollowAlterReply, ADMINS, waits=True)
