"""The cluster as its tables know it: types only, so that tables need not import the module that hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import ArrayLike, NDArray

from kvemb.config import Config

if TYPE_CHECKING:  # they import gRPC
    import numpy as np

    from kvemb.checkpoint.load import LoadProgress, LoadResult
    from kvemb.checkpoint.save import SaveProgress, SaveResult
    from kvemb.client.ack import Ack
    from kvemb.operate.cluster_status import ClusterStatus


class OpenCluster(Protocol):
    """The methods of `kvemb.api.cluster.Cluster`, without those that make tables; described there."""

    @property
    def config(self) -> Config:
        """The kvemb.yaml it was opened with."""
        ...

    @property
    def mode(self) -> str:
        """How the parameter servers apply pushes: "async" or "sync"."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether it was opened without the parameter servers."""
        ...

    def table(self, name: str) -> Any:
        """Open an existing table: a `kvemb.api.table.Table`."""
        ...

    def tables(self) -> list[str]:
        """The names of the tables that exist, sorted."""
        ...

    def pull(self, ids: Mapping[str, ArrayLike], *, timeout_s: float | None = None) -> dict[str, NDArray[np.float32]]:
        """Pull several tables in one round trip per node."""
        ...

    def push(
        self,
        tables: Mapping[str, tuple[ArrayLike, ArrayLike]],
        *,
        versions: Mapping[str, ArrayLike] | None = None,
        hyper: Mapping[str, Mapping[str, float]] | None = None,
        prefetched: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
        timeout_s: float | None = None,
    ) -> Ack:
        """Push several tables as one push."""
        ...

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when this process's pushes are applied."""
        ...

    def status(self, timeout_s: float | None = None) -> ClusterStatus:
        """Ask every shard and node how it is."""
        ...

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
        """Save every table while training goes on."""
        ...

    def load(self, url: str, *, stall_timeout_s: float = 600.0, progress: LoadProgress | None = None) -> LoadResult:
        """Give the cluster the rows of a checkpoint."""
        ...

    def close(self) -> None:
        """Deliver all pushes, and drop every connection."""
        ...
