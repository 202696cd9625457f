"""torch.optim's optimizers in a table's words: which update rule a parameter group asks for, and its run-time values now.

One table of rules, by exact class (a subclass may compute anything). What parameter servers cannot apply is refused by name.
torch.optim.Adam and AdamW differ from SparseAdam in where eps stands: both are kvemb's "adamw". The weight_decay of Adam, RMSprop and
Adagrad is the transform "l2".

Optimizers that step where the one that pushes does not: libraries make one of model.parameters(), and rows would silently stay untrained.
One that has weights of the joined optimizer and steps while gradients of rows wait is remembered, and refused if it does so again after
another backward: one such step is no proof, since wrappers step before the optimizer inside of them, and two may share weights. The hook
runs in any thread: it looks at lists and counts, and at no gradient, which backward replaces without Python's lock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kvemb import optim
from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ..lookup.pending_lookups import KEEP, PendingLookups
from .sparse_optimizer import SparseOptimizer

# True or a number in one of these changes the rule into one that no parameter server has. foreach and fused do not.
_NEVER = ("maximize", "differentiable", "capturable", "dampening", "lr_decay")
_INSTEAD = {"lr_decay": "; follow a rate that falls with a scheduler instead, e.g. torch.optim.lr_scheduler.LambdaLR"}


@dataclass(frozen=True)
class Rule:
    """One class of torch's optimizers in a table's terms: the kind of kvemb.optim, and the values and fixed options of the same name.

    `decay` is the meaning of weight_decay: "own" (a run-time value), "l2" (part of the gradient), "" (none); `betas`: whether there are
    two.
    """

    kind: str
    values: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    decay: str = ""
    betas: bool = False


_ADAMW = Rule("adamw", ("lr", "eps"), ("amsgrad",), "own", betas=True)
_RULES: Mapping[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule("sgd", ("lr", "momentum"), ("nesterov",), "own"),
    torch.optim.Adagrad: Rule("adagrad", ("lr", "eps"), ("initial_accumulator_value",), "l2"),
    torch.optim.Adam: Rule("adamw", ("lr", "eps"), ("amsgrad",), "l2", betas=True),
    torch.optim.AdamW: _ADAMW,
    torch.optim.SparseAdam: Rule("adam", ("lr", "eps"), (), betas=True),
    torch.optim.RMSprop: Rule("rmsprop", ("lr", "alpha", "eps", "momentum"), ("centered",), "l2"),
}


class MappedGroup:
    """The rule and values of one parameter group of a torch optimizer, for a table."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], where: str) -> None:
        self._who, self._where = type(optimizer).__name__, where
        rule = _RULES.get(type(optimizer))
        if rule is None:
            known = ", ".join(of.__name__ for of in _RULES)
            raise InvalidInputError(
                f"{where}: the parameter servers have no update rule for {self._who}; use one of torch.optim's {known}, or leave this "
                "module local with leave=[…]"
            )
        if group.get("decoupled_weight_decay"):  # torch.optim.Adam(decoupled_weight_decay=True) is AdamW
            rule = _ADAMW
        self._rule = rule
        self._refuse(group)
        self._fixed = self._options(group)
        self._transformed = rule.decay == "l2" and float(group["weight_decay"]) != 0
        self._slotless = False
        self.spec = self._spec(group)
        self._slotless = "momentum" in rule.values and not float(group["momentum"])

    @property
    def lazy(self) -> bool:
        """Whether torch, with dense gradients, would also move rows that are in no batch; parameter servers do not."""
        values = self.spec.defaults()
        moving = ("momentum", "weight_decay", "l2_weight")
        return self._rule.kind in ("adamw", "rmsprop") or any(values.get(name) for name in moving)

    def values(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Return the run-time values of the table as the group has them now."""
        self._refuse(group)
        options = self._options(group)
        if options != self._fixed:
            raise InvalidInputError(
                f"{self._where}: {self._who} has {options} now; the table was made for {self._fixed}, which shapes what lies beside each "
                "row and cannot change any more"
            )
        values = {name: float(group[name]) for name in self._rule.values}
        if self._slotless and values["momentum"]:
            raise InvalidInputError(
                f"{self._where}: momentum of {self._who} is {values['momentum']:g} now; the table was made when it was 0, and keeps "
                "none. A scheduler sets it, most likely: give OneCycleLR or CyclicLR cycle_momentum=False, or begin with a momentum above 0"
            )
        if self._rule.betas:
            values["beta1"], values["beta2"] = (float(beta) for beta in group["betas"])
        return values | self._decay(group)

    def _decay(self, group: Mapping[str, Any]) -> dict[str, float]:
        decay = float(group.get("weight_decay", 0.0))
        if self._rule.decay == "own":
            return {"weight_decay": decay}
        zero = {"weight_decay": 0.0} if self._rule.kind == "adamw" else {}  # torch's Adam: the decay is in the gradient
        if self._transformed:
            return zero | {"l2_weight": decay}
        if decay:
            raise InvalidInputError(
                f"{self._where}: weight_decay of {self._who} is {decay} now; the table was made when it was 0, and cannot take one. Begin "
                "with a weight_decay above 0, however small"
            )
        return zero

    def _spec(self, group: Mapping[str, Any]) -> OptimizerSpec:
        try:
            values = self.values(group)
            l2 = values.pop("l2_weight", None)
            spec = OptimizerSpec.from_dict({"kind": self._rule.kind, **self._fixed, **values})
            return spec if l2 is None else optim.chain(optim.l2(l2), spec)
        except InvalidInputError as error:
            text = str(error)
            raise InvalidInputError(text if text.startswith(self._where) else f"{self._where}: {self._who}: {text}") from error

    def _options(self, group: Mapping[str, Any]) -> dict[str, bool | float]:
        return {name: bool(v) if isinstance(v := group[name], bool) else float(v) for name in self._rule.fixed}

    def _refuse(self, group: Mapping[str, Any]) -> None:
        for name in _NEVER:
            if group.get(name):
                raise InvalidInputError(
                    f"{self._where}: {name}={group[name]} of {self._who} has no counterpart in the parameter servers"
                    f"{_INSTEAD.get(name, '')}; or leave this module local with leave=[…]"
                )


_all: "WeakValueDictionary[int, OtherOptimizers]" = WeakValueDictionary()  # by id()
_registered: list[Any] = []  # torch's handle of the one hook


class OtherOptimizers:
    """Watches other optimizers that step the weights of a joined one. `watch` makes it; the joined one's pending lookups keep it."""

    def __init__(self, joined: torch.optim.Optimizer, pendings: Sequence[PendingLookups], stand_ins: Sequence[nn.Parameter | None]) -> None:
        self._joined, self._pendings = joined, list(pendings)
        self._stand_ins = {id(one): one for one in stand_ins if one is not None}
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a second step in a row of one that does not push, naming the remedy; it has changed nothing, and gradients still wait."""
        if optimizer is self._joined or not any(pending.leaves for pending in self._pendings) or not self._shares(optimizer):
            return
        steps, backwards = (sum(getattr(one, count) for one in self._pendings) for count in ("n_steps", "n_backwards"))
        seen = self._seen.get(optimizer)
        if seen is None or seen[0] != steps:
            self._seen[optimizer] = steps, backwards
        elif seen[1] != backwards:
            raise InvalidInputError(self._message(type(optimizer).__name__))

    def _shares(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(param) for group in self._joined.param_groups for param in group["params"]} | self._stand_ins.keys()
        return any(id(param) in mine for group in optimizer.param_groups for param in group["params"])

    def _message(self, other: str) -> str:
        joined = type(self._joined).__name__
        tables = ", ".join(repr(pending.table.name) for pending in self._pendings)
        return (
            f"this {other} steps again and again, and the {joined} that was given to distribute does not: gradients of rows of table(s) "
            f"{tables} are not pushed, and rows do not change. {KEEP}. Where a library makes its own, call distribute once that "
            f"is there, with it; or step SparseOptimizer(model) beside it. Where rows are not to be trained, requires_grad_(False) of "
            f"the modules over tables says so. This step changed nothing"
        )


def watch(joined: torch.optim.Optimizer, pendings: Sequence[PendingLookups], stand_ins: Sequence[nn.Parameter | None]) -> None:
    """Refuse other optimizers' steps where rows are left out, for as long as something can wait for this one's."""
    watching = OtherOptimizers(joined, pendings, stand_ins)
    for pending in pendings:
        pending.watching = watching
    _all[id(watching)] = watching
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or isinstance(optimizer, SparseOptimizer):
        return
    for found in _all.valuerefs():  # a copy: other threads call distribute meanwhile
        if (watching := found()) is not None:
            watching.before_step(optimizer)
