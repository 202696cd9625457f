"""Embedding and EmbeddingBag: forward and backward equal torch's own on the same weights, bit for bit."""

import copy
import itertools

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster, MemoryTable
from torch.nn import functional as F

from kvemb.errors import InvalidInputError
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer

N_IDS, DIM = 30, 5
ALL_IDS = np.arange(N_IDS)


@pytest.fixture
def table() -> MemoryTable:
    return MemoryCluster().table("t", DIM)


def torch_weights(table: MemoryTable) -> torch.Tensor:
    """The same rows as one dense matrix: ids are its indices."""
    return torch.from_numpy(table.pull(ALL_IDS)).requires_grad_()


def collected(module: torch.nn.Module, like: torch.Tensor) -> torch.Tensor:
    """The gradients that the module left for the optimizer, as one dense matrix."""
    dense = torch.zeros_like(like)
    for leaf, lookup in zip(module.pending.leaves, module.pending.lookups, strict=True):
        ids, grads, _ = lookup.pushed(leaf.grad.numpy())
        dense[torch.from_numpy(ids.astype(np.int64))] += torch.from_numpy(grads)
    return dense


def random_bags(rng: np.random.Generator, with_end: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with many duplicates in bags of 0 to 6."""
    lengths = rng.integers(0, 7, rng.integers(1, 12))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return torch.from_numpy(rng.integers(0, N_IDS, lengths.sum())), torch.from_numpy(ends if with_end else ends[:-1])


@pytest.mark.parametrize("padding_idx", [None, 0, 7, 29])
@pytest.mark.parametrize("shape", [(1,), (40,), (6, 9), (2, 3, 4), (0,), (0, 3), ()])
def test_embedding_equals_torch(table: MemoryTable, shape: tuple[int, ...], padding_idx: int | None) -> None:
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, N_IDS, shape))
    ours, weights = Embedding(table, padding_idx=padding_idx), torch_weights(table)
    got, expected = ours(ids), F.embedding(ids, weights, padding_idx=padding_idx)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    scale = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    (got * scale).sum().backward()
    (expected * scale).sum().backward()
    assert torch.equal(collected(ours, weights), weights.grad)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mode", "with_end", "padding_idx"), list(itertools.product(("sum", "mean", "max"), (False, True), (None, 0, 13))))
def test_bags_with_offsets_equal_torch(table: MemoryTable, mode: str, with_end: bool, padding_idx: int | None, seed: int) -> None:
    ids, offsets = random_bags(np.random.default_rng(seed), with_end)
    options = {"mode": mode, "include_last_offset": with_end, "padding_idx": padding_idx}
    ours, weights = EmbeddingBag(table, **options), torch_weights(table)
    got, expected = ours(ids, offsets), F.embedding_bag(ids, weights, offsets, **options)
    assert torch.equal(got, expected)
    scale = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    (got * scale).sum().backward()
    (expected * scale).sum().backward()
    assert torch.equal(collected(ours, weights), weights.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_bags_of_equal_length_equal_torch(table: MemoryTable, mode: str, dtype: str) -> None:
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, N_IDS, (8, 5)).astype(dtype))
    ours, weights = EmbeddingBag(table, mode=mode), torch_weights(table)
    got, expected = ours(ids), F.embedding_bag(ids, weights, mode=mode)
    assert torch.equal(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(collected(ours, weights), weights.grad)


@pytest.mark.parametrize("two_dimensional", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("seed", range(4))
def test_weighted_bags_and_the_gradient_of_their_weights_equal_torch(
    table: MemoryTable, seed: int, padding_idx: int | None, two_dimensional: bool
) -> None:
    rng = np.random.default_rng(seed)
    ids, offsets = random_bags(rng, False)
    if two_dimensional:
        ids, offsets = torch.from_numpy(rng.integers(0, N_IDS, (6, 7))), None
    values = torch.from_numpy(rng.normal(size=tuple(ids.shape)).astype(np.float32))
    mine, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    ours, weights = EmbeddingBag(table, mode="sum", padding_idx=padding_idx), torch_weights(table)
    got = ours(ids, offsets, per_sample_weights=mine)
    expected = F.embedding_bag(ids, weights, offsets, mode="sum", per_sample_weights=theirs, padding_idx=padding_idx)
    assert torch.equal(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    # A dot product of two rows: torch's own differs in the last bit with where a row lies in memory.
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-4)
    assert torch.equal(collected(ours, weights), weights.grad)


def test_mean_is_the_default_mode_as_in_torch(table: MemoryTable) -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(EmbeddingBag(table)(ids), torch.nn.EmbeddingBag.from_pretrained(torch_weights(table).detach())(ids))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_empty_bags_are_zeros(table: MemoryTable, mode: str) -> None:
    bag = EmbeddingBag(table, mode=mode)
    assert torch.equal(bag(torch.zeros(3, 0, dtype=torch.int64)), torch.zeros(3, DIM))
    assert torch.equal(bag(torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)), torch.zeros(2, DIM))
    assert bag(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, DIM)
    assert bag(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)).shape == (0, DIM)


def test_a_bag_of_padding_only_is_zeros_and_pushes_nothing(table: MemoryTable) -> None:
    bag = EmbeddingBag(table, padding_idx=3)
    optimizer = SparseOptimizer(bag)
    out = bag(torch.tensor([[3, 3], [3, 3]]))
    assert torch.equal(out, torch.zeros(2, DIM))
    out.sum().backward()
    optimizer.step()
    assert table.cluster.pushes == []


def test_one_forward_is_one_pull_of_distinct_ids(table: MemoryTable) -> None:
    asked = []
    pull = table.pull
    table.pull = lambda ids, **options: asked.append(ids) or pull(ids, **options)
    Embedding(table)(torch.tensor([[5, 1], [5, 5]]))
    assert [ids.tolist() for ids in asked] == [[1, 5]]


def test_ids_cover_64_bits_signed_and_unsigned() -> None:
    cluster = MemoryCluster()
    signed, unsigned = cluster.table("s", DIM), cluster.table("u", DIM, id_dtype="uint64")
    ids = np.array([-(2**63), -2, 0, 2**63 - 1])
    assert np.array_equal(Embedding(signed)(torch.from_numpy(ids)).detach().numpy(), signed.pull(ids))
    high = np.array([2**64 - 2, 2**63], np.uint64)
    assert np.array_equal(Embedding(unsigned)(torch.from_numpy(high)).detach().numpy(), unsigned.pull(high))


@pytest.mark.parametrize("quiet", ["eval", "no_grad", "inference_mode"])
def test_nothing_is_recorded_outside_training(table: MemoryTable, quiet: str) -> None:
    module = Embedding(table)
    ids = torch.tensor([1, 2])
    if quiet == "eval":
        out = module.eval()(ids)
    else:
        with getattr(torch, quiet)():
            out = module(ids)
    assert not out.requires_grad
    assert module.pending.lookups == []


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_a_frozen_module_is_not_trained_until_it_is_unfrozen(table: MemoryTable, kind: type) -> None:
    module, ids = kind(table), torch.tensor([[1, 2]])
    assert module.requires_grad_(False) is module
    assert not module(ids).requires_grad
    module.requires_grad_(True)
    module(ids).sum().backward()
    assert len(module.pending.leaves) == 1


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_a_model_that_is_frozen_freezes_its_rows(table: MemoryTable, kind: type) -> None:
    module, ids = kind(table), torch.tensor([[1, 2]])
    model = torch.nn.ModuleDict({"part": torch.nn.Sequential(module, torch.nn.Linear(table.dim, 1))})
    model.requires_grad_(False)
    assert not module(ids).requires_grad
    SparseOptimizer(model)
    assert not copy.deepcopy(module)(ids).requires_grad
    assert not module(ids).requires_grad, "an optimizer that is made then does not thaw them"
    list(model.parameters())
    model["part"].requires_grad_(True)
    assert module(ids).requires_grad


def test_a_forward_pass_that_is_thrown_away_leaves_nothing_behind(table: MemoryTable) -> None:
    module = Embedding(table)
    for _ in range(1100):
        module(torch.tensor([1]))
    assert module.pending.lookups == []


def test_lookups_that_nobody_collects_are_refused_at_a_bound(table: MemoryTable) -> None:
    module = Embedding(table)
    for _ in range(1000):
        module(torch.tensor([1])).sum().backward()
    n_pulls = table.n_pulls
    with pytest.raises(InvalidInputError, match="SparseOptimizer"):
        module(torch.tensor([1]))
    assert table.n_pulls == n_pulls
    module.eval()(torch.tensor([1]))


@pytest.mark.parametrize("ids", [torch.ones(1), torch.ones(1).bfloat16(), torch.tensor([True]), [1], None])
def test_what_is_no_tensor_of_ids_is_refused_before_any_pull(table: MemoryTable, ids: object) -> None:
    for module in (Embedding(table), EmbeddingBag(table)):
        with pytest.raises(InvalidInputError):
            module(ids) if isinstance(module, Embedding) else module(ids, torch.tensor([0]))
    assert table.n_pulls == 0


@pytest.mark.parametrize("module", [Embedding, EmbeddingBag])
def test_minus_one_is_refused_as_padding_unless_it_is_named_as_such(table: MemoryTable, module: type) -> None:
    ids = torch.tensor([[4, -1]])
    with pytest.raises(InvalidInputError, match=r"id -1 at position 1 .*padding_idx=-1"):
        module(table)(ids)
    assert table.n_pulls == 0
    padded = module(table, padding_idx=-1)
    optimizer = SparseOptimizer(padded)
    padded(ids).sum().backward()
    optimizer.step()
    assert list(table.rows) == [4]


def test_minus_one_in_unsigned_ids_is_refused_as_padding_unless_it_is_named_as_such() -> None:
    table = MemoryCluster().table("u", DIM, id_dtype="uint64")
    ids = torch.tensor([4, 2**64 - 1], dtype=torch.uint64)
    with pytest.raises(InvalidInputError, match="padding_idx=18446744073709551615"):
        Embedding(table)(ids)
    padded = Embedding(table, padding_idx=2**64 - 1)
    optimizer = SparseOptimizer(padded)
    padded(ids).sum().backward()
    optimizer.step()
    assert list(table.rows) == [4]


def test_a_negative_id_of_an_unsigned_table_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="-4"):
        Embedding(MemoryCluster().table("u", DIM, id_dtype="uint64"))(torch.tensor([1, -4]))


@pytest.mark.parametrize(
    ("shape", "offsets", "with_end"),
    [
        ((4,), None, False),
        ((4,), [1, 2], False),
        ((4,), [0, 3, 2], False),
        ((4,), [0, 5], False),
        ((4,), [0, 3], True),
        ((4,), [], False),
        ((0,), [], True),
        ((4,), [0.0, 2.0], False),
        ((4,), [[0, 2]], False),
        ((2, 2), [0, 2], False),
        ((2, 2, 2), None, False),
        ((), None, False),
    ],
)
def test_offsets_that_do_not_fit_are_refused_before_any_pull(
    table: MemoryTable, shape: tuple[int, ...], offsets: list[int] | None, with_end: bool
) -> None:
    given = None if offsets is None else torch.tensor(offsets, dtype=None if offsets else torch.int64)
    with pytest.raises(InvalidInputError):
        EmbeddingBag(table, include_last_offset=with_end)(torch.zeros(shape, dtype=torch.int64), given)
    assert table.n_pulls == 0


@pytest.mark.parametrize(
    ("mode", "factors"),
    [
        ("mean", torch.ones(1, 3)),
        ("max", torch.ones(1, 3)),
        ("sum", torch.ones(3)),
        ("sum", torch.ones(1, 3, dtype=torch.float64)),
        ("sum", [1.0, 1.0, 1.0]),
    ],
)
def test_sample_weights_that_do_not_fit_are_refused_before_any_pull(table: MemoryTable, mode: str, factors: object) -> None:
    with pytest.raises(InvalidInputError):
        EmbeddingBag(table, mode=mode)(torch.zeros(1, 3, dtype=torch.int64), per_sample_weights=factors)
    assert table.n_pulls == 0


@pytest.mark.parametrize("option", ["max_norm", "norm_type", "scale_grad_by_freq", "sparse", "device", "dtype"])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_options_without_effect_do_not_exist(table: MemoryTable, kind: type, option: str) -> None:
    with pytest.raises(TypeError, match=option):
        kind(table, **{option: None})


@pytest.mark.parametrize("padding_idx", [1.0, True, "0", 2**63])
def test_a_padding_id_that_is_no_id_is_refused(table: MemoryTable, padding_idx: object) -> None:
    with pytest.raises(InvalidInputError):
        Embedding(table, padding_idx=padding_idx)


def test_an_unknown_mode_and_what_is_no_table_are_refused(table: MemoryTable) -> None:
    with pytest.raises(InvalidInputError, match="median"):
        EmbeddingBag(table, mode="median")
    with pytest.raises(InvalidInputError, match="int"):
        Embedding(10)


def test_who_asks_for_weights_hears_where_they_are(table: MemoryTable) -> None:
    module = Embedding(table)
    assert not hasattr(module, "weight")
    with pytest.raises(AttributeError, match=r"rows of table 't' are in a cluster, and it has no num_ids.*table.pull\(ids\)"):
        module.weight.norm()
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        _ = module.wieght


def test_a_module_has_no_dense_weights_and_says_what_it_is(table: MemoryTable) -> None:
    module = EmbeddingBag(table, mode="sum", padding_idx=9)
    assert list(module.parameters()) == []
    assert repr(module) == "EmbeddingBag('t', dim=5, padding_idx=9, mode='sum')"
    assert module.embedding_dim == DIM
