"""Which embeddings of a model become tables, which stay as they are, and which cannot be either: decided before anything changes.

Strategy: an embedding of enough rows is replaced, or refused with all reasons at once. It stays only for a stated reason: too few rows,
frozen, or asked for. A weight is one table, however many modules hold it, and every holder must be an embedding that is replaced, too.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn

from kvemb.errors import InvalidInputError
from kvemb.schema.table_def import check_table_name

from ...bridge.filled_tables import none_replaced
from ..lookup.table_module import TableModule
from ..lookup.table_weight import WEIGHT_BYTES, TableWeight, is_readable
from .outside_references import OutsideReference, outside_references
from .recognized_embeddings import is_scaled

Names = Mapping[str, str] | Callable[[str], str]
"""Table names by module path, or a function from path to name."""
TorchEmbedding = torch.nn.Embedding | torch.nn.EmbeddingBag
_KINDS = (nn.Embedding, nn.EmbeddingBag)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}  # by name: importing them takes seconds
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True, eq=False)
class Site:
    """One weight of a model that becomes a table, and every place that leads to it.

    Args:
        table: its name.
        weight: float32 [n_rows, dim]; may lie on the meta device.
        modules: that hold it, with their path in the model.
        tied: (path, module, name) of parameters of other modules that are the same weight, and read it whole.
        held: paths by which attributes lead to the modules or to the weight.
    """

    table: str
    weight: torch.Tensor
    modules: tuple[tuple[str, TorchEmbedding], ...]
    tied: tuple[tuple[str, nn.Module, str], ...] = ()
    held: tuple[str, ...] = ()

    @property
    def n_rows(self) -> int:
        """Rows of the weight: ids are 0 to n_rows - 1."""
        return int(self.weight.shape[0])

    @property
    def dim(self) -> int:
        """Weights per row."""
        return int(self.weight.shape[1])

    @property
    def padding(self) -> list[int]:
        """The padding ids of its modules, ascending."""
        return sorted({int(module.padding_idx) for _, module in self.modules if module.padding_idx is not None})

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows [n, dim] of the weight; on the meta device, which holds none, zeros."""
        if self.weight.device.type == "meta":
            return np.zeros((len(ids), self.dim), np.float32)
        rows: NDArray[np.float32] = self.weight.detach()[torch.from_numpy(ids).to(self.weight.device)].cpu().numpy()
        return rows

    def __str__(self) -> str:
        return f"table {self.table!r} (module {self.modules[0][0]!r})"


@dataclass(frozen=True, eq=False)
class DistributePlan:
    """Weights that become tables, and (path, why) of the embeddings that stay."""

    sites: tuple[Site, ...]
    left: tuple[tuple[str, str], ...]


def make_plan(model: nn.Module, min_rows: int, names: Names | None = None, leave: Collection[str] = (), prefix: str = "") -> DistributePlan:
    """Decide for each nn.Embedding and nn.EmbeddingBag whether it becomes a table."""
    _check_model(model)
    paths = _paths(model)
    modules = {id(module): module for _, module in paths}
    path_of: dict[int, str] = {}
    for path, module in paths:
        path_of.setdefault(id(module), path)
    _check_known("leave", leave, paths)
    staying = {id(module) for path, module in paths if path in leave}
    left, weights = [], dict[int, list[tuple[str, TorchEmbedding]]]()
    for key, module in modules.items():
        why = "leave=[…] names it" if key in staying else _reason_to_stay(module, min_rows)
        if why:
            left.append((path_of[key], why))
        else:
            weights.setdefault(id(module._parameters.get("weight", module)), []).append((path_of[key], module))
    beside = outside_references(model)
    problems = [problem for group in weights.values() for problem in _problems(model, beside, group)]
    if problems:
        raise InvalidInputError(
            "nothing was changed: " + "; ".join(problems) + ". Change the model, or keep these local with leave=[their paths]"
        )
    if not weights:
        raise none_replaced("nn.Embedding or nn.EmbeddingBag", left, "the model has none")
    sites = _named(list(weights.values()), names, prefix, paths)
    return DistributePlan(
        tuple(replace(site, tied=tuple(_tied(model, site)), held=tuple(_held(beside, site))) for site in sites), tuple(left)
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"the model must be a torch.nn.Module, got {model if isinstance(model, type) else type(model).__name__}")
    if isinstance(model, _KINDS):
        raise InvalidInputError("the model is an embedding itself and cannot be replaced in place; put it into a module")
    for path, module in model.named_modules():
        at = f"module {path!r}" if path else "the model"
        sharded = any(kind.__name__ in _SHARDED for kind in type(module).__mro__)
        if isinstance(module, _WRAPPERS) or sharded or hasattr(module, "_orig_mod"):
            raise InvalidInputError(
                f"{at} is wrapped by {type(module).__name__}; call distribute on the plain model first, then wrap it: the "
                "weights it replaces must be no parameters any more by then"
            )
        if isinstance(module, TableModule):
            raise InvalidInputError(
                f"{at} is over table {module.table.name!r} already; call distribute once, and before other modules over tables are "
                "added, or on the part of the model that has none"
            )
    if distributed.is_available() and distributed.is_initialized() and _is_in_ddp(model):
        raise InvalidInputError(
            "the model is inside of a DistributedDataParallel already, which would wait for gradients of the embeddings that are replaced; "
            "call distribute before it is wrapped. In Lightning that is configure_model, where the optimizer is made, too"
        )


def _is_in_ddp(model: nn.Module) -> bool:
    """Whether a wrapper that is alive holds the model: its hooks on parameters lie where Python does not see them."""
    wrappers = [one for one in gc.get_objects() if issubclass(type(one), nn.parallel.DistributedDataParallel)]
    return any(module is model for one in wrappers for module in one.modules())


def _paths(model: nn.Module) -> list[tuple[str, TorchEmbedding]]:
    """Every path of every embedding: a module at two places has two."""
    return [(path, module) for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, _KINDS)]


def _check_known(argument: str, given: Collection[str], paths: list[tuple[str, TorchEmbedding]]) -> None:
    if isinstance(given, str):
        raise InvalidInputError(f"{argument} is {given!r}; give a list of module paths")
    known = [path for path, _ in paths]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidInputError(f"{argument}: no embedding at {', '.join(map(repr, unknown))}; there are: {', '.join(known) or 'none'}")


def _reason_to_stay(module: TorchEmbedding, min_rows: int) -> str:
    if module.num_embeddings < min_rows:
        return f"{module.num_embeddings} rows, fewer than min_rows={min_rows}"
    weight = module._parameters.get("weight")
    if weight is not None and not weight.requires_grad:
        return "frozen: it is not trained"
    return ""


def _problems(model: nn.Module, beside: Iterable[OutsideReference], holders: list[tuple[str, TorchEmbedding]]) -> Iterator[str]:
    """Yield the reasons why the modules that hold one weight cannot be replaced."""
    for path, module in holders:
        for problem in _problems_of(module):
            yield f"{path!r}: {problem}"
    weight = holders[0][1].weight
    if weight.dtype != torch.float32:
        yield f"{holders[0][0]!r}: its weight is {weight.dtype}, and rows are looked up as torch.float32 (storage may be 16 bits: dtype=)"
    replaced = {id(module) for _, module in holders}
    for path, other in model.named_modules():
        for name, tensor in [*other._parameters.items(), *other._buffers.items()]:
            if tensor is None or id(other) in replaced or not _same_memory(tensor, weight) or _may_read(other, tensor, weight):
                continue
            yield (
                f"{holders[0][0]!r}: its weight is tied to {(path + '.' + name).lstrip('.')!r} ({type(other).__name__}), which needs "
                f"all of its rows at once; that can be the same parameter of another kind of module, up to {WEIGHT_BYTES >> 20} MiB"
            )
    yield from _held_beside(beside, holders)


def _may_read(other: nn.Module, tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a module that has the weight as its own may go on with all of the table's rows: a head that is tied to the embedding."""
    return tensor is weight and isinstance(tensor, nn.Parameter) and not isinstance(other, _KINDS) and is_readable(*weight.shape)


def _tied(model: nn.Module, site: Site) -> Iterator[tuple[str, nn.Module, str]]:
    replaced = {id(module) for _, module in site.modules}
    for path, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is site.weight and id(module) not in replaced:
                yield f"{path}.{name}".lstrip("."), module, name


def _held_beside(beside: Iterable[OutsideReference], holders: list[tuple[str, TorchEmbedding]]) -> Iterator[str]:
    """Yield attributes that lead to the memory of a replaced weight by another tensor, which could not be changed with it."""
    modules, weight = {id(module) for _, module in holders}, holders[0][1].weight
    for one in beside:
        views = [path for path, held in one.held if isinstance(held, torch.Tensor) and held is not weight and _same_memory(held, weight)]
        if views and id(one.owner) not in modules:
            yield (
                f"{holders[0][0]!r}: attribute {one.attribute!r} ({one.kind}) holds a view of its weight, at {views[0]}, and would go "
                "on with the rows of now; hold the module or the parameter itself"
            )


def _held(beside: Iterable[OutsideReference], site: Site) -> Iterator[str]:
    """The paths of attributes that lead to a site's modules or its weight, beside the tree of modules."""
    ours = {id(site.weight), *(id(module) for _, module in site.modules)}
    for one in beside:
        if id(one.owner) not in ours:
            yield from (path for path, held in one.held if id(held) in ours)


def _problems_of(module: TorchEmbedding) -> Iterator[str]:
    kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    if isinstance(module._parameters.get("weight"), TableWeight):
        yield "it was replaced already, in another model that holds it, and looks up that one's table; take a copy.deepcopy made before"
        return
    if "weight" not in module._parameters:
        yield "its weight is computed from others (a parametrization)"
    scaled = is_scaled(module)
    changed = [name for name in ("forward", "__call__") if getattr(type(module), name) is not getattr(kind, name)]
    if changed not in ([], ["forward"] if scaled else []) or "forward" in vars(module):
        yield f"{type(module).__name__} has a forward of its own; compute that in the module around it, of what a plain one returns"
    taken = {"weight", "embed_scale"} if scaled else {"weight"}
    own = [name for held in (module._parameters, module._buffers, module._modules) for name in held if name not in taken]
    if own and "weight" in module._parameters:
        yield f"it has {', '.join(own)} beside its weight, which would be lost; keep that in the module around it"
    if module.max_norm is not None:
        yield "max_norm: a lookup would write rows, which only parameter servers do"
    if module.scale_grad_by_freq:
        yield "scale_grad_by_freq: the counts of other trainers' batches would be needed"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        yield "it has hooks, which would be lost"
    if any(getattr(module._parameters.get("weight"), hooks, None) for hooks in _WEIGHT_HOOKS):
        yield "its weight has hooks, which would be lost"
    if getattr(module._parameters.get("weight"), "_in_backward_optimizers", None):
        yield (
            "apply_optimizer_in_backward gave its weight an optimizer, which would never see a gradient of a row; give distribute one "
            "(optimizer=…) for rows, and call apply_optimizer_in_backward for the other parameters only"
        )


def _same_memory(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    if tensor is weight:
        return True
    if tensor.device != weight.device or weight.device.type == "meta" or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def _named(
    groups: list[list[tuple[str, TorchEmbedding]]], names: Names | None, prefix: str, paths: list[tuple[str, TorchEmbedding]]
) -> tuple[Site, ...]:
    if names is not None and not callable(names):
        _check_known("names", names, paths)
    sites, taken = [], dict[str, str]()
    for holders in groups:
        every = [path for path, module in paths if any(module is one for _, one in holders)]
        name = _name(every, names, prefix)
        if name in taken:
            raise InvalidInputError(
                f"names: {taken[name]!r} and {every[0]!r} would both be table {name!r}; rows are shared by sharing a weight"
            )
        taken[name] = every[0]
        sites.append(Site(name, holders[0][1].weight, tuple(holders)))
    return tuple(sites)


def _name(paths: list[str], names: Names | None, prefix: str) -> str:
    """The table's name behind the prefix, from the first of the weight's paths that has one."""
    if callable(names):
        name = names(paths[0])
    else:
        given = [names[path] for path in paths if path in names] if names else []
        name = given[0] if given else paths[0]
    try:
        return check_table_name(prefix + name)
    except InvalidInputError as error:
        raise InvalidInputError(f"module {paths[0]!r}: {error}; give names={{{paths[0]!r}: …}}") from error
