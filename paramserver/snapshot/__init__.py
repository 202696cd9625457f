"""A shard's rows on local disk, so that the journal can be cut. With the journal's tail any row can be made again, bit for bit."""

from .reconstruct import Reconstructor, WantedVersions
from .run_set import Runs
from .snapshotter import SnapshotProgress, Snapshotter

__all__ = ["Reconstructor", "Runs", "SnapshotProgress", "Snapshotter", "WantedVersions"]
