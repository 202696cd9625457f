"""A shard's rows on local disk: what the journal need not hold any more. With the journal's tail, any row can be made anew, bit for bit."""

from .reconstruct import Reconstructor, Wanted
from .run_set import Runs
from .snapshotter import Progress, Snapshotter

__all__ = ["Progress", "Reconstructor", "Runs", "Snapshotter", "Wanted"]
