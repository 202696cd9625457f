"""What the tests of the torch bridge share: one thread (results must not depend on their number), the examples on the
path.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    # Not "torch" alone: where it is not installed, this very directory could be taken for a package of that name.
    import torch.nn
except ImportError:
    torch = None  # the test files skip themselves; what they share would fail where pytest looks for doctests
    collect_ignore = ["collection_features.py", "creating_cluster.py", "ddp_job.py", "tensorflow_features.py"]

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.enable()  # torch warns until this is set
    yield
    torch.set_num_threads(before)
