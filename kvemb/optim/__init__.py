"""Optimizers as specifications: the update of a table, the state beside each row, the run-time values it takes.

Options are fixed with the table: they shape the state or its first value. Run-time values may change at any step, and travel with
each push (docs/adr/0005). Trainers and parameter servers share this; the maths is in `paramserver.optim`. No NumPy and no I/O here.
One mapping, `_KINDS`, says all that differs between optimizers: a new one is an entry there, a function below and its maths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvemb.errors import InvalidInputError, no_attribute
from kvemb.optim.transform_spec import TransformSpec, Value, clip_by_norm, clip_by_value, l2, refuse_unknown

__all__ = [
    "OptimizerSpec", "StateField", "TransformSpec", "adagrad", "adam", "adamw", "chain", "clip_by_norm", "clip_by_value",
    "ftrl", "l2", "rmsprop", "rowwise_adagrad", "sgd",
]  # fmt: skip

if not TYPE_CHECKING:  # it would have any name for a type checker

    def __getattr__(name: str) -> object:
        raise no_attribute(__name__, name, __all__)


@dataclass(frozen=True)
class StateField:
    """One piece of optimizer state beside a row: `dim` float32 values, or a single one if `per_row`."""

    name: str
    per_row: bool = False
    initial: float = 0.0
    when: str = ""  # only there if this option is set
    initial_option: str = ""  # the option that holds its first value

    def size(self, dim: int) -> int:
        """Return the number of float32 values beside one row of `dim` weights.

        Example:
            >>> StateField("exp_avg").size(16), StateField("mean_square_sum", per_row=True).size(16)
            (16, 1)
        """
        return 1 if self.per_row else dim


@dataclass(frozen=True)
class _OptimizerKind:
    """One kind of optimizer: its run-time values, its state beside each row, its options."""

    values: Mapping[str, Value]  # run-time
    state_fields: tuple[StateField, ...]
    flags: tuple[str, ...] = ()  # options, false unless given
    numbers: Mapping[str, Value] | None = None  # options with a number

    def given_names(self) -> list[str]:
        return [*self.values, *self.flags, *(self.numbers or {})]


# eps has a floor well inside float32: at 0 a row whose gradients were all zero would become 0 / 0.
_EPS = Value(1e-8, low=1e-30)
_MOMENTUM = {"momentum": Value(0.0, high=1.0)}
_MOMENTUM_SLOT = StateField("momentum_buffer", when="momentum")
_ADAM_VALUES = {"lr": Value(1e-3), "beta1": Value(0.9, high=1.0), "beta2": Value(0.999, high=1.0), "eps": _EPS}
_ADAM_STATE = (StateField("exp_avg"), StateField("exp_avg_sq"), StateField("max_exp_avg_sq", when="amsgrad"))
_INITIAL = "initial_accumulator_value"

_KINDS: Mapping[str, _OptimizerKind] = {
    "sgd": _OptimizerKind({"lr": Value(1e-3), **_MOMENTUM, "weight_decay": Value(0.0)}, (_MOMENTUM_SLOT,), flags=("nesterov",)),
    "adagrad": _OptimizerKind(
        {"lr": Value(0.01), "eps": replace(_EPS, default=1e-10)},
        (StateField("sum", initial_option=_INITIAL),),
        numbers={_INITIAL: Value(0.0)},
    ),
    "rowwise_adagrad": _OptimizerKind({"lr": Value(0.01), "eps": _EPS}, (StateField("mean_square_sum", per_row=True),)),
    "adam": _OptimizerKind(_ADAM_VALUES, _ADAM_STATE, flags=("amsgrad",)),
    "adamw": _OptimizerKind({**_ADAM_VALUES, "weight_decay": Value(0.01)}, _ADAM_STATE, flags=("amsgrad",)),
    "ftrl": _OptimizerKind(
        {"lr": Value(0.05, open_low=True), "l1": Value(0.0), "l2": Value(0.0), "beta": Value(0.0)},
        (StateField("z"), StateField("n", initial_option=_INITIAL)),
        numbers={_INITIAL: Value(0.1, low=1e-12)},  # never 0: with beta = 0 the step size is lr / sqrt(n)
    ),
    "rmsprop": _OptimizerKind(
        {"lr": Value(0.01), "alpha": Value(0.99, high=1.0), "eps": _EPS, "eps_root": Value(0.0), **_MOMENTUM},
        (StateField("square_avg"), StateField("grad_avg", when="centered"), _MOMENTUM_SLOT),
        flags=("centered",),
    ),
    "frozen": _OptimizerKind({}, ()),
}


@dataclass(frozen=True)
class OptimizerSpec:
    """Which update a table has. Frozen, hashable, and always valid; made by `adam(...)` and its like, or by `from_dict`.

    Args:
        kind: the optimizer's name.
        options: fixed with the table. "momentum" says whether there is state for one; its value is a run-time value.
        hyper: the run-time values that hold where a push gives no others.
        transforms: applied to the gradient in this order, before the optimizer.

    Raises:
        InvalidInputError: an unknown name, a wrong type or a value out of range.
    """

    kind: str
    options: tuple[tuple[str, bool | float], ...]
    hyper: tuple[tuple[str, float], ...]
    transforms: tuple[TransformSpec, ...] = ()

    def __post_init__(self) -> None:
        refuse_unknown("optimizer kind", [self.kind], _KINDS)
        given: dict[str, object] = {**dict(self.options), **dict(self.hyper)}
        options, hyper = _complete(self.kind, given)
        if dict(self.options) != options or dict(self.hyper) != hyper:
            raise InvalidInputError(
                f"{self.kind}: got options {dict(self.options)} and run-time values {dict(self.hyper)}, "
                f"expected {options} and {hyper}; build it with kvemb.optim.{self.kind}(...)"
            )
        kinds = [transform.kind for transform in self.transforms]
        if len(set(kinds)) < len(kinds):
            raise InvalidInputError(f"{self.kind}: a transform kind may stand in a chain once, got {kinds}")
        object.__setattr__(self, "options", tuple(options.items()))
        object.__setattr__(self, "hyper", tuple(hyper.items()))

    def state_fields(self) -> tuple[StateField, ...]:
        """Return the fields of the state beside a row, in the order in which they lie in the record.

        Example:
            >>> [field.name for field in adam(amsgrad=True).state_fields()]
            ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq']
        """
        options = dict(self.options)
        there = (field for field in _KINDS[self.kind].state_fields if not field.when or options[field.when])
        return tuple(replace(s, initial=options[s.initial_option]) if s.initial_option else s for s in there)

    def state_size(self, dim: int) -> int:
        """Return the number of float32 values of state beside one row of `dim` weights.

        Example:
            >>> sgd().state_size(16), rowwise_adagrad().state_size(16), adam().state_size(16)
            (0, 1, 32)
        """
        return sum(field.size(dim) for field in self.state_fields())

    def identity(self) -> dict[str, object]:
        """Return what may never change in a table's life: kind, options, kinds of the transforms in order. Plain types.

        Example:
            >>> sgd(0.1, momentum=0.9).identity()
            {'kind': 'sgd', 'options': {'momentum': True, 'nesterov': False}, 'transforms': []}
        """
        return {"kind": self.kind, "options": dict(self.options), "transforms": [t.kind for t in self.transforms]}

    def defaults(self) -> dict[str, float]:
        """Return every run-time value that holds where a push gives no other, the transforms' included.

        Example:
            >>> chain(clip_by_norm(1.0), sgd(0.1)).defaults()
            {'lr': 0.1, 'momentum': 0.0, 'weight_decay': 0.0, 'clip_norm': 1.0}
        """
        return {**dict(self.hyper), **{name: value for t in self.transforms for name, value in t.defaults().items()}}

    def check_hyper(self, given: Mapping[str, float]) -> dict[str, float]:
        """Return the run-time values in force for a push: the defaults, overlaid by the given ones, as Python floats.

        Raises:
            InvalidInputError: an unknown name (the known ones are listed), not a number, NaN, or out of range. Or a momentum
                for a table that was created without one, and so has no state for it.

        Example:
            >>> adam().check_hyper({"lr": 0.01})
            {'lr': 0.01, 'beta1': 0.9, 'beta2': 0.999, 'eps': 1e-08}
        """
        if not given:
            return self.defaults()
        ranges = {**_KINDS[self.kind].values, **{name: r for t in self.transforms for name, r in t.ranges().items()}}
        refuse_unknown(f"{self.kind}: run-time values", given, ranges)
        checked = {name: ranges[name].check(self.kind, name, value) for name, value in given.items()}
        if checked.get("momentum") and not dict(self.options)["momentum"]:
            raise InvalidInputError(
                f"{self.kind}: momentum must stay 0, got {checked['momentum']!r}: the table was created without "
                "momentum and has no state for it; create one with momentum > 0"
            )
        return {**self.defaults(), **checked}

    def to_dict(self) -> dict[str, object]:
        """Return plain types, as they stand in YAML; `from_dict` reads them back.

        Example:
            >>> chain(clip_by_norm(1.0), adagrad()).to_dict()  # doctest: +NORMALIZE_WHITESPACE
            {'kind': 'adagrad', 'lr': 0.01, 'eps': 1e-10, 'initial_accumulator_value': 0.0,
             'transforms': [{'kind': 'clip_by_norm', 'max_norm': 1.0}]}
        """
        # In this order "momentum" is its value, not whether there is one: `from_dict` tells that from the value.
        flat = {"kind": self.kind, **dict(self.options), **dict(self.hyper)}
        order = ["kind", *_KINDS[self.kind].given_names()]
        transforms = {"transforms": [t.to_dict() for t in self.transforms]} if self.transforms else {}
        return {**{name: flat[name] for name in order}, **transforms}

    @classmethod
    def from_dict(cls, data: object) -> "OptimizerSpec":
        """Read the result of `to_dict`, or a person's YAML; values that are left out have their defaults.

        Raises:
            InvalidInputError: unknown names (the known ones are listed), wrong types, values out of range.

        Example:
            >>> OptimizerSpec.from_dict({"kind": "adam", "amsgrad": True}) == adam(amsgrad=True)
            True
        """
        if not isinstance(data, Mapping):
            raise InvalidInputError(f"an optimizer must be a mapping with a kind, got {data!r}")
        given = {name: value for name, value in data.items() if name not in ("kind", "transforms")}
        transforms = data.get("transforms", [])
        if not isinstance(transforms, list | tuple):
            raise InvalidInputError(f"optimizer transforms must be a list, got {transforms!r}")
        return _make(str(data.get("kind")), given, tuple(TransformSpec.from_dict(t) for t in transforms))


def _complete(kind_name: str, given: Mapping[str, object]) -> tuple[dict[str, bool | float], dict[str, float]]:
    """Check what a person gave, add defaults, and part it into options and run-time values, in canonical order."""
    kind = _KINDS[kind_name]
    refuse_unknown(kind_name, given, kind.given_names())
    hyper = {name: r.check(kind_name, name, given.get(name, r.default)) for name, r in kind.values.items()}
    options: dict[str, bool | float] = {"momentum": hyper["momentum"] > 0} if "momentum" in hyper else {}
    for name in kind.flags:
        flag = given.get(name, False)
        if not isinstance(flag, bool):
            raise InvalidInputError(f"{kind_name}: {name} must be true or false, got {flag!r}")
        options[name] = flag
    for name, number in (kind.numbers or {}).items():
        options[name] = number.check(kind_name, name, given.get(name, number.default))
    if options.get("nesterov") and not options["momentum"]:
        raise InvalidInputError(f"{kind_name}: nesterov needs momentum > 0, got momentum 0")
    return options, hyper


def _make(kind: str, given: Mapping[str, object], transforms: tuple[TransformSpec, ...] = ()) -> OptimizerSpec:
    refuse_unknown("optimizer kind", [kind], _KINDS)
    options, hyper = _complete(kind, given)
    return OptimizerSpec(kind, tuple(options.items()), tuple(hyper.items()), transforms)


def sgd(lr: float = 1e-3, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> OptimizerSpec:
    """Gradient descent, as torch.optim.SGD on the rows pushed.

    A momentum > 0 adds state. It is lazy: a row that is not pushed neither moves on nor loses momentum.

    Example:
        >>> sgd(0.1, momentum=0.9, nesterov=True).state_size(8)
        8
    """
    return _make("sgd", {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})


def adagrad(lr: float = 0.01, eps: float = 1e-10, initial_accumulator_value: float = 0.0) -> OptimizerSpec:
    """Adagrad (Duchi, Hazan, Singer 2011), as torch.optim.Adagrad without lr_decay (set lr at run time instead).

    Example:
        >>> adagrad().state_size(8)
        8
    """
    return _make("adagrad", {"lr": lr, "eps": eps, _INITIAL: initial_accumulator_value})


def rowwise_adagrad(lr: float = 0.01, eps: float = 1e-8) -> OptimizerSpec:
    """Adagrad with one sum per row, of the mean squared gradient, as FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Made for DLRM (Naumov et al. 2019). Its state is one float32 a row.

    Example:
        >>> rowwise_adagrad().state_size(8)
        1
    """
    return _make("rowwise_adagrad", {"lr": lr, "eps": eps})


def adam(lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, amsgrad: bool = False) -> OptimizerSpec:
    """Adam (Kingma, Ba 2015) on the rows pushed, as torch.optim.SparseAdam.

    With amsgrad (Reddi et al. 2018) it is torch.optim.Adam's. The step is the table's, not the row's (docs/adr/0004).

    Example:
        >>> adam(betas=(0.8, 0.99)).defaults()
        {'lr': 0.001, 'beta1': 0.8, 'beta2': 0.99, 'eps': 1e-08}
    """
    beta1, beta2 = _pair(betas)
    return _make("adam", {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "amsgrad": amsgrad})


def adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    amsgrad: bool = False,
) -> OptimizerSpec:
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019), as torch.optim.AdamW; rows not pushed do not decay.

    Example:
        >>> adamw().defaults()["weight_decay"]
        0.01
    """
    beta1, beta2 = _pair(betas)
    given = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    return _make("adamw", given)


def ftrl(lr: float = 0.05, l1: float = 0.0, l2: float = 0.0, beta: float = 0.0, initial_accumulator_value: float = 0.1) -> OptimizerSpec:
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1) with alpha = lr; the power of the step size is the paper's 1/2.

    FTRL computes weights from its state alone: use it with the zeros initializer. Any other first or assigned value is
    given up at the row's next push. `l2` is the paper's lambda_2, twice TensorFlow's l2_regularization_strength.

    Example:
        >>> ftrl(l1=1.0).state_size(8)
        16
    """
    return _make("ftrl", {"lr": lr, "l1": l1, "l2": l2, "beta": beta, _INITIAL: initial_accumulator_value})


def rmsprop(
    lr: float = 0.01, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, centered: bool = False, eps_root: float = 0.0
) -> OptimizerSpec:
    """RMSprop (Hinton 2012; centered: Graves 2013), as torch.optim.RMSprop on the rows pushed.

    Keras and optax's eps_in_sqrt have their epsilon under the root: that is `eps_root`, beside a tiny `eps`.

    Example:
        >>> rmsprop(momentum=0.9, centered=True).state_size(8)
        24
    """
    return _make("rmsprop", {"lr": lr, "alpha": alpha, "eps": eps, "eps_root": eps_root, "momentum": momentum, "centered": centered})


FROZEN = OptimizerSpec("frozen", (), ())
"""Of tables that take no gradients, and have no state beside their rows: `create_table(…, frozen=True)`."""


def chain(*parts: TransformSpec | OptimizerSpec) -> OptimizerSpec:
    """Put gradient transforms, applied in the order given, before an optimizer, which stands last (as optax.chain).

    Raises:
        InvalidInputError: the last part is not an optimizer, another one is, or a transform kind stands twice.

    Example:
        >>> [t.kind for t in chain(l2(0.01), clip_by_norm(1.0), adam()).transforms]
        ['l2', 'clip_by_norm']
    """
    transforms = tuple(part for part in parts[:-1] if isinstance(part, TransformSpec))
    if not parts or not isinstance(parts[-1], OptimizerSpec) or len(transforms) < len(parts) - 1:
        raise InvalidInputError(f"chain takes transforms, then one optimizer, got {parts!r}")
    return replace(parts[-1], transforms=transforms + parts[-1].transforms)


def _pair(betas: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidInputError(f"betas must be two numbers, got {betas!r}")
    return betas[0], betas[1]
