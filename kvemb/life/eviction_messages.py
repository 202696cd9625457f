"""The messages by which operators ask what policies have erased. Pure."""

from typing import Any

from kvemb.protocol.message_format import Message
from kvemb.protocol.verb import EVERYBODY, Verb


class EvictionsRequest(Message):
    """Ask for what a shard has erased by the policies of its tables, or for what these would erase now."""

    dry_run: bool
    timeout_s: float


class EvictionsReply(Message):
    """Evictions of the tables that have a policy, or of which rows have gone by one since the shard was started."""

    tables: list[dict[str, Any]]


EVICTIONS = Verb("Evictions", EvictionsRequest, EvictionsReply, EVERYBODY, repeatable=True, waits=True)
