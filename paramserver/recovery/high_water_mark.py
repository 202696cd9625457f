"""How far a shard had come, kept on the storage nodes: a journal that ends before it has lost batches.

About once a second the shard notes the last batch that it has applied (`kvemb:reached:<shard>`, a few bytes on every node). A batch is
applied only once it is in the journal. So whoever starts the shard may find less in the journal than the nodes were told. Then its end is
gone, or the folder is an older copy. That is found before anything is changed: before the owner's epoch is raised, and before the journal
gets another segment.

The note is no promise: the nodes' newest copy counts, and one that is lost, old or damaged only proves less. Then rows tell
(`paramserver.model.timeline`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgpack

from kvemb.errors import JournalBehindError
from kvemb.net.deadline import Deadline
from kvemb.stores.store import Store

from ..journal import Position, last_batch
from ..model.timeline import ORDERS
from .state_file import ShardState


@dataclass(frozen=True)
class Reached:
    """The last batch that a shard had applied: (epoch, k)."""

    epoch: int
    k: int

    def encode(self) -> bytes:
        """The bytes stored under `reached_name`.

        Example:
            >>> newest_reached([None, b"junk", Reached(2, 40).encode(), Reached(1, 30).encode()])
            Reached(epoch=2, k=40)
        """
        packed: bytes = msgpack.packb([self.epoch, self.k])
        return packed


def reached_name(shard: int) -> str:
    """The name of the note, for `Store.get_meta`."""
    return f"kvemb:reached:{shard}"


def newest_reached(copies: Iterable[bytes | None]) -> Reached | None:
    """The newest of the nodes' copies that can be read; None when there is none."""
    found = [one for one in (_decode(copy) for copy in copies if copy is not None) if one is not None]
    return max(found, key=lambda one: (one.epoch, one.k), default=None)


def require_reached(state: ShardState, store: Store, journal: Path, timeout_s: float) -> None:
    """Compare the saved state and its journal with what the nodes were told; nothing is changed.

    Args:
        state: what the last owner left.
        store: open.
        journal: its folder.
        timeout_s: of the storage call.

    Raises:
        JournalBehindError: the journal's end is missing.
        JournalDamagedError: a file of it does not hold what was written to it.
    """
    if state.journal is None:
        return
    told = newest_reached(store.get_meta(reached_name(state.shard), Deadline.after(timeout_s)))
    k = max(state.k, last_batch(journal, Position(*state.journal)))
    if told is not None and told.k > k:
        raise JournalBehindError(
            f"shard {state.shard}: the journal in {journal} ends with batch {k}, but the shard had told the storage nodes that it has "
            f"applied batch {told.k} (of epoch {told.epoch}): {told.k - k} acknowledged batches or more are missing. {ORDERS}"
        )


class HighWaterMarkReporter:
    """Tells the nodes how far a shard has come, when that has changed. One thread.

    Args:
        store: open.
        shard: number.
        epoch: of this process.
        k: returns the last batch applied.
        timeout_s: of one call.
    """

    def __init__(self, store: Store, shard: int, *, epoch: int, k: Callable[[], int], timeout_s: float) -> None:
        self._store, self._shard, self._epoch, self._k, self._timeout_s = store, shard, epoch, k, timeout_s
        self._told: Reached | None = None

    def tell(self) -> None:
        """Write the note if there is something new.

        Raises:
            StorageError: not every node has it; call again.
        """
        now = Reached(self._epoch, self._k())
        if now != self._told:
            self._store.put_meta(reached_name(self._shard), now.encode(), Deadline.after(self._timeout_s))
            self._told = now


def _decode(copy: bytes) -> Reached | None:
    try:
        epoch, k = msgpack.unpackb(copy, max_array_len=2, max_map_len=0, max_str_len=0, max_bin_len=0)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return Reached(epoch, k) if type(epoch) is int and type(k) is int and 0 <= k < 1 << 48 else None
