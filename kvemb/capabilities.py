"""What capabilities give an open cluster: a facet each. A capability leaves with its folder and its lines here; the kernel names none."""

from __future__ import annotations  # help() shows types as they are written here

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvemb.config import Config
from kvemb.connection import Connection

if TYPE_CHECKING:  # each is imported when it is used first
    from kvemb.checkpoint.checkpoint_verbs import Checkpoints
    from kvemb.checkpoint.load import LoadProgress, LoadResult
    from kvemb.checkpoint.save import SaveProgress, SaveResult
    from kvemb.client.slot_moves import NodeMoves, ShardScaling
    from kvemb.feed.cluster_feed import Feeds
    from kvemb.foreign.table_files import TableFiles


class Facets:
    """The facets of `kvemb.Cluster`. They share its connection."""

    def __init__(self, config: Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    # --- checkpoint ---------------------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """The verbs save and load."""
        from kvemb.checkpoint.checkpoint_verbs import Checkpoints

        return Checkpoints(self._config, self._connection)

    def save(
        self,
        url: str,
        *,
        base: str | None = None,
        weights_only: bool = False,
        extra: Mapping[str, Any] | None = None,
        resume: bool = False,
        timeout_s: float = 600.0,
        progress: SaveProgress | None = None,
    ) -> SaveResult:
        """Save every table while training goes on: `Checkpoints.save`."""
        return self.checkpoints.save(
            url, base=base, weights_only=weights_only, extra=extra, resume=resume, timeout_s=timeout_s, progress=progress
        )

    def load(
        self, url: str, *, tables: Collection[str] | None = None, stall_timeout_s: float = 600.0, progress: LoadProgress | None = None
    ) -> LoadResult:
        """Give the cluster the rows of a checkpoint: `Checkpoints.load`."""
        return self.checkpoints.load(url, tables=tables, stall_timeout_s=stall_timeout_s, progress=progress)

    # --- scaling ------------------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> NodeMoves:
        """The storage nodes that come and go while training goes on (memcached, Redis, Valkey)."""
        from kvemb.client.slot_moves import NodeMoves

        return NodeMoves(self._connection.require_shards("nodes").servers)

    @property
    def shards(self) -> ShardScaling:
        """The parameter-server shards that come and go while training goes on."""
        from kvemb.client.slot_moves import ShardScaling

        return ShardScaling(self._connection.require_shards("shards").servers)

    # --- feed ---------------------------------------------------------------------------------------------------------------------

    @property
    def feed(self) -> Feeds:
        """What the shards change, event by event."""
        from kvemb.feed.cluster_feed import Feeds

        return Feeds(self._config, self._connection)

    # --- foreign rows -------------------------------------------------------------------------------------------------------------

    @property
    def files(self) -> TableFiles:
        """Rows from files of other programs, and into them."""
        from kvemb.foreign.table_files import TableFiles

        return TableFiles(self._connection)
