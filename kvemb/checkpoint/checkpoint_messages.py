"""The messages of saves and loads. Pure."""

from dataclasses import field

from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import Empty
from kvemb.protocol.verb import ADMINS, WRITERS, Verb


class SaveRequest(Message):
    """Cut the shard and save it; two requests under one id are one save. `base_version`: the shard's cut in the base, 0 without one."""

    save_id: str
    url: str
    base_version: int
    weights_only: bool
    timeout_s: float


class SaveStatusRequest(Message):
    """Ask how far a save is on this shard; or tell it that the checkpoint is `whole`: its manifest is written."""

    save_id: str
    whole: bool


class SaveReply(Message):
    """How far a save is: state "running", "done", "failed" (with the error) or "unknown"."""

    state: str
    error: str
    rows_done: int
    rows: int
    bytes_done: int


class LoadRequest(Message):
    """A load: check that this shard could (`begin` false), or begin: it is decided, and stands on the storage nodes.

    `tables` are the names of those to be loaded; none: all. Without a URL a load that was checked is given up: another one may come.
    """

    load_id: str
    url: str
    save_id: str
    begin: bool
    tables: list[str] = field(default_factory=list)


SAVE_CHECKPOINT = Verb("Save", SaveRequest, SaveReply, WRITERS, waits=True)
SAVE_STATUS = Verb("SaveStatus", SaveStatusRequest, SaveReply, WRITERS)
LOAD_CHECKPOINT = Verb("Load", LoadRequest, Empty, ADMINS, waits=True)
