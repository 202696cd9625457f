"""Recipe: what a module over several tables computes, whoever has the rows.

A recipe turns features into ids by table, and rows by table into the module's result. `TableCollection` runs it on rows of a cluster,
`PlainTables` on rows that it has itself. What must not live here: features (`keyed_recipes`, `column_recipe`), rows.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

LookedUp = tuple[Tensor, Tensor]
"""Rows float32 [n, dim], and int64 [m]: where in them each id's row is."""
LookUp = Callable[[Mapping[str, Tensor]], Mapping[str, LookedUp]]
"""From ids [m] by table to their rows by table."""


class Recipe(Protocol):
    """A forward pass without its rows. It holds no rows and no connection, is never changed, and can be pickled if its parts can."""

    def ids(self, features: Any) -> dict[str, Tensor]:
        """Return what `run` would look up: ids [m] of every table."""
        ...

    def run(self, features: Any, look_up: LookUp) -> Any:
        """Compute the module's result, with one call of `look_up`.

        Raises:
            InvalidInputError: features are missing or do not fit; `look_up` was not called then.
        """
        ...

    def __str__(self) -> str:
        """Describe it in a word or two per table or column."""
        ...


RecipeT = TypeVar("RecipeT", bound=Recipe)


def exporting() -> bool:
    """Return whether torch.export records: what is done must then not depend on values, and sizes are symbols."""
    return bool(torch.compiler.is_compiling())  # a collection is never compiled, see `eager`; is_exporting is not in every torch
