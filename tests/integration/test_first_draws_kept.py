"""First values of rows: a table keeps the algorithm that it was made with, and trainers and shards compute the same bits."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.errors import TableMismatchError
from tests.warm_clusters import warm

EARLIER = Path(__file__).parent / "golden" / "checkpoint_first_draws_1"
# Written by the last commit whose definitions named no algorithm and no buckets: rows 0 and 1 were pushed, rows 2 and 3 only pulled.
PULLED = {
    "user": ["bfdf9209bf9a5e11bfe0a875", "beb9f31abfd4145dbfc4610b", "bd44be453e8be34f3de39ebe", "be6dcc68be3170bc3ebe210b"],
    "item": ["bf7e0000bf7e0000", "bf830000bf860000", "bd3d0000bb940000", "bd050000bce40000"],
}
SCHEMAS = {"user": 45, "item": 107}
USER = {"dim": 3, "optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.normal(std=0.5), "seed": 7}


@pytest.fixture
def client() -> Iterator[kvemb.Cluster]:
    with warm("valkey", 1, shards=1) as local, kvemb.connect(local.url) as opened:
        yield opened


def pulled(table: kvemb.Table) -> list[str]:
    return [row.astype(">f4").tobytes().hex() for row in table.pull(np.arange(4))]


def test_a_checkpoint_from_before_algorithms_were_named_brings_back_also_the_rows_that_were_never_pushed(client: kvemb.Cluster) -> None:
    client.load(EARLIER.as_uri())
    for name, rows in PULLED.items():
        table = client.table(name)
        assert pulled(table) == rows
        assert (table.definition.init_algorithm, table.definition.schema) == (1, SCHEMAS[name])
    again = client.create_table("user", **USER, exist_ok=True)  # the program of that time, run once more
    assert pulled(again) == PULLED["user"]
    again.push(np.array([2]), np.zeros((1, 3), np.float32))
    again.flush()
    assert pulled(again) == PULLED["user"]  # the shard created the row that pulls had shown
    assert client.create_table("new", **USER).definition.init_algorithm == kvemb.init.ALGORITHM_VERSION


def test_a_load_that_would_change_rows_which_were_never_pushed_is_refused_by_name(client: kvemb.Cluster) -> None:
    before = pulled(client.create_table("user", **USER))
    with pytest.raises(TableMismatchError, match=r"(?s)'algorithm': 2.*'algorithm': 1.*drop the table first; the load makes it as it was"):
        client.load(EARLIER.as_uri())
    assert pulled(client.table("user")) == before
    client.drop_table("user")
    client.load(EARLIER.as_uri())
    assert pulled(client.table("user")) == PULLED["user"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_shard_creates_rows_with_the_bits_that_pulls_have_shown_however_they_were_asked_for(client: kvemb.Cluster, dtype: str) -> None:
    ids = np.random.default_rng(0).permutation(np.concatenate([np.arange(-301, -1), np.arange(300), np.arange(1, 300) << 50]))
    for dim in (1, 5, 66):
        table = client.create_table(f"t{dim}", dim=dim, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.normal(), dtype=dtype)
        shown = table.pull(ids)
        np.testing.assert_array_equal(np.concatenate([table.pull(some) for some in np.array_split(ids, 7)]), shown)
        for some in np.array_split(ids[:600], 3):
            table.push(some, np.zeros((len(some), dim), np.float32))
        table.flush()
        rows, versions = table.pull(ids, return_versions=True)
        np.testing.assert_array_equal(rows, shown)
        assert (versions[np.isin(ids, ids[:600])] > 0).all()
