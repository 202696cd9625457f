"""The decision to load a checkpoint, as it stands on every storage node, and how far each shard is with it. Pure: bytes and values.

Once one node holds a decision it is made: every shard carries it out, at once or when it is started the next time. Shards report in the
same way, so that a load can be watched while the shards are not serving.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import msgpack

from kvemb.coordination.replicated_values import DamagedCopyError, intact_copies
from kvemb.errors import ProtocolError

META_NAME = "kvemb:load"


@dataclass(frozen=True)
class Decision:
    """The decision to load one checkpoint into the whole cluster; from here on every shard will.

    Args:
        serial: rises with every decision.
        load_id: 32 hex digits.
        url: of the checkpoint.
        save_id: of the checkpoint: what lies there later is not loaded.
    """

    serial: int
    load_id: str
    url: str
    save_id: str

    def encode(self) -> bytes:
        """Return the bytes that nodes hold.

        Example:
            >>> newest_decision([None, Decision(1, "a", "u", "s").encode(), Decision(2, "b", "u", "s").encode()]).load_id
            'b'
        """
        packed: bytes = msgpack.packb(["kvemb-load", 1, *astuple(self)])
        return packed


@dataclass(frozen=True)
class Report:
    """How far one shard is: state "reading", "writing" or "done", or "failed" with the error."""

    load_id: str
    state: str
    error: str
    rows_done: int
    rows: int
    beat: int

    def encode(self) -> bytes:
        """Return the bytes that nodes hold."""
        packed: bytes = msgpack.packb(["kvemb-load-report", 1, *astuple(self)])
        return packed


def decode_decision(data: bytes) -> Decision:
    """Read one copy. Raises as `newest_decision`."""
    return Decision(*_read(data, "kvemb-load", Decision))


def newest_decision(copies: Iterable[bytes | None], where: Sequence[str] = ()) -> Decision | None:
    """Return the newest of the nodes' copies, or None.

    Raises:
        DamagedCopyError: there are copies, and all are damaged.
        ProtocolError: a copy is of another release.
    """
    found = intact_copies(copies, decode_decision, META_NAME, where)
    return max(found, key=lambda decision: decision.serial, default=None)


def newest_report(copies: Iterable[bytes | None]) -> Report | None:
    """Return the newest of the nodes' copies of a shard's report, or None; damaged ones say nothing."""
    try:
        found = intact_copies(copies, lambda data: Report(*_read(data, "kvemb-load-report", Report)), "of a load's report")
    except DamagedCopyError:
        return None
    return max(found, key=lambda report: report.beat, default=None)


def report_name(shard: int) -> str:
    """Return the name that a shard's report stands under."""
    return f"kvemb:load:{shard}"


def _read(data: bytes, magic: str, kind: type) -> list[Any]:
    try:
        items = msgpack.unpackb(data, max_array_len=16, max_map_len=0, max_ext_len=0)
        if not isinstance(items, list) or items[:1] != [magic]:
            raise ValueError("no list of ours")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DamagedCopyError(f"expected {magic}, got {data[:40]!r}") from error
    try:
        wanted = [field.type for field in fields(kind)]
        if items[:2] != [magic, 1] or [type(item) for item in items[2:]] != wanted:
            raise ValueError("other fields")
        return list(items[2:])
    except (ValueError, TypeError) as error:
        raise ProtocolError(
            f"the value under {META_NAME} is not of this release ({error}); use the same kvemb release everywhere"
        ) from error
