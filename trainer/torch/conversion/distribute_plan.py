"""Where the embeddings of a torch model are, and which cannot be tables. Changes nothing.

A weight is one table, however many modules hold it, and every holder must be an embedding that is replaced, too.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn

from kvemb.errors import InvalidInputError

from ...bridge.filled_tables import Site, WeightPlace
from ..lookup.table_module import TableModule
from ..lookup.table_weight import WEIGHT_BYTES, TableWeight, is_readable
from .outside_references import OutsideReference

TorchEmbedding = torch.nn.Embedding | torch.nn.EmbeddingBag
_KINDS = (nn.Embedding, nn.EmbeddingBag)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}  # by name: importing them takes seconds
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def places_of(model: nn.Module) -> list[WeightPlace]:
    """Find every nn.Embedding and nn.EmbeddingBag, a module at two places once."""
    _check_model(model)
    found: dict[TorchEmbedding, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _KINDS):
            found.setdefault(module, []).append(path)
    return [_place(module, tuple(paths)) for module, paths in found.items()]


def _place(module: TorchEmbedding, paths: tuple[str, ...]) -> WeightPlace:
    weight = module._parameters.get("weight")

    def rows_of(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """On the meta device, which holds none, zeros."""
        assert weight is not None
        if weight.device.type == "meta":
            return np.zeros((len(ids), module.embedding_dim), np.float32)
        rows: NDArray[np.float32] = weight.detach()[torch.from_numpy(ids).to(weight.device)].cpu().numpy()
        return rows

    frozen = "frozen: it is not trained" if weight is not None and not weight.requires_grad else ""
    of = module if weight is None else weight
    return WeightPlace(paths, module, of, module.num_embeddings, module.embedding_dim, rows_of, frozen, module.padding_idx)


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


def problems_of(model: nn.Module, beside: Iterable[OutsideReference], holders: Sequence[WeightPlace]) -> Iterator[str]:
    """Yield the reasons why the modules that hold one weight cannot be replaced."""
    for one in holders:
        for problem in _problems(one.holder):
            yield f"{one.paths[0]!r}: {problem}"
    first, weight = holders[0].paths[0], holders[0].holder.weight
    if weight.dtype != torch.float32:
        yield f"{first!r}: its weight is {weight.dtype}, and rows are looked up as torch.float32 (storage may be 16 bits: dtype=)"
    replaced = {id(one.holder) for one in holders}
    for path, other in model.named_modules():
        for name, tensor in [*other._parameters.items(), *other._buffers.items()]:
            if tensor is None or id(other) in replaced or not _same_memory(tensor, weight) or _may_read(other, tensor, weight):
                continue
            yield (
                f"{first!r}: its weight is tied to {(path + '.' + name).lstrip('.')!r} ({type(other).__name__}), which needs "
                f"all of its rows at once; that can be the same parameter of another kind of module, up to {WEIGHT_BYTES >> 20} MiB"
            )
    for reference in beside:
        views = [path for path, held in reference.held if _is_view(held, weight)]
        if views and id(reference.owner) not in replaced:
            yield (
                f"{first!r}: attribute {reference.attribute!r} ({reference.kind}) holds a view of its weight, at {views[0]}, and would go "
                "on with the rows of now; hold the module or the parameter itself"
            )


def _is_view(held: object, weight: torch.Tensor) -> bool:
    return isinstance(held, torch.Tensor) and held is not weight and _same_memory(held, weight)


def _may_read(other: nn.Module, tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a module that has the weight as its own may go on with all of the table's rows: a head that is tied to the embedding."""
    return tensor is weight and isinstance(tensor, nn.Parameter) and not isinstance(other, _KINDS) and is_readable(*weight.shape)


def tied_to(model: nn.Module, site: Site) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, name) of parameters of other modules that are the site's weight, and read it whole."""
    replaced = {id(one.holder) for one in site.places}
    for path, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is site.weight and id(module) not in replaced:
                yield f"{path}.{name}".lstrip("."), module, name


def held_at(beside: Iterable[OutsideReference], site: Site) -> Iterator[str]:
    """Yield the paths of attributes that lead to a site's modules or its weight, beside the tree of modules."""
    ours = {id(site.weight), *(id(one.holder) for one in site.places)}
    for one in beside:
        if id(one.owner) not in ours:
            yield from (path for path, held in one.held if id(held) in ours)


def _problems(module: TorchEmbedding) -> Iterator[str]:
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


# Embeddings whose forward multiplies by a number of theirs: Hugging Face's BartScaledWordEmbedding, Gemma's, and two dozen like them. They
# share no class, but their forward is one of two lines; the compiled code of a class's forward is compared with that of these.


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
