"""Plain copies of collections and DenseFeatures, made by `materialize`: the same results, from rows that are the module's parameters.

KnownRows and KnownRowsBag have the rows of some ids of a table; ScaledRows and ScaledKnownRows are the copies of `ScaledEmbedding`. A known
id is found by binary search, in operations that torch.export and torch.jit.trace record.
"""

from collections.abc import Mapping
from typing import Any, Generic

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from kvemb.errors import InvalidInputError

from ..collections.keyed_recipes import BagRecipe, EmbeddingBagConfig, EmbeddingConfig, SequenceRecipe
from ..lookup.parameter_walks import eager
from ..modules.column_recipe import ColumnRecipe
from ..modules.embedding import EmbeddingBag
from ..modules.pooling import LookedUp, RecipeT


class KnownRows(nn.Module):
    """Rows of some ids int64 [n], unique and ascending, found by binary search; the last of the weight [n + 1, dim] is for any other id."""

    ids: Tensor

    def __init__(self, ids: Tensor, weight: nn.Parameter, padding_idx: int | None = None) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self._n_ids = int(ids.shape[0])
        self.weight = weight
        self.padding_at = None if padding_idx is None else int(self.places(torch.tensor(padding_idx)))

    def places(self, input: Tensor) -> Tensor:
        """Return the positions in `weight`, of the shape of `input`."""
        wanted = input.to(torch.int64)
        if is_scripting():  # torch.jit.script compiles what it reads, and leaves the other branch unread
            found = torch.searchsorted(self.ids, wanted.contiguous())
        else:
            found = self._n_below(wanted) if torch.onnx.is_in_onnx_export() else torch.searchsorted(self.ids, wanted.contiguous())
        at = found.clamp(max=self._n_ids - 1)
        return torch.where(self.ids[at] == wanted, at, self.ids.shape[0])

    def _n_below(self, wanted: Tensor) -> Tensor:
        """Return how many ids are below each, as searchsorted, which ONNX does not have. Bit by bit, the highest first."""
        n_below = torch.zeros_like(wanted)
        for bit in reversed(range(self._n_ids.bit_length())):
            more = n_below + (1 << bit)
            at = (more - 1).clamp(max=self._n_ids - 1)
            n_below = torch.where((more <= self._n_ids) & (self.ids[at] < wanted), more, n_below)
        return n_below

    def extra_repr(self) -> str:
        """Say how many there are."""
        return f"{self.ids.shape[0]}, {self.weight.shape[1]}"

    def forward(self, input: Tensor) -> Tensor:
        """Return float32 [*input.shape, dim]."""
        return F.embedding(self.places(input), self.weight, padding_idx=self.padding_at)


class KnownRowsBag(KnownRows):
    """The same for bags: see torch.nn.EmbeddingBag for forward. An id that is not known counts as a row of zeros."""

    def __init__(self, ids: Tensor, weight: nn.Parameter, bag: EmbeddingBag) -> None:
        super().__init__(ids, weight, bag.padding_idx)
        self.mode, self.include_last_offset = bag.mode, bag.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return float32 [b, dim]."""
        return F.embedding_bag(
            self.places(input),
            self.weight,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_at,
        )


class ScaledRows(nn.Embedding):
    """torch's Embedding, whose results are multiplied by `embed_scale`."""

    def __init__(self, n_rows: int, dim: int, padding_idx: int | None, embed_scale: float) -> None:
        super().__init__(n_rows, dim, padding_idx=padding_idx)
        self.embed_scale = embed_scale

    def forward(self, input: Tensor) -> Tensor:
        """Return [*input.shape, dim]."""
        return super().forward(input) * self.embed_scale


class ScaledKnownRows(KnownRows):
    """KnownRows, whose results are multiplied by `embed_scale`."""

    def __init__(self, ids: Tensor, weight: nn.Parameter, padding_idx: int | None, embed_scale: float) -> None:
        super().__init__(ids, weight, padding_idx)
        self.embed_scale = embed_scale

    def forward(self, input: Tensor) -> Tensor:
        """Return float32 [*input.shape, dim]."""
        return super().forward(input) * self.embed_scale


class PlainTables(nn.Module, Generic[RecipeT]):
    """A module that computes a recipe's result from rows of its own: by table a module from ids [m] to rows [m, dim]."""

    def __init__(self, recipe: RecipeT, tables: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.recipe = recipe
        self.tables = nn.ModuleList(tables.values())  # by number, as in the original: a table's name may be no name of a module
        self._names = list(tables)

    @eager
    def forward(self, features: Any) -> Any:
        """Return what the original returns."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise InvalidInputError("torch.jit.trace would write down the sizes of this batch for all others; use torch.export")
        return self.recipe.run(features, self._look_up)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse torch.jit.script, which calls this of every module first."""
        raise InvalidInputError("torch.jit.script cannot compile how features are taken apart; use torch.export")

    def extra_repr(self) -> str:
        """Describe the computation on each table."""
        return str(self.recipe)

    def _look_up(self, ids: Mapping[str, Tensor]) -> dict[str, LookedUp]:
        return {name: _looked_up(name, module, ids[name]) for name, module in zip(self._names, self.tables, strict=True)}


class PlainEmbeddingBagCollection(PlainTables[BagRecipe]):
    """An EmbeddingBagCollection whose rows are its own parameters."""

    def is_weighted(self) -> bool:
        """Whether features have weights."""
        return self.recipe.is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs."""
        return list(self.recipe.bag_configs)


class PlainEmbeddingCollection(PlainTables[SequenceRecipe]):
    """An EmbeddingCollection whose rows are its own parameters."""

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs."""
        return list(self.recipe.configs)


class PlainDenseFeatures(PlainTables[ColumnRecipe]):
    """DenseFeatures whose rows are its own parameters."""

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.recipe.width


def _looked_up(name: str, module: nn.Module, ids: Tensor) -> LookedUp:
    if ids.is_floating_point() or ids.is_complex():
        raise InvalidInputError(f"table {name!r}: input must be a tensor of integer ids, got {ids.dtype}")
    wide = ids.to(torch.int64)
    if isinstance(module, KnownRows):
        return module.weight, module.places(wide)
    if isinstance(module, nn.Embedding):
        return module.weight, wide
    return module(wide), torch.arange(len(wide), device=wide.device)  # another module in its place, which `distribute` may have put there
