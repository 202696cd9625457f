"""Which shard a store writes for, and under which epoch: every new connection refuses to carry rows once a newer owner stands on its node.

A part of a store, told by `Store.fence`; how copies of the owner record are read is the store's.
"""

import logging
from collections.abc import Callable, Iterable

from kvemb.coordination.replicated_values import DamagedCopyError
from kvemb.coordination.shard_owners import Owner, newest_owner, owner_name, require_not_fenced

log = logging.getLogger("kvemb")


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

    def require_not_behind(self, copies: Iterable[bytes | None]) -> None:
        """Raise FencedError when one of these copies has a higher epoch; damaged ones count as none."""
        require_not_fenced(copies, self.shard, self.epoch)

    def require_ours(self, copy: bytes | None, where: str, elsewhere: Callable[[], Iterable[bytes | None]] = lambda: ()) -> None:
        """Raise once another process owns the shard. Where this copy names no owner, the other copies are read.

        Args:
            copy: of the owner record.
            where: which node holds it, for messages.
            elsewhere: reads the other copies.

        Raises:
            FencedError: another process owns the shard.
            DamagedCopyError: the copy is damaged, and nothing else says that the shard is ours.
        """
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
