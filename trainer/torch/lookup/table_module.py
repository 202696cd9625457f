"""One lookup: the unique ids of one forward pass, their rows as a leaf tensor, and the gradient that backward leaves there.

The rows pulled become a leaf [n, dim] that requires a gradient, into which torch's own functions index. Until backward, a lookup is held by
the autograd graph alone (through the leaf's hook): a loss that is thrown away leaves nothing behind. Backward hands it to its
`PendingLookups`, where the optimizer finds it, and `parameters()` until the step.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvemb.arrays.ids import normalize
from kvemb.errors import InvalidInputError
from kvemb.optim import FROZEN

from ...bridge.saved_rows import StepMark
from ...bridge.shared_lookups import Asked, LookupResult, SharedLookups
from ...bridge.step_tables import asked_of, check_table
from ...lookahead.cluster_ports import TablePort
from .parameter_walks import RESTS, STAND_IN, ParametersWithLeaves, tell_saving
from .pending_lookups import Lookup, PendingLookups

_PLAIN = "to trace, export or transform a model, take its copy of plain modules, kvemb.torch.materialize(model)"


def values_of(input: Tensor, table: str) -> NDArray[Any]:
    """Read ids out of a tensor."""
    if not isinstance(input, Tensor) or input.is_floating_point() or input.is_complex():
        got = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise InvalidInputError(f"table {table!r}: input must be a tensor of integer ids, got {got}")
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise InvalidInputError(f"table {table!r}: torch.jit.trace would write down the rows of this one batch; {_PLAIN}")
    try:
        array: NDArray[Any] = input.detach().cpu().numpy()
    except RuntimeError as error:
        if input.device.type not in ("cpu", "meta"):
            raise  # the device's own
        raise InvalidInputError(f"table {table!r}: ids must be a plain tensor with values ({error}); {_PLAIN}") from error
    return array


def checked_padding(table: TablePort, padding_idx: object) -> np.uint64:
    """Return a module's padding id as the table has it."""
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise InvalidInputError(f"padding_idx is {padding_idx!r}; give an id (an integer) or None")
    definition = table.definition
    ids, _ = normalize([padding_idx], definition.id_dtype, definition.name, definition.num_ids)
    if ids.view(np.int64)[0] == -1:  # then it is no padding that was left in: this module asks the table for its row
        table.allow_minus_one()
    return np.uint64(ids[0])


class LookupModule(nn.Module):
    """A module whose forward pass looks rows up. `asked` tells which, before it is called and in any thread."""

    def asked(self, *args: Any, **kwargs: Any) -> list[Asked]:
        """Return what forward would look up if it were called with these arguments; nothing is sent and nothing remembered."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> "LookupModule":
        """Refuse torch.jit.script, which calls this of every module first."""
        raise InvalidInputError(f"torch.jit.script cannot compile a module whose rows are in a cluster; {_PLAIN}")


class TableModule(LookupModule):
    """The common part of Embedding and EmbeddingBag: a table, a padding id, and lookups."""

    def __init__(self, table: TablePort, padding_idx: int | None) -> None:
        super().__init__()
        check_table(table)
        self.table = table
        self.padding_idx = padding_idx
        self._padding_id = None if padding_idx is None else checked_padding(table, padding_idx)
        self._parameters: ParametersWithLeaves
        self.pending = PendingLookups(table)
        self._trained = table.definition.optimizer.kind != FROZEN.kind
        self.mark = StepMark(table)
        self.dtype = torch.float32
        """Of results; rows, intermediate values and pushed gradients are float32."""
        self.shared = SharedLookups({table.name: table}, table.cluster)

    @property
    def pending(self) -> PendingLookups:
        """The place of lookups that have a gradient. The optimizer that trains the table brings its own."""
        return self._pending

    @pending.setter
    def pending(self, pending: PendingLookups) -> None:
        self._pending = pending
        # parameters() of a module goes through this mapping of every module inside of it
        self.__dict__["_parameters"] = ParametersWithLeaves(self._parameters, pending, self.stand_in, self._train)

    @property
    def stand_in(self) -> nn.Parameter | None:
        """A parameter float32 [0, dim] of a module that `distribute` made. It is found among the parameters of a model, or a part of one,
        that has no other: code asks for them to learn a device, or to make an optimizer. It is in no state (adr/0034).
        """
        stand_in: nn.Parameter | None = self.__dict__.get(STAND_IN)
        return stand_in

    def make_stand_in(self, device: torch.device) -> nn.Parameter:
        """Give this module a `stand_in`."""
        made = nn.Parameter(torch.empty(0, self.table.dim, device=device))
        self.__dict__[STAND_IN] = made  # found by its name, but not registered: it is never saved or loaded
        self.pending = self._pending
        return made

    @property
    def embedding_dim(self) -> int:
        """Weights per row, under torch's name."""
        return self.table.dim

    def extra_repr(self) -> str:
        """Describe the module as torch's own modules do."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, dim={self.table.dim}{padding}"

    @property
    def recording(self) -> bool:
        """Whether a lookup made now would be trained: training mode, gradients enabled, and not frozen."""
        return self.training and _trains(self)

    def _train(self, requires_grad: bool) -> None:
        """Freeze the table for lookups by this module, or train it again: `requires_grad_` asks for parameters, which know it."""
        self._trained = requires_grad and self.table.definition.optimizer.kind != FROZEN.kind
        if self.stand_in is not None:
            self.stand_in.requires_grad_(requires_grad)

    def _save_to_state_dict(self, *args: Any) -> None:
        tell_saving(self.table.name)
        with self._parameters.own():
            super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *args: Any) -> None:
        with self._parameters.own():
            super()._load_from_state_dict(state_dict, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Take part in `model.bfloat16()` and the like: results are of that type then, and rows stay float32."""
        with self._parameters.own():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.stand_in is not None and (moved := fn(self.stand_in.data)).device.type != "meta":
            self.stand_in.data = moved
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def get_extra_state(self) -> Tensor:
        """Return this module's part of state_dict: uint8 [n], JSON text with "table", "dim", "cluster" and the rows' "epoch" and "step".

        A tensor, because much that saves a state_dict takes nothing else.
        """
        return torch.frombuffer(bytearray(json.dumps(_reference(self.table) | self.mark.state()).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a state is of this table, maybe of another cluster; if the rows are at another step, the next lookup warns.

        Where it is refused, modules before this one may have been loaded.
        """
        given, mine = json.loads(bytes(state.cpu().numpy())), _reference(self.table)
        if (given["table"], given["dim"]) != (mine["table"], mine["dim"]):
            raise InvalidInputError(
                f"the state is of {_described(given)}, this module is over {_described(mine)}; load a state of this table"
            )
        self.mark.load(given)

    def asked_of(self, input: Tensor) -> NDArray[np.uint64]:
        """Return the ids that a lookup of `input` asks for: uint64 [m], flat, then the padding id, which torch always looks at."""
        flat = asked_of(self.table, values_of(input, self.table.name))[1]
        return flat if self._padding_id is None else np.append(flat, self._padding_id)

    def take(self, found: LookupResult, input: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Turn the result for `asked_of(input)` into tensors: leaf float32 [n, dim], int64 positions in it, and the padding id's.

        The leaf requires a gradient, and its lookup will be pending after backward, if the module trains.
        """
        leaf = torch.from_numpy(found.rows).to(input.device)
        self.record(leaf, Lookup(found.ids, found.versions, self._padding_id))
        at = torch.from_numpy(found.inverse[: input.numel()].astype(np.int64, copy=False)).reshape(input.shape).to(input.device)
        return leaf, at, None if self._padding_id is None else int(found.inverse[-1])

    def _look_up(self, input: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Look the ids of `input` up; returns and raises as `take` and `asked_of`. Refused while no optimizer collects gradients."""
        self.mark.before_lookup(self.recording)
        if self.recording:
            self.pending.check_room()
        (found,) = self.shared.look_up([(self.table, self.asked_of(input))], recording=self.recording)
        return self.take(found, input)

    def record(self, leaf: Tensor, lookup: Lookup) -> None:
        """Let a leaf's gradient wait for the step, once backward has made it, if the lookup is `recording`."""
        pending = self.pending  # the list in force now: a later optimizer must not get this step's gradients
        if not self.recording:
            pending.asleep = pending.asleep or _trains(self)
            return

        def after_backward(leaf: Tensor) -> None:
            pending.arrived(leaf, lookup)

        pending.recorded()
        leaf.requires_grad_()
        leaf.register_post_accumulate_grad_hook(after_backward)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: all but the connections with this module's lookups and steps."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_pending", "shared", "mark")}
        own = {name: self._parameters[name] for name in self._parameters}
        return state | {"_parameters": own, RESTS: getattr(self.stand_in, RESTS, False)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rests = state.pop(RESTS, False)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.stand_in is not None and rests:
            setattr(self.stand_in, RESTS, True)
        self.mark = StepMark(self.table)
        self.shared = SharedLookups({self.table.name: self.table}, self.table.cluster)
        self.pending = PendingLookups(self.table, trains=False)


def _reference(table: TablePort) -> dict[str, Any]:
    config = getattr(table.cluster, "config", None)
    return {"table": table.name, "dim": table.dim, "cluster": getattr(config, "cluster", "")}


def _described(reference: dict[str, Any]) -> str:
    return f"table {reference['table']!r} (dim {reference['dim']}, cluster {reference['cluster']!r})"


def modules_by_table(model: nn.Module) -> dict[str, list[TableModule]]:
    """Find the modules over each table, by its name, in the model's order."""
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
    """Give these modules one `SharedLookups`: the one that all of them have already, or a new one."""
    modules = [module for ones in modules_of.values() for module in ones]
    first = modules[0].shared
    if any(module.shared is not first for module in modules) or first.tables.keys() != modules_of.keys():
        first = SharedLookups({name: ones[0].table for name, ones in modules_of.items()}, modules[0].table.cluster)
        for module in modules:
            module.shared = first
    return first


def _trains(module: TableModule) -> bool:
    """Whether a lookup by a module would be trained in training mode: with gradients enabled, and not frozen."""
    stand_in = module.stand_in
    frozen = stand_in is not None and not stand_in.requires_grad and not getattr(stand_in, RESTS, False)
    return module._trained and not frozen and torch.is_grad_enabled()
