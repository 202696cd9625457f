"""A table as the tensor that its module's `weight` was: read whole, where code scores all rows, sums a penalty or ties a head to it.

Strategy: the tensor itself holds nothing but its shape; any computation with it pulls all rows at that moment, in id order, as a leaf. Its
gradient waits for the step as that of any lookup, and is pushed; so a step moves every row, as torch's would. Padding rows are no
exception, as in torch.

It is read-only: writing into it is refused, and so is reading a table beyond WEIGHT_BYTES, which would be done unasked at every step.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvemb.errors import InvalidInputError

from .parameter_walks import eager
from .pending_lookups import Lookup

if TYPE_CHECKING:
    from .table_module import TableModule

WEIGHT_BYTES = 64 << 20
"""The largest table that is read whole: a million rows of dim 16, which take about a second."""
# What needs no rows: attributes but these, and these functions.
_ROWS = {"T", "H", "mT", "mH", "real", "imag", "data"}
_KNOWN = {
    *("size", "dim", "ndimension", "numel", "nelement", "__len__", "__hash__", "element_size", "stride", "is_contiguous"),
    *("is_floating_point", "is_complex", "untyped_storage"),
}
# These write, or leave something with a tensor that is gone when the function returns.
_WRITES = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__set__", "__delete__"),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "data_ptr", "storage"),
}


class TableWeight(Tensor):
    """All rows of a table: float32 [num_ids, dim]; of a dense table of at most WEIGHT_BYTES. Made by `weight_over` and `become`."""

    _module: "TableModule"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function on the rows, pulled now, or refuse it; a function that needs no rows pulls none."""
        given = {} if kwargs is None else kwargs
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _KNOWN or (name == "__get__" and attribute not in _ROWS):
            if attribute == "dtype":
                return args[0].module.dtype  # of lookups: `model.bfloat16()` sets it
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        _refuse_writes(name, attribute, args, given)
        return _on_rows(func, args, given)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe it without reading rows."""
        return f"TableWeight({self.module.table.name!r}, shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the weight of the copied module; that module's copy may be refused."""
        module = copy.deepcopy(self.module, memo)  # may have a plain one in its place, as `materialize` says there
        if hasattr(module, "table"):
            return weight_over(module)
        if module.weight.shape != self.shape:
            raise InvalidInputError(
                f"table {self.module.table.name!r} is read whole by this model (a tied head, a penalty): a copy with chosen ids of it "
                "would compute something else; take all"
            )
        return module.weight

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: rows are kept by the cluster."""
        raise InvalidInputError(
            f"the weight of table {self.module.table.name!r} cannot be pickled: its rows are in a cluster. Save the model's state_dict(), "
            "or a copy of plain modules: kvemb.torch.materialize(model)"
        )

    @property
    def module(self) -> "TableModule":
        """The module whose weight it is."""
        return self._module


def weight_over(module: "TableModule") -> TableWeight:
    """Make the weight of a module over a dense table."""
    definition = module.table.definition
    assert definition.num_ids is not None
    return become(_nothing(definition.num_ids, definition.dim), module)


def become(weight: Tensor, module: "TableModule") -> TableWeight:
    """Turn a tensor into the weight of a module, for every holder. Its own values are still there: see `let_go`."""
    weight.__class__ = TableWeight
    assert isinstance(weight, TableWeight)
    weight._module = module
    return weight


def turn_back(weight: Tensor, kind: type[Tensor]) -> None:
    """Turn it back, before `let_go`."""
    with torch._C.DisableTorchFunctionSubclass():
        weight.__class__ = kind
        del weight._module  # type: ignore[attr-defined]


def let_go(weight: Tensor) -> None:
    """Free the values that it had: code that reached them past torch's functions would go on with them."""
    with torch._C.DisableTorchFunctionSubclass():
        weight.data = _nothing(weight.shape[0], weight.shape[1], weight.device)
        weight.grad = None


def is_readable(n_rows: int | None, dim: int) -> bool:
    """Return whether a table of this size may be read whole."""
    return n_rows is not None and 4 * n_rows * dim <= WEIGHT_BYTES


def _nothing(n_rows: int, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Return one NaN that looks like a weight: code that got past `__torch_function__` would notice."""
    return torch.full((1, 1), float("nan"), device=device).expand(n_rows, dim)


def _refuse_writes(name: str, attribute: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    writes = name in _WRITES or (name.endswith("_") and not name.endswith("__")) or (name == "__get__" and attribute == "data")
    for weight in (*(args[:1] if writes else ()), kwargs.get("out")):
        if isinstance(weight, TableWeight):
            raise InvalidInputError(
                f"the weight of table {weight.module.table.name!r} is read-only, its rows are in a cluster: "
                f"{attribute or name + '()'} would write, or be lost. Read it with .detach(), set rows with table.assign(ids, rows), "
                "freeze them with requires_grad_(False) of the module"
            )


@eager
def _on_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    pulled: dict[int, Tensor] = {}  # one tensor given twice is pulled once

    def rows(value: Any) -> Any:
        if isinstance(value, TableWeight):
            if id(value) not in pulled:
                pulled[id(value)] = _pull(value.module, value.device)
            return pulled[id(value)]
        if type(value) in (list, tuple):
            return type(value)(rows(one) for one in value)
        return value

    return func(*rows(tuple(args)), **{name: rows(value) for name, value in kwargs.items()})


def _pull(module: "TableModule", device: torch.device) -> Tensor:
    """Pull all rows: float32 [num_ids, dim]. In training mode their gradients will wait for the step."""
    definition = module.table.definition
    if definition.num_ids is None or not is_readable(definition.num_ids, definition.dim):
        raise InvalidInputError(too_large(module))
    module.mark.before_lookup(module.recording)
    if module.recording:
        module.pending.check_room()
    ids = np.arange(definition.num_ids, dtype=np.uint64)
    (found,) = module.shared.look_up([(module.table, ids)], recording=module.recording)
    leaf = torch.from_numpy(found.rows).to(device)
    module.record(leaf, Lookup(found.ids, found.versions, None))
    return leaf.index_select(0, torch.from_numpy(found.inverse.astype(np.int64, copy=False)).to(device)).to(module.dtype)


def too_large(module: "TableModule") -> str:
    """Return the reason why a table is not read whole, and the remedy."""
    definition = module.table.definition
    size = "has no num_ids" if definition.num_ids is None else f"is {4 * definition.num_ids * definition.dim >> 20} MiB"
    return (
        f"this {type(module).__name__} has no weight to read whole: the rows of table {definition.name!r} are in a cluster, and it {size}; "
        f"up to {WEIGHT_BYTES >> 20} MiB are pulled whole. Read some with table.pull(ids), all with kvemb.torch.materialize(model)"
    )
