"""Several tables looked up in one call: the common part of collections and DenseFeatures.

All features of a table are one lookup, and all tables of a forward pass one pull (or as many as given).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic

import torch
from torch import Tensor, nn

from ...bridge.shared_lookups import Asked
from ...lookahead.cluster_ports import TablePort
from ..lookup.table_module import LookupModule, TableModule, modules_by_table, share_lookups
from .pooling import LookedUp, RecipeT


class TableCollection(LookupModule, Generic[RecipeT]):
    """A module over several tables. The modules in `tables` hold the lookups that wait for a step; they are never called themselves."""

    def __init__(self, tables: Sequence[TablePort], recipe: RecipeT, n_groups: int = 1) -> None:
        super().__init__()
        self.recipe = recipe
        self.tables = nn.ModuleList(TableModule(table, None) for table in tables)
        self._by_name: dict[str, TableModule] = {module.table.name: module for module in self.table_modules()}
        self.groups = [list(self._by_name)[first::n_groups] for first in range(min(n_groups, len(tables)))]
        """Names of the tables that are pulled together."""
        if tables:
            share_lookups(modules_by_table(self))

    def asked(self, features: Any) -> list[Asked]:
        """Return what forward would look up."""
        return self._asked(self.recipe.ids(features))

    def extra_repr(self) -> str:
        """Describe the computation on each table."""
        return str(self.recipe)

    def _asked(self, ids: Mapping[str, Tensor]) -> list[Asked]:
        """Return each table with the ids that a lookup asks it for."""
        return [(self._by_name[name].table, self._by_name[name].asked_of(of)) for name, of in ids.items()]

    def _look_up(self, ids: Mapping[str, Tensor]) -> dict[str, LookedUp]:
        """Look ids [m] up, for every table. Raises as `TableModule.asked_of`; nothing was sent then."""
        asked = dict(zip(ids, self._asked(ids), strict=True))
        modules = [self._by_name[name] for name in ids]
        for module in modules:
            module.mark.before_lookup(module.recording)
            if module.recording:
                module.pending.check_room()
        taken: dict[str, LookedUp] = {}
        for group in self.groups:
            shared, recording = self._by_name[group[0]].shared, any(self._by_name[name].recording for name in group)
            found = shared.look_up([asked[name] for name in group], recording=recording)
            for name, one in zip(group, found, strict=True):
                taken[name] = self._by_name[name].take(one, ids[name])[:2]
        return taken

    @property
    def dtype(self) -> torch.dtype:
        """Of results: float32, unless `model.bfloat16()` or the like said otherwise."""
        modules = self.table_modules()
        return modules[0].dtype if modules else torch.float32

    def table_modules(self) -> list[TableModule]:
        """Return the modules of the tables, one each."""
        return [module for module in self.tables if isinstance(module, TableModule)]
