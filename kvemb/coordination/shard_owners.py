"""The record of which process owns a shard: an epoch, raised at each start of the shard's process, kept on every node. Pure.

A process that was taken for dead and runs on (a zombie) would overwrite its successor's writes. So the successor puts its own, higher
epoch on the nodes first. A store that writes as that shard reads the record first on every new connection (`OwnerFence`);
how copies of the record are read is the store's.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgpack

from kvemb.coordination.replicated_values import Change, DamagedCopyError, ValueCell, intact_copies, unless_newer
from kvemb.errors import FencedError
from kvemb.schema.record import MAX_EPOCH

log = logging.getLogger("kvemb")


@dataclass(frozen=True)
class Owner:
    """The nodes' record of a shard's owner."""

    epoch: int  # of the last owner's versions, above 0
    n_shards: int  # numbers of shards that the cluster map had; no code goes by it

    def encode(self) -> bytes:
        """The bytes stored under `owner_name`."""
        packed: bytes = msgpack.packb({"epoch": self.epoch, "n_shards": self.n_shards})
        return packed

    @property
    def put_back(self) -> Change:
        """Lets a copy be this record, unless it is a later owner's."""
        return unless_newer(self.encode(), lambda found: Owner.decode(found, "this copy").epoch > self.epoch)

    @staticmethod
    def decode(data: bytes, where: str) -> "Owner":
        """Read the record."""
        try:
            fields = msgpack.unpackb(data, max_map_len=8, max_array_len=0, max_str_len=32, max_bin_len=0)
            owner = Owner(fields["epoch"], fields["n_shards"])
            if [type(owner.epoch), type(owner.n_shards)] != [int, int] or not (0 < owner.epoch <= MAX_EPOCH and owner.n_shards > 0):
                raise ValueError("a field of another type, or out of range")
        except Exception as error:
            raise DamagedCopyError(f"{where}: expected an owner record, got {data[:40]!r}") from error
        return owner


def owner_name(shard: int) -> str:
    """The name of the shard's owner record, for `StoreValues.get`."""
    return f"kvemb:owner:{shard}"


def newest_owner(copies: Iterable[bytes | None], shard: int, where: Sequence[str] = ()) -> Owner | None:
    """The record with the highest epoch of those that the nodes hold; None when there is none: the shard never had an owner."""
    owners = intact_copies(copies, partial(Owner.decode, where=f"the owner record of shard {shard}"), owner_name(shard), where)
    return max(owners, key=lambda owner: owner.epoch, default=None)


def require_not_fenced(copies: Iterable[bytes | None], shard: int, epoch: int) -> None:
    """Raise where a newer owner has overtaken this epoch; damaged copies count as none."""
    try:
        owner = newest_owner(copies, shard)
    except DamagedCopyError:
        return
    if owner is not None and owner.epoch > epoch:
        raise FencedError(
            f"shard {shard}: a process with epoch {owner.epoch} has taken over from this one (epoch {epoch}), which must not write any "
            "more. Nothing that was acknowledged is lost: the newer process applies it. End this process."
        )


class OwnerFence:
    """The owner that a store writes as: none until `begin`, and then nothing is refused.

    Attributes:
        name: of the owner record, "" for no owner.
        shard, epoch: the owner.
        record: the bytes of the owner record, to be put where it was damaged, lost, or not written yet; b"" before `begin`.
    """

    def __init__(self) -> None:
        self.name = ""
        self.shard, self.epoch, self.record = 0, 0, b""
        self._still_ours: Callable[[], None] | None = None

    def begin(self, shard: int, epoch: int, get: Callable[[str], list[bytes | None]], still_ours: Callable[[], None] | None) -> None:
        """Write as this owner from now on; see `Store.fence`. `get` reads the copies of the owner record by its name."""
        self.shard, self.epoch, self.record, self._still_ours = shard, epoch, b"", still_ours
        self.name = owner_name(shard)
        copies = get(self.name)
        require_not_fenced(copies, shard, epoch)
        owner = newest_owner(copies, shard)
        self.record = (owner if owner is not None and owner.epoch == epoch else Owner(epoch, shard + 1)).encode()

    def put_back(self, copy: ValueCell) -> None:
        """Let a copy be our record; raises FencedError where it has a higher epoch."""

        def ours(found: bytes | None) -> bytes:
            self.require_not_behind([found])
            return self.record

        copy.update(ours)

    def keep(self, copy: ValueCell, elsewhere: Callable[[], Iterable[bytes | None]] = lambda: ()) -> None:
        """Put our record in the place of a damaged copy; `elsewhere` and errors as of `require_ours`."""
        found = copy.read()
        if found != self.record:
            self.require_ours(found, copy.holder, elsewhere)
            copy.mend(found, self.record)

    def require_not_behind(self, copies: Iterable[bytes | None]) -> None:
        """Raise FencedError when one of these copies has a higher epoch; damaged ones count as none."""
        require_not_fenced(copies, self.shard, self.epoch)

    def require_ours(self, copy: bytes | None, where: str, elsewhere: Callable[[], Iterable[bytes | None]] = lambda: ()) -> None:
        """Raise once another process owns the shard; where this copy names no owner or is damaged, the other copies are read."""
        if copy == self.record:
            return
        self.require_not_behind([copy])
        try:
            owner = newest_owner([copy], self.shard, [where])
            if owner is not None and owner.epoch == self.epoch:
                return
        except DamagedCopyError as error:
            if self._still_ours is None:
                raise
            log.error("%s The other nodes are asked for the owner.", error)
        self.require_not_behind(elsewhere())
        if self._still_ours is not None:
            self._still_ours()
