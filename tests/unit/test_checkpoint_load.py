"""Watching a load from outside, without shards."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from memory_store import MemoryStore

from kvemb.checkpoint.load import Loading, _watch, decide
from kvemb.config import StorageConfig
from kvemb.errors import CheckpointError
from kvemb.net.deadline import Deadline
from kvemb.optim import sgd
from kvemb.schema.table_def import TableDef
from tests.unit.checkpoint_files import USER, save


def test_a_load_of_which_no_shard_comes_any_further_is_watched_no_longer_than_asked_for() -> None:
    with MemoryStore(StorageConfig("memory", (f"{uuid4().hex}:1",)), role="trainer") as store:
        store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        store.open(Deadline.after(60))
        loading = Loading(SimpleNamespace(numbers=(0, 1)), store, {}, 5.0)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"no shard has come any further for 0\.05 s: .* The load stays decided"):
            _watch(loading, "1" * 32, 0.05, None)


@pytest.mark.parametrize(
    ("weights_only", "definition", "told"),
    [(True, USER, "table user (exp_avg, exp_avg_sq)"), (False, USER, ""), (True, replace(USER, optimizer=sgd()), "")],
    ids=["an export", "a checkpoint", "an export without state"],
)
def test_what_an_export_cannot_bring_back_is_told_before_the_load_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights_only: bool, definition: TableDef, told: str
) -> None:
    url, at_first = str(tmp_path / "w"), list[str]()
    save(url, range(100), k=3, definition=definition, weights_only=weights_only)
    with MemoryStore(StorageConfig("memory", (f"{uuid4().hex}:1",)), role="trainer") as store:
        store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        store.open(Deadline.after(60))
        decide(store, {"user": definition}, url, timeout_s=5, progress=lambda *_: at_first.append(caplog.text))
    assert told in at_first[0]
    assert bool(at_first[0]) == bool(told)
