"""The tests that `kvemb doctor --conformance` runs: the whole contract of a store, on nodes that the command brings (`conformance`)."""

from collections.abc import Callable, Iterator

import pytest

from kvemb.testing.bucket_contract import BucketedStoreContract
from kvemb.testing.repair_contract import RepairContract
from kvemb.testing.scratch_nodes import ScratchNodes
from kvemb.testing.store_contract import Nodes, PagedStoreContract


class _InScratch:
    @pytest.fixture
    def nodes(self, new_nodes: Callable[[], ScratchNodes]) -> Iterator[Nodes]:
        nodes = new_nodes()
        yield nodes
        nodes.close()


class TestBuckets(_InScratch, RepairContract, BucketedStoreContract):
    """Rows in hashes, as most tables have them; repair and fencing."""


class TestPages(_InScratch, PagedStoreContract):
    """Rows of tables with `num_ids`, side by side in strings."""
