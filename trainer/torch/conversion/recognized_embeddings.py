"""Which initializer a weight was drawn by: read off its values, where they are plainly those of one, else None.

Strategy: the mean, spread and bounds of all values name one candidate (a constant, uniform, normal). Then every part of the weight must
look like draws of it, and all parts together:

* all values fall into bins of equal probability, compared as Kolmogorov and Smirnov do;
* means and mean squares of blocks of rows, and of columns, stay within Z_MOST standard errors. Training leaves traces in the rows of
  popular ids and in whole columns long before the histogram of all values shows them;
* nothing lies farther out than a draw would.

A weight that was drawn is turned down about once in 10,000 times; then the user is asked. A few rows that were trained a little cannot be
told from draws at all: a weight known to have been trained is not given here.

Embeddings whose forward multiplies by a number of theirs: Hugging Face's BartScaledWordEmbedding, Gemma's, and two dozen like them.

They share no class, but their forward is one of two lines. Strategy: the compiled code of a class's forward is compared with that of these
lines, so nothing else can pass for them.
"""

import math
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from kvemb import init
from kvemb.init import Initializer

MIN_VALUES = 10_000
"""Fewer values show no distribution."""
Z_MOST = 6.0
_KS_MOST = 2.5  # times 1 / sqrt(n): passed by chance once in 130,000
_BINS = 512
_PART_VALUES, _LEAST_VALUES, _PARTS = 1 << 18, 1 << 12, 64


def read_off(weight: Tensor, padding: Sequence[int] = ()) -> Initializer | None:
    """Name the initializer whose draws a weight is.

    Args:
        weight: float [n, dim] with values (not on the meta device).

    Returns:
        init.zeros, constant, uniform or normal with parameters, or None.
    """
    n, low, high, std = _totals(weight, padding)
    if not (math.isfinite(low) and math.isfinite(high)) or n == 0:
        return None
    if low == high:
        return init.zeros() if low == 0 else init.constant(low)
    if n < MIN_VALUES:
        return None
    for found in (_uniform(low, high), init.normal(mean=0.0, std=float(f"{std:.5g}"))):
        if _fits(weight, padding, n, found):
            return found
    return None


def _uniform(low: float, high: float) -> Initializer:
    """Between the outermost values; symmetric if they nearly are, as bounds of draws are."""
    if abs(low + high) < 0.01 * (high - low):
        high = max(-low, high)
        low = -high
    return init.uniform(low, high)


def _totals(weight: Tensor, padding: Sequence[int]) -> tuple[int, float, float, float]:
    """The number of values, the least, the largest, and the standard deviation; no values if one is NaN."""
    n, low, high, total, squares = 0, math.inf, -math.inf, 0.0, 0.0
    for part in _parts(weight, padding):
        n += part.numel()
        least, largest = (float(bound) for bound in part.aminmax())
        low, high = min(low, least), max(high, largest)
        wide = part.double()
        total += float(wide.sum())
        squares += float(wide.square().sum())
    mean = total / n if n else 0.0
    variance = squares / n - mean * mean if n else 0.0
    if math.isnan(variance):
        return 0, low, high, variance
    return n, low, high, math.sqrt(max(variance, 0.0))


def _fits(weight: Tensor, padding: Sequence[int], n: int, found: Initializer) -> bool:
    counts = torch.zeros(_BINS, dtype=torch.float64)
    columns = torch.zeros(2, weight.shape[1], dtype=torch.float64)
    # A uniform number's square has mean 1/3 and variance 4/45, a normal one's 1 and 2.
    square, spread = (1 / 3, 4 / 45) if found.kind == "uniform" else (1.0, 2.0)
    for part in _parts(weight, padding):
        values = _standard(part.double(), found)
        if bool((values.abs() > (1.0 if found.kind == "uniform" else 8.0)).any()):
            return False
        moments = torch.stack([values, (values.square() - square) * math.sqrt(square / spread)])
        columns += moments.sum(dim=1)
        if _deviates(moments.mean(dim=(1, 2)), part.numel(), square):
            return False
        counts += torch.histc(_probability(values, found), _BINS, 0.0, 1.0)
    rows = n // weight.shape[1]
    if _deviates(columns / rows, rows, square):
        return False
    expected = torch.arange(1, _BINS + 1, dtype=torch.float64) / _BINS
    return bool((counts.cumsum(0) / n - expected).abs().max() < _KS_MOST / math.sqrt(n))


def _deviates(means: Tensor, n: int, variance: float) -> bool:
    """Whether a mean of n values of this variance is too far from 0."""
    return bool((means.abs() > Z_MOST * math.sqrt(variance / n)).any())


def _standard(values: Tensor, found: Initializer) -> Tensor:
    """Values between -1 and 1 of a uniform distribution, of standard deviation 1 of a normal one."""
    params = dict(found.params)
    if found.kind == "uniform":
        return (values - (params["low"] + params["high"]) / 2) / ((params["high"] - params["low"]) / 2)
    return (values - params["mean"]) / params["std"]


def _probability(values: Tensor, found: Initializer) -> Tensor:
    return (values + 1) / 2 if found.kind == "uniform" else torch.special.ndtr(values)


def _parts(weight: Tensor, padding: Sequence[int]) -> Iterator[Tensor]:
    """The weight's rows without those that pad, [m, dim] at a time."""
    n_values = min(max(weight.numel() // _PARTS, _LEAST_VALUES), _PART_VALUES)
    n_rows = max(1, n_values // weight.shape[1])
    for at, part in enumerate(torch.split(weight.detach(), n_rows)):
        inside = [row - at * n_rows for row in padding if 0 <= row - at * n_rows < len(part)]
        if inside:
            keep = torch.ones(len(part), dtype=torch.bool)
            keep[inside] = False
            part = part[keep.to(part.device)]
        if part.numel():
            yield part.cpu()


class _ByNumber(nn.Embedding):
    embed_scale: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale  # type: ignore[no-any-return]


class _ByBuffer(nn.Embedding):
    embed_scale: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)  # type: ignore[no-any-return]


def _code(forward: Any) -> Any:
    """Return a function's instructions, and the names and constants they refer to by number, but for a docstring."""
    if not isinstance(forward, FunctionType):
        return None
    code = forward.__code__
    constants = tuple(one for one in code.co_consts if one != forward.__doc__)
    return code.co_code, code.co_names, code.co_freevars, code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0x0C, constants


_LINES = tuple(_code(kind.forward) for kind in (_ByNumber, _ByBuffer))


def is_scaled(module: nn.Module) -> bool:
    """Return whether a module is torch's Embedding but for a factor of its results, `embed_scale`: a number or a buffer of no axes."""
    kinds = [kind for kind in type(module).__mro__ if "forward" in vars(kind)]
    if len(kinds) < 2 or kinds[1] is not nn.Embedding or _code(vars(kinds[0])["forward"]) not in _LINES:
        return False
    scale = getattr(module, "embed_scale", None)
    if "embed_scale" in module._buffers:
        saved = "embed_scale" not in module._non_persistent_buffers_set
        return isinstance(scale, torch.Tensor) and scale.dim() == 0 and scale.device.type != "meta" and not saved
    return isinstance(scale, int | float)
