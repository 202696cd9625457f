"""What `materialize` makes of collections and DenseFeatures: the same results, of rows that are parameters of the module.

They take the features that the originals take, know no cluster, and are trained by any torch optimizer. What must not live here: what is
computed (`keyed_recipes`, `column_recipe`), and where the rows come from (`materialize`).
"""

from collections.abc import Mapping
from typing import Any, Generic

import torch
from torch import Tensor, nn

from kvemb.errors import InvalidInputError

from ..collections.collection_configs import EmbeddingBagConfig, EmbeddingConfig
from ..collections.keyed_recipes import BagRecipe, SequenceRecipe
from ..lookup.eager import eager
from ..modules.column_recipe import ColumnRecipe
from ..modules.recipes import LookedUp, RecipeT
from .known_rows import KnownRows


class PlainTables(nn.Module, Generic[RecipeT]):
    """A module that computes a recipe's result from rows that are its own parameters.

    Args:
        recipe: what is computed.
        tables: by name, modules from ids [m] to rows [m, dim]: torch.nn.Embedding or `KnownRows`, whose weights are read where they are,
            or any other.

    Example:
        >>> from kvemb.torch import EmbeddingBagConfig, KeyedJaggedTensor
        >>> recipe = BagRecipe([EmbeddingBagConfig(name="page", embedding_dim=1, num_embeddings=3)], is_weighted=False)
        >>> rows = nn.Embedding.from_pretrained(torch.tensor([[1.0], [2.0], [4.0]]))
        >>> plain = PlainTables(recipe, {"page": rows})
        >>> plain(KeyedJaggedTensor.from_lists({"page": [[0, 2], []]}))["page"].tolist()
        [[5.0], [0.0]]
    """

    def __init__(self, recipe: RecipeT, tables: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.recipe = recipe
        self.tables = nn.ModuleList(tables.values())  # by number, as in the original: a table's name may be no name of a module
        self._names = list(tables)

    @eager
    def forward(self, features: Any) -> Any:
        """Return what the original returns.

        Raises:
            InvalidInputError: features are missing or do not fit, or torch.jit.trace records.
            IndexError: an id is outside the table's ids (of torch, where all rows are here).
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise InvalidInputError("torch.jit.trace would write down the sizes of this batch for all others; use torch.export")
        return self.recipe.run(features, self._look_up)

    def extra_repr(self) -> str:
        """Describe what is computed of which table."""
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
    return module(wide), torch.arange(len(wide), device=wide.device)  # what somebody put in its place: `distribute` may have
