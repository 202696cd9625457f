"""The modules of a model that look rows up, by table, and the one `SharedLookups` that they have in common.

What must not live here: what a lookup or a step does.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from kvemb.errors import InvalidInputError

from ...bridge.shared_lookups import SharedLookups
from .table_module import TableModule


def modules_by_table(model: nn.Module) -> dict[str, list[TableModule]]:
    """Find the modules over each table, by its name, in the model's order.

    Raises:
        InvalidInputError: there is none, the tables belong to several clusters, or `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"the model must be a torch.nn.Module, got {model if isinstance(model, type) else type(model).__name__}")
    found: dict[str, list[TableModule]] = {}
    for module in model.modules():
        if isinstance(module, TableModule):
            found.setdefault(module.table.name, []).append(module)
    if not found:
        raise InvalidInputError("the model has no kvemb.torch.Embedding or EmbeddingBag, and nothing else is trained here")
    clusters = {id(m.table.cluster) for modules in found.values() for m in modules}
    if len(clusters) > 1:
        raise InvalidInputError(f"the tables {', '.join(found)} belong to {len(clusters)} clusters; make one SparseOptimizer for each")
    return found


def share_lookups(modules_of: Mapping[str, Sequence[TableModule]]) -> SharedLookups:
    """Give these modules one `SharedLookups`: the one that all of them have already, or a new one.

    Example:
        share_lookups(modules_by_table(model))
    """
    modules = [module for ones in modules_of.values() for module in ones]
    first = modules[0].shared
    if any(module.shared is not first for module in modules) or first.tables.keys() != modules_of.keys():
        first = SharedLookups({name: ones[0].table for name, ones in modules_of.items()}, modules[0].table.cluster)
        for module in modules:
            module.shared = first
    return first
