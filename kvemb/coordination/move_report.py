"""A shard's report of its part in a phase of a plan, kept on the nodes. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

_TYPES = (int, int, bool, int, int, str)
MAX_TROUBLE = 500


@dataclass(frozen=True)
class MoveReport:
    """One shard's report; it is good for one epoch of the shard, and one version of the map.

    Args:
        epoch: of the shard's process.
        version: of the cluster map that it followed.
        done: whether its part of the phase is done.
        rows, n_rows: how many rows it has gone through in this phase, and how many there are.
        trouble: why its part does not go on; "" while it does.
        step: of a sync job, while all hold: the last step that it has handed out.
    """

    epoch: int
    version: int
    done: bool
    rows: int = 0
    n_rows: int = 0
    trouble: str = ""
    step: int = 0

    def encode(self) -> bytes:
        """The bytes stored under `report_name`.

        Example:
            >>> newest_report([None, b"junk", MoveReport(2, 40, True).encode(), MoveReport(2, 39, True).encode()]).version
            40
        """
        items = [self.epoch, self.version, self.done, self.rows, self.n_rows, self.trouble]
        packed: bytes = msgpack.packb([*items, self.step] if self.step else items)
        return packed


def report_name(shard: int) -> str:
    """The name of a shard's report, for `StoreValues.get`."""
    return f"kvemb:move:{shard}"


def newest_report(copies: Iterable[bytes | None]) -> MoveReport | None:
    """Return the newest of the nodes' copies that can be read; None for none."""
    found = [one for one in (_decode(copy) for copy in copies if copy is not None) if one is not None]
    return max(found, key=lambda one: (one.epoch, one.version, one.done, one.rows), default=None)


def _decode(copy: bytes) -> MoveReport | None:
    try:
        items = msgpack.unpackb(copy, max_array_len=len(_TYPES) + 1, max_map_len=0, max_str_len=4 * MAX_TROUBLE, max_bin_len=0)
    except Exception:  # msgpack raises ValueError, UnpackException, TypeError: all mean bad bytes
        return None
    if not isinstance(items, list) or tuple(type(item) for item in items) not in (_TYPES, (*_TYPES, int)):
        return None
    return MoveReport(*items)
