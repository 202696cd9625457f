"""Embedding and EmbeddingBag: torch's modules of the same names over a kvemb table.

Torch combines the rows pulled, so results and gradients are torch's own (averages and weighted sums of thousands of ids up to rounding). On
a CPU plain lookups are an index_select: the same bits, in 0.27 (dim 8) to 0.87 (dim 64) of torch.nn.functional.embedding's time.

Of torch's arguments there are padding_idx, and for bags mode, include_last_offset, offsets and per_sample_weights. max_norm would write
rows, scale_grad_by_freq would count other trainers' ids, gradients are always sparse, and results are float32 on the device of `input`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvemb.errors import InvalidInputError

from ...bridge.shared_lookups import Asked
from ...lookahead.cluster_ports import TablePort
from ..lookup.parameter_walks import eager
from ..lookup.table_module import TableModule
from ..lookup.table_weight import is_readable, too_large, weight_over
from .pooling import embedding_bag

MODES = ("sum", "mean", "max")


class _TorchModule(TableModule):
    """A module in the place of torch's: its sizes under torch's names."""

    @property
    def num_embeddings(self) -> int | None:
        """How many ids there are, under torch's name; None for a table without num_ids."""
        return self.table.definition.num_ids

    def __getattr__(self, name: str) -> Any:
        """Return torch's `weight`, unless the table is too large to be read whole; the error then says where the rows are."""
        if name != "weight":
            return super().__getattr__(name)
        definition = self.table.definition
        if not is_readable(definition.num_ids, definition.dim):
            raise AttributeError(too_large(self))
        return weight_over(self)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Refuse the weight of a plain model: with `strict=False` it would be left out silently."""
        if prefix + "weight" in state_dict:
            raise InvalidInputError(
                f"the state holds {prefix + 'weight'!r}, the rows of a plain model, and this module is over table {self.table.name!r}, "
                "whose rows are in a cluster. Load such a state before distribute, which carries it; or leave this key out, if the "
                "table's rows are what you want"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class Embedding(_TorchModule):
    """Look up rows by id, as torch.nn.Embedding.

    In training mode with gradients enabled, backward leaves the gradient of each row for the model's SparseOptimizer. In
    eval mode, or under no_grad, nothing is recorded, and rows require no gradient.

    Args:
        table: a kvemb table.
        padding_idx: the id whose row gets no gradient and is never pushed. Its vector is the table's row of that id: the
            initial value unless `table.assign([padding_idx], zeros)` or the like was called once.

    Raises:
        InvalidInputError: `table` is no table, or `padding_idx` no id of it.

    Source: torch.nn.Embedding.
    """

    def __init__(self, table: TablePort, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)

    def asked(self, input: Tensor) -> list[Asked]:
        """Return what forward would look up."""
        return [(self.table, self.asked_of(input))]

    @eager
    def forward(self, input: Tensor) -> Tensor:
        """Look up rows of integer ids of any shape: float32 [*input.shape, dim].

        Raises:
            InvalidInputError: `input` is no integer tensor, holds ids outside the table's domain, or 1000 lookups wait for a step.
        """
        leaf, at, padding = self._look_up(input)
        if padding is None and at.device.type == "cpu":
            return leaf.index_select(0, at.reshape(-1)).reshape(*at.shape, leaf.shape[1]).to(self.dtype)
        return F.embedding(at, leaf, padding_idx=padding).to(self.dtype)


class ScaledEmbedding(Embedding):
    """Embedding whose results are multiplied by `embed_scale`, as Hugging Face's BART and its kin do. Rows are not scaled."""

    def __init__(self, table: TablePort, padding_idx: int | None, embed_scale: float | Tensor) -> None:
        super().__init__(table, padding_idx)
        self.embed_scale: float | Tensor
        if isinstance(embed_scale, Tensor):
            self.register_buffer("embed_scale", embed_scale, persistent=False)
        else:
            self.embed_scale = embed_scale

    @property
    def factor(self) -> float:
        """The factor of results: a buffer is rounded to their type, a number is not."""
        return float(self.embed_scale.to(self.dtype) if isinstance(self.embed_scale, Tensor) else self.embed_scale)

    @eager
    def forward(self, input: Tensor) -> Tensor:
        """Look up rows, and scale them; as Embedding.forward."""
        return super().forward(input) * self.factor


class EmbeddingBag(_TorchModule):
    """Sum, average or take the maximum of the rows of each bag of ids, as torch.nn.EmbeddingBag. Empty bags are zeros.

    Args:
        table: a kvemb table.
        mode: "sum", "mean" or "max".
        include_last_offset: `offsets` has one more element, the length of `input` (CSR format).
        padding_idx: the id that counts for nothing: not in the bag's sum, mean or maximum, not in the gradient, never
            pushed.

    Raises:
        InvalidInputError: `table` is no table, an unknown mode, or `padding_idx` no id of the table.

    Source: torch.nn.EmbeddingBag.
    """

    def __init__(self, table: TablePort, mode: str = "mean", include_last_offset: bool = False, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)
        if mode not in MODES:
            raise InvalidInputError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def asked(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> list[Asked]:
        """Return what forward would look up."""
        return [(self.table, self.asked_of(self._bags(input, offsets)[0]))]

    @eager
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Combine the rows of each bag: float32 [b, dim].

        Args:
            input: ids, any integer dtype: [b, l], b bags of l ids each, or [m] with `offsets`.
            offsets: integers [b]: where each bag begins in `input`; from 0, ascending. None for 2-D `input`.
            per_sample_weights: float32 of the shape of `input`: factors of the rows; mode "sum" only. May require a gradient.

        Raises:
            InvalidInputError: on any of these not being so, or 1000 lookups waiting for a step; nothing was sent.
        """
        flat, starts, with_end = self._bags(input, offsets)
        factors = self._factors(input, per_sample_weights)
        leaf, at, padding = self._look_up(flat)
        return embedding_bag(
            at,
            leaf,
            starts.to(dtype=torch.int64, device=at.device),
            mode=self.mode,
            per_sample_weights=factors,
            include_last_offset=with_end,
            padding_idx=padding,
        ).to(self.dtype)

    def extra_repr(self) -> str:
        """Describe the module as torch's own modules do."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def _bags(self, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        """Return ids [m], where each bag begins, and whether that ends with m."""
        if not isinstance(input, Tensor) or input.dim() not in (1, 2):
            raise InvalidInputError(f"input must be a tensor of ids, [b, l] or [m], got {_shape(input)}")
        if input.dim() == 2:
            if offsets is not None:
                raise InvalidInputError("offsets must be None when input is 2-D: each line of input is a bag")
            n_bags, length = input.shape
            return input.reshape(-1), torch.arange(n_bags, device=input.device) * length, False
        if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.is_floating_point() or offsets.is_complex():
            raise InvalidInputError(f"offsets must be a 1-D integer tensor when input is 1-D, got {_shape(offsets)}")
        self._check_offsets(offsets, len(input))
        return input, offsets, self.include_last_offset

    def _check_offsets(self, offsets: Tensor, n_ids: int) -> None:
        """Refuse offsets that go back or beyond the end, for which torch computes something."""
        if len(offsets) == 0:
            if self.include_last_offset or n_ids:
                raise InvalidInputError(f"offsets is empty, but input holds {n_ids} ids; the first offset must be 0")
            return
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or bool((offsets[1:] < offsets[:-1]).any()):
            raise InvalidInputError(f"offsets must begin with 0 and ascend, got {offsets[:8].tolist()} …")
        if last > n_ids or (self.include_last_offset and last != n_ids):
            expected = "exactly" if self.include_last_offset else "at most"
            raise InvalidInputError(f"the last offset is {last}, expected {expected} {n_ids}, the length of input")

    def _factors(self, input: Tensor, per_sample_weights: Tensor | None) -> Tensor | None:
        if per_sample_weights is None:
            return None
        if self.mode != "sum":
            raise InvalidInputError(f"per_sample_weights goes with mode 'sum' only, this module has {self.mode!r}")
        given = isinstance(per_sample_weights, Tensor)
        if not given or per_sample_weights.shape != input.shape or per_sample_weights.dtype not in (torch.float32, self.dtype):
            raise InvalidInputError(
                f"per_sample_weights must be {self.dtype} of shape {tuple(input.shape)}, got {_shape(per_sample_weights)}"
            )
        return per_sample_weights.reshape(-1).float()


def _shape(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
