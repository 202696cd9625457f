"""The change of a cluster's nodes that is under way, as the cluster keeps it: a command goes on from it where another was killed. Pure."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.replicated_values import DamagedCopyError
from kvemb.errors import ProtocolError
from kvemb.schema.slots import N_SLOTS

CHANGE_NAME = "kvemb:nodes-change"
ChangeKind = Literal["add", "remove", "replace", "rebalance"]
_MAGIC, _VERSION = "kvemb-nodes-change", 1
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class NodeChange:
    """A change of nodes.

    Args:
        kind: of the change.
        joining: the name of the node that joins, "" for none.
        leaving: the name of the one that leaves, "" for none.
        names: of all nodes that slots come from or go to, in the cluster's own 40 hex digits.
        before: int64 [16384], each slot's holder before the change, as a number in `names`.
        after: int64 [16384], each slot's holder after it.
        aborting: whether it is being taken back.
        holder: drawn by the command that carries it out. One that finds another's has been replaced, and stops.
    """

    kind: ChangeKind
    joining: str
    leaving: str
    names: tuple[str, ...]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    aborting: bool
    holder: str

    @property
    def goal(self) -> NDArray[np.int64]:
        """Each slot's holder in the end, as a number in `names`: int64 [16384]."""
        return self.before if self.aborting else self.after

    def left(self, owner_names: Sequence[str]) -> int:
        """How many slots still have to move."""
        numbers = {name: number for number, name in enumerate(self.names)}
        owners = np.array([numbers.get(name, -1) for name in owner_names])
        return int((owners != self.goal).sum())

    def encode(self) -> bytes:
        """The bytes that the cluster keeps."""
        owners = (self.before.astype("<u2").tobytes(), self.after.astype("<u2").tobytes())
        body = [self.kind, self.joining, self.leaving, list(self.names), *map(zlib.compress, owners), self.aborting]
        packed: bytes = msgpack.packb([_MAGIC, _VERSION, *body, self.holder])
        return packed

    @staticmethod
    def decode(data: bytes) -> "NodeChange":
        """Read them.

        Raises:
            DamagedCopyError: they are none of any release.
        """
        try:
            magic, version, *body = msgpack.unpackb(data, max_array_len=1 << 12, max_map_len=0, max_bin_len=1 << 17, max_str_len=64)
        except Exception as error:
            raise DamagedCopyError(f"{data[:40]!r} is no change of nodes") from error
        if magic != _MAGIC:
            raise DamagedCopyError(f"{data[:40]!r} is no change of nodes")
        if version != _VERSION:
            raise ProtocolError(
                f"a change of nodes of version {version!r}, this release reads {_VERSION}: end it with the release that began it, by "
                "`kvemb moves resume` or `kvemb moves abort`"
            )
        try:
            kind, joining, leaving, names, before, after, aborting, holder = body
            return NodeChange(kind, joining, leaving, tuple(names), _owners(before), _owners(after), bool(aborting), holder)
        except (ValueError, TypeError, zlib.error) as error:
            raise DamagedCopyError(f"{data[:40]!r} is a damaged change of nodes: {error}") from error


def _owners(data: bytes) -> NDArray[np.int64]:
    raw = zlib.decompressobj().decompress(data, _MAX_BYTES)
    owners = np.frombuffer(raw, dtype="<u2").astype(np.int64)
    if len(owners) != N_SLOTS:
        raise ValueError(f"{len(owners)} slots")
    return owners
