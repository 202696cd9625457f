"""Bags of many ids take another way back than torch's: plain sums must be the same bits, all others the same to rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.torch.modules.pooling import STABLE_FROM, WORTH_FROM, embedding_bag


def bags(seed: int, n_ids: int, n_rows: int, n_bags: int, with_end: bool) -> tuple[Tensor, Tensor]:
    """Ids that repeat, in bags of any length: some empty, one long."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.integers(0, n_ids + 1, n_bags))
    starts[0] = 0
    ends = np.append(starts, n_ids) if with_end else starts
    return torch.from_numpy((n_rows * rng.random(n_ids) ** 3).astype(np.int64)), torch.from_numpy(ends)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(function: Callable[..., Tensor], at: Tensor, first: Tensor, offsets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Combined rows, and the gradient of rows."""
    rows = first.clone().requires_grad_()
    combined = function(at, rows, offsets, **options)
    (combined * normal(9, *combined.shape)).sum().backward()
    assert rows.grad is not None
    return combined, rows.grad


def takes_torchs_way(combined: Tensor) -> bool:
    return "EmbeddingBag" in type(combined.grad_fn).__name__


@pytest.mark.parametrize("padding_idx", [None, 0, 5])
@pytest.mark.parametrize("with_end", [False, True])
@pytest.mark.parametrize(
    ("n_ids", "n_rows", "dim"), [(STABLE_FROM, 700, 1), (STABLE_FROM + 1, 16_000, 3), (100_003, 2000, 8), (70_000, 300, 64)]
)
def test_plain_sums_of_many_ids_are_the_bits_of_torchs(n_ids: int, n_rows: int, dim: int, with_end: bool, padding_idx: int | None) -> None:
    at, offsets = bags(n_ids, n_ids, n_rows, 500, with_end)
    options = {"mode": "sum", "include_last_offset": with_end, "padding_idx": padding_idx}
    got, grad = there_and_back(embedding_bag, at, normal(1, n_rows, dim), offsets, **options)
    expected, expected_grad = there_and_back(F.embedding_bag, at, normal(1, n_rows, dim), offsets, **options)
    assert takes_torchs_way(expected)
    assert not takes_torchs_way(got)
    assert torch.equal(got, expected)
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("padding_idx", [None, 0, 5])
@pytest.mark.parametrize("with_end", [False, True])
@pytest.mark.parametrize("mode", ["mean", "sum"])
@pytest.mark.parametrize(("n_ids", "dim"), [(WORTH_FROM, 1), (50_000, 64)])
def test_averages_and_weighted_sums_are_torchs_but_for_rounding(
    n_ids: int, dim: int, mode: str, with_end: bool, padding_idx: int | None
) -> None:
    at, offsets = bags(n_ids, n_ids, 900, 300, with_end)
    options: dict[str, Any] = {"mode": mode, "include_last_offset": with_end, "padding_idx": padding_idx}
    if mode == "sum":
        options["per_sample_weights"] = normal(2, n_ids)
    got, grad = there_and_back(embedding_bag, at, normal(3, 900, dim), offsets, **options)
    expected, expected_grad = there_and_back(F.embedding_bag, at, normal(3, 900, dim), offsets, **options)
    assert not takes_torchs_way(got)
    assert torch.equal(got, expected)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6 * float(expected_grad.abs().max()))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    ("mode", "n_ids", "n_rows"),
    [("max", 50_000, 900), ("mean", WORTH_FROM - 1, 900), ("sum", STABLE_FROM - 1, 900), ("sum", 50_000, 25_001)],
)
def test_the_rest_is_torchs_own(mode: str, n_ids: int, n_rows: int, learned: bool) -> None:
    at, offsets = bags(3, n_ids, n_rows, 300, with_end=False)
    options: dict[str, Any] = {"mode": mode}
    if learned and mode == "sum":
        options["per_sample_weights"] = normal(4, n_ids).requires_grad_()
    got, grad = there_and_back(embedding_bag, at, normal(5, n_rows, 8), offsets, **options)
    assert takes_torchs_way(got)
    assert torch.equal(grad, there_and_back(F.embedding_bag, at, normal(5, n_rows, 8), offsets, **options)[1])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_second_derivative_is_torchs(mode: str) -> None:
    at, offsets = bags(6, STABLE_FROM, 20, 10, with_end=False)
    bag_of = torch.bucketize(torch.arange(len(at)), offsets, right=True) - 1
    seconds = []
    for by_hand in (False, True):
        rows = normal(7, 20, 2).to(torch.float64).requires_grad_()
        if by_hand:  # torch's embedding_bag has no second derivative
            combined = torch.zeros(10, 2, dtype=torch.float64).index_add(0, bag_of, rows.index_select(0, at))
            combined = combined / torch.bincount(bag_of, minlength=10).clamp(min=1).unsqueeze(1) if mode == "mean" else combined
        else:
            combined = embedding_bag(at, rows, offsets, mode=mode)
        (grad,) = torch.autograd.grad(combined.pow(3).sum(), rows, create_graph=True)
        seconds.append(torch.autograd.grad(grad.square().sum(), rows)[0])
    torch.testing.assert_close(*seconds)
