"""Several tables looked up in one call: what collections and DenseFeatures have in common.

All features of a table are one lookup, and all tables of a forward pass one pull (or as many as told). What must not live here: what
features are (`jagged`, `columns`), and what results look like.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from trainer.torch.bags import embedding_bag
from trainer.torch.lookup import LookupModule, TableModule
from trainer.torch.ports import TablePort
from trainer.torch.shared import Asked
from trainer.torch.tables import modules_by_table, share_lookups

LookedUp = tuple[Tensor, Tensor]
"""Distinct rows float32 [n, dim], and int64 [m]: where in them each id's row is."""


class TableCollection(LookupModule):
    """A module over several tables. The modules in `tables` hold what waits for a step; they are never called themselves.

    Args:
        tables: kvemb tables of one cluster, distinct.
        n_groups: pull them in at most so many pulls.
    """

    def __init__(self, tables: Sequence[TablePort], n_groups: int = 1) -> None:
        super().__init__()
        self.tables = nn.ModuleList(TableModule(table, None) for table in tables)
        self._by_name: dict[str, TableModule] = {module.table.name: module for module in self._modules_of_tables()}
        self._groups = [list(self._by_name)[first::n_groups] for first in range(min(n_groups, len(tables)))]
        if tables:
            share_lookups(modules_by_table(self))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all tables for lookups by this module, or train them again."""
        for module in self._by_name.values():
            module.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def _asked(self, ids: Mapping[str, Tensor]) -> list[Asked]:
        """Return what a lookup of these ids, for every table, asks for."""
        return [(self._by_name[name].table, self._by_name[name].asked_of(of)) for name, of in ids.items()]

    def _look_up(self, ids: Mapping[str, Tensor]) -> dict[str, LookedUp]:
        """Look ids [m] up, for every table. Raises as `TableModule.asked_of`; nothing was sent then."""
        asked = dict(zip(ids, self._asked(ids), strict=True))
        modules = [self._by_name[name] for name in ids]
        for module in modules:
            if module.recording:
                module.pending.check_room()
        taken: dict[str, LookedUp] = {}
        for group in self._groups:
            shared, recording = self._by_name[group[0]].shared, any(self._by_name[name].recording for name in group)
            found = shared.look_up([asked[name] for name in group], recording=recording)
            for name, one in zip(group, found, strict=True):
                taken[name] = self._by_name[name].take(one, ids[name])[:2]
        return taken

    def _modules_of_tables(self) -> list[TableModule]:
        return [module for module in self.tables if isinstance(module, TableModule)]


def pool(rows: LookedUp, lengths: Tensor, combiner: str, weights: Tensor | None = None) -> Tensor:
    """Combine the rows of each bag; empty bags are zeros.

    Args:
        rows: of m ids.
        lengths: integers [b], together m.
        combiner: "sum", "mean", or "sqrtn": the sum over the root of the sum of the squared weights.
        weights: float32 [m]; with "mean" the sum is divided by theirs. None: 1 each.

    Returns:
        float32 [b, dim].
    """
    leaf, at = rows
    if weights is None and len(at) == len(lengths) and bool((lengths == 1).all()):  # a value each: every combiner gives its row
        return leaf.index_select(0, at)
    lengths = lengths.to(device=at.device, dtype=torch.int64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if combiner == "mean" and weights is None:
        return embedding_bag(at, leaf, offsets, mode="mean", include_last_offset=True)
    factors = weights
    if combiner != "sum":
        weights = torch.ones(len(at), device=at.device) if weights is None else weights
        factors = weights / _norms(weights, lengths, combiner)
    return embedding_bag(at, leaf, offsets, mode="sum", per_sample_weights=factors, include_last_offset=True)


def _norms(weights: Tensor, lengths: Tensor, combiner: str) -> Tensor:
    """What each value's weight is divided by: [m]."""
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums = weights.new_zeros(len(lengths)).index_add(0, bag, weights if combiner == "mean" else weights.square())
    return (sums if combiner == "mean" else sums.sqrt())[bag]
