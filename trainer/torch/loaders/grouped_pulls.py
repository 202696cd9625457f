"""Pulls of a prepared loader, split where modules ask for their tables in groups (`emb_num_groups`).

What must not live here: when something is pulled. Strategy: a batch's rows are one pull. Only the tables of modules with groups are
pulled apart: each group is a pull of its own, one after another. No pull is larger than the module's would be, and none is made in vain.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..modules.table_collection import TableCollection


class GroupedPulls:
    """A cluster's pulls, in groups of tables.

    Args:
        cluster: pulls; with `progress` where that is asked for.
        groups: names of tables that are pulled together; a table that stands in two belongs to the first, those in none are one more.
    """

    def __init__(self, cluster: Any, groups: Sequence[Sequence[str]]) -> None:
        self._cluster = cluster
        self._group_of = {name: at for at, group in reversed(list(enumerate(groups))) for name in group}

    def pull_versions(
        self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True
    ) -> dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """Fetch rows and versions of several tables; see `Cluster.pull_versions`, whose errors leave nothing behind."""
        groups: dict[int, dict[str, NDArray[Any]]] = {}
        for name, of in ids.items():
            groups.setdefault(self._group_of.get(name, -1), {})[name] = of
        pulled: dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]] = {}
        for group in groups.values():
            pulled.update(self._cluster.pull_versions(group, stored=stored))
        return pulled

    def progress(self) -> Any:
        """Tell how far the shards have come."""
        return self._cluster.progress()


def grouped(model: nn.Module, cluster: Any) -> Any:
    """Return what pulls for a model: the cluster itself, unless a module of it wants its tables in several groups."""
    collections = [module for module in model.modules() if isinstance(module, TableCollection) and len(module.groups) > 1]
    groups = [group for collection in collections for group in collection.groups]
    return GroupedPulls(cluster, groups) if groups else cluster
