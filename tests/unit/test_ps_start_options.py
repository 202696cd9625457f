"""Options of kvemb.yaml reach the parts of a shard that is started with them."""

import time
from itertools import count
from pathlib import Path

import pytest

from kvemb.config import parse
from paramserver.lifecycle.shard import Shard
from paramserver.lifecycle.start import start
from tests.unit.journal_disk import FaultyOs, system

__all__ = ["system"]  # the fixture
pytestmark = pytest.mark.usefixtures("memory_kind")
_NUMBERS = count()


def started(folder: Path, **servers: object) -> Shard:
    tree = {
        "cluster": "demo",
        "storage": {"kind": "memory", "nodes": [f"start-options-{next(_NUMBERS)}:1"]},
        "parameter_servers": {"shards": ["127.0.0.1:1"], "data_dir": str(folder)} | servers,
    }
    return start(parse(tree, {}), 0, listen="127.0.0.1:0", start_timeout_s=5, wait=time.sleep)


@pytest.mark.parametrize(("durability", "syncs"), [("fsync", True), ("os", False)])
def test_a_shard_syncs_its_journal_unless_it_is_told_not_to(tmp_path: Path, system: FaultyOs, durability: str, syncs: bool) -> None:
    started(tmp_path, durability=durability).stop(5)
    assert ("fdatasync" in system.calls) == syncs
