"""A shard's rows on local disk: what the journal need not hold any more. With the journal's tail, any row can be made anew, bit for bit."""

from .reconstruct import Reconstructor, WantedVersions
from .run_set import Runs
from .snapshotter import SnapshotProgress, Snapshotter

__all__ = ["Reconstructor", "Runs", "SnapshotProgress", "Snapshotter", "WantedVersions"]
