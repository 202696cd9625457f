"""Combines the rows of bags: torch.nn.functional.embedding_bag with a faster backward for many ids; and the recipes of modules.

Torch's backward sorts all ids to bring duplicates together. Here gradients are added up as they come: 0.1 to 0.7 of the time, where there
are two ids per row or more. Plain sums are the same bits, so they take this way only from `STABLE_FROM` ids on, where torch's sort keeps
the order of duplicates. Averages and weighted sums, from `WORTH_FROM` ids on, are the same to rounding: torch may multiply and add in one
rounding. Maxima, and weights that require a gradient, are torch's own.

A recipe is the computation of a module over several tables: it turns features into ids by table, and rows by table into the module's
result. `TableCollection` runs it on rows of a cluster, `PlainTables` on rows of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

STABLE_FROM = 32_768
"""At so many ids torch's sort is stable (at::internal::GRAIN_SIZE)."""
WORTH_FROM = 4096
_BLOCK = 1 << 18  # values gathered at a time: so many fit into a core's cache, however long the input


def embedding_bag(
    at: Tensor,
    rows: Tensor,
    offsets: Tensor,
    *,
    mode: str,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Combine rows [n, dim] at int64 [m] by bags from offsets [b] on: float32 [b, dim], torch.nn.functional.embedding_bag's bits."""
    options = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx}
    if _is_worth(at, rows, mode, per_sample_weights):
        combined: Tensor = _BagPooling.apply(rows, at, offsets, per_sample_weights, options)  # type: ignore[no-untyped-call]
        return combined
    return _torchs(at, rows, offsets, per_sample_weights, options)


def _is_worth(at: Tensor, rows: Tensor, mode: str, weights: Tensor | None) -> bool:
    if mode == "max" or at.device.type != "cpu" or (weights is not None and weights.requires_grad):
        return False
    n_least = STABLE_FROM if mode == "sum" and weights is None else WORTH_FROM
    return len(at) >= max(n_least, 2 * len(rows)) and rows.requires_grad and torch.is_grad_enabled()


def _torchs(at: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None, options: dict[str, Any]) -> Tensor:
    return F.embedding_bag(at, rows, offsets, per_sample_weights=weights, **options)


class _BagPooling(torch.autograd.Function):
    """The gradient of a row is the sum of those of the bags it is in, each times its factor there, in the order of `at`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Tensor, offsets: Tensor, weights: Tensor | None, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(at, offsets, weights)
        ctx.n_rows, ctx.options = len(rows), options
        return _torchs(at, rows, offsets, weights, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (at, offsets, weights), padding = grads, ctx.saved_tensors, ctx.options["padding_idx"]
        bag_of = _bag_of(at, offsets, ctx.options["include_last_offset"])
        if ctx.options["mode"] == "mean":
            counted = torch.ones_like(at) if padding is None else at.ne(padding).to(at.dtype)
            sizes = at.new_zeros(len(grad)).index_add_(0, bag_of, counted)
            grad = grad / sizes.clamp(min=1).unsqueeze(1)
        summed = grad.new_zeros(ctx.n_rows, grad.shape[1])
        length = max(1, _BLOCK // max(1, grad.shape[1]))
        for begin in range(0, len(at), length):
            block = slice(begin, begin + length)
            parts = grad.index_select(0, bag_of[block])
            if weights is not None:
                parts = parts * weights[block].unsqueeze(1)
            summed = summed.index_add_(0, at[block], parts)
        if padding is not None:
            summed = summed.index_fill(0, at.new_tensor([padding]), 0.0)
        return summed, None, None, None, None


def _bag_of(at: Tensor, offsets: Tensor, with_end: bool) -> Tensor:
    """Which bag each id is in: [m]."""
    starts = offsets[:-1] if with_end else offsets
    ends = offsets[1:] if with_end else torch.cat([offsets[1:], offsets.new_tensor([len(at)])])
    return torch.repeat_interleave(ends - starts, output_size=len(at))


LookedUp = tuple[Tensor, Tensor]
"""Rows float32 [n, dim], and int64 [m]: where in them each id's row is."""
LookUp = Callable[[Mapping[str, Tensor]], Mapping[str, LookedUp]]
"""From ids [m] by table to their rows by table."""


class Recipe(Protocol):
    """A forward pass without its rows. It holds no rows and no connection, is never changed, and can be pickled if its parts can."""

    def ids(self, features: Any) -> dict[str, Tensor]:
        """Return the lookups of `run`: ids [m] of every table."""

    def run(self, features: Any, look_up: LookUp) -> Any:
        """Compute the module's result, with one call of `look_up`.

        Raises:
            InvalidInputError: features are missing or do not fit; `look_up` was not called then.
        """

    def __str__(self) -> str:
        """Describe it in a word or two per table or column."""


RecipeT = TypeVar("RecipeT", bound=Recipe)


def exporting() -> bool:
    """Return whether torch.export records: then no operation may depend on values, and sizes are symbols."""
    return bool(torch.compiler.is_compiling())  # a collection is never compiled, see `eager`; is_exporting is not in every torch


def pool(rows: LookedUp, lengths: Tensor, combiner: str, weights: Tensor | None = None) -> Tensor:
    """Combine rows by bags of lengths [b] and weights float32 [m], by which "mean" divides: float32 [b, dim]; empty bags are zeros."""
    leaf, at = rows
    if not exporting() and weights is None and len(at) == len(lengths) and bool((lengths == 1).all()):
        return leaf.index_select(0, at)  # a value each: every combiner gives its row
    lengths = lengths.to(device=at.device, dtype=torch.int64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if combiner == "mean" and weights is None:
        return _bags(at, leaf, offsets, "mean", None)
    factors = weights
    if combiner != "sum":
        weights = leaf.new_ones(at.shape[0]) if weights is None else weights
        factors = weights / _norms(weights, lengths, combiner)
    return _bags(at, leaf, offsets, "sum", factors)


def _bags(at: Tensor, rows: Tensor, offsets: Tensor, mode: str, weights: Tensor | None) -> Tensor:
    if exporting():  # `embedding_bag` here only adds a faster backward, chosen by sizes
        return F.embedding_bag(at, rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True)
    return embedding_bag(at, rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True)


def _norms(weights: Tensor, lengths: Tensor, combiner: str) -> Tensor:
    """Return the divisor of each value's weight: [m]."""
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums = weights.new_zeros(len(lengths)).index_add(0, bag, weights if combiner == "mean" else weights.square())
    return (sums if combiner == "mean" else sums.sqrt())[bag]
