"""Optimizer and transform specifications: sizes, identity, YAML round trip, and refusals.

No maths: see tests/parity.
"""

import inspect
import math

import numpy as np
import pytest
import yaml

from kvemb import optim
from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec, TransformSpec

CONSTRUCTORS = [optim.sgd, optim.adagrad, optim.rowwise_adagrad, optim.adam, optim.adamw, optim.ftrl, optim.rmsprop]
SPECS = [
    *(make() for make in CONSTRUCTORS),
    optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    optim.adagrad(initial_accumulator_value=0.5),
    optim.adam(betas=(0.8, 0.95), amsgrad=True),
    optim.rmsprop(momentum=0.5, centered=True),
    optim.chain(optim.l2(0.01), optim.clip_by_value(5.0), optim.clip_by_norm(1.0), optim.adam()),
]


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (optim.sgd(), 0),
        (optim.sgd(momentum=0.9), 8),
        (optim.adagrad(), 8),
        (optim.rowwise_adagrad(), 1),
        (optim.adam(), 16),
        (optim.adam(amsgrad=True), 24),
        (optim.adamw(), 16),
        (optim.ftrl(), 16),
        (optim.rmsprop(), 8),
        (optim.rmsprop(momentum=0.9), 16),
        (optim.rmsprop(centered=True), 16),
        (optim.rmsprop(momentum=0.9, centered=True), 24),
    ],
)
def test_slot_size_is_the_sum_of_the_slots(spec: OptimizerSpec, size: int) -> None:
    assert spec.state_size(8) == size


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_spec_survives_yaml(spec: OptimizerSpec) -> None:
    again = OptimizerSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.identity() == spec.identity()


@pytest.mark.parametrize("make", CONSTRUCTORS, ids=lambda make: make.__name__)
def test_defaults_are_the_same_in_yaml_and_in_the_constructor(make: object) -> None:
    assert callable(make)
    assert OptimizerSpec.from_dict({"kind": make.__name__}) == make()


@pytest.mark.parametrize(
    ("make", "torch_name"),
    [
        (optim.sgd, "SGD"),
        (optim.adagrad, "Adagrad"),
        (optim.adam, "Adam"),
        (optim.adamw, "AdamW"),
        (optim.rmsprop, "RMSprop"),
    ],
)
def test_names_and_defaults_are_those_of_torch(make: object, torch_name: str) -> None:
    torch = pytest.importorskip("torch")
    assert callable(make)
    theirs = inspect.signature(getattr(torch.optim, torch_name)).parameters
    for name, parameter in inspect.signature(make).parameters.items():
        if name == "eps_root":  # Keras and optax have it; 0 is torch's rule
            assert parameter.default == 0.0
        else:
            assert parameter.default == theirs[name].default, name


def test_identity_holds_what_shapes_the_slots_and_no_run_time_value() -> None:
    base = optim.adam()
    assert optim.adam(lr=0.5, betas=(0.1, 0.2), eps=1e-3).identity() == base.identity()
    different = [optim.adam(amsgrad=True), optim.adamw(), optim.chain(optim.l2(0.1), optim.adam())]
    assert all(spec.identity() != base.identity() for spec in different)
    assert optim.sgd(momentum=0.5).identity() == optim.sgd(momentum=0.9).identity() != optim.sgd().identity()
    assert optim.chain(optim.l2(0.1), base).identity() == optim.chain(optim.l2(0.2), base).identity()
    one, other = optim.l2(0.1), optim.clip_by_norm(1.0)
    assert optim.chain(one, other, base).identity() != optim.chain(other, one, base).identity()
    assert optim.ftrl().identity() != optim.ftrl(initial_accumulator_value=1.0).identity()


def test_run_time_values_of_transforms_stand_beside_the_optimizers_own() -> None:
    spec = optim.chain(optim.clip_by_value(3.0), optim.l2(0.5), optim.clip_by_norm(2.0), optim.ftrl(l2=0.25))
    defaults = spec.defaults()
    assert (defaults["clip_value"], defaults["l2_weight"], defaults["clip_norm"], defaults["l2"]) == (
        3.0,
        0.5,
        2.0,
        0.25,
    )
    assert spec.check_hyper({"clip_norm": 1, "lr": np.float32(0.5)}) == {**defaults, "clip_norm": 1.0, "lr": 0.5}


def test_check_hyper_returns_python_floats() -> None:
    """A NumPy float64 among them would turn float32 arithmetic into float64."""
    values = optim.adam().check_hyper({"lr": np.float64(0.5), "eps": 1})
    assert {type(value) for value in values.values()} == {float}


@pytest.mark.parametrize("momentum_table", [optim.sgd, optim.rmsprop], ids=lambda make: make.__name__)
def test_momentum_may_change_but_not_begin(momentum_table: object) -> None:
    assert callable(momentum_table)
    assert momentum_table(momentum=0.9).check_hyper({"momentum": 0.0})["momentum"] == 0.0
    assert momentum_table().check_hyper({"momentum": 0.0})["momentum"] == 0.0
    with pytest.raises(InvalidInputError, match="no state for it"):
        momentum_table().check_hyper({"momentum": 0.1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": 0.1}, "unknown 'learning_rate'; known: lr, beta1, beta2, eps, clip_norm"),
        ({"amsgrad": True}, "unknown 'amsgrad'"),
        ({"l2_weight": 0.1}, "unknown 'l2_weight'"),
        ({"lr": math.nan}, r"lr must lie in \[0, 1e\+09\), got nan"),
        ({"lr": math.inf}, "lr must lie in"),
        ({"lr": -0.1}, "lr must lie in"),
        ({"lr": True}, "lr must be a number, got True"),
        ({"lr": "1e-3"}, "lr must be a number, got '1e-3'$"),
        ({"lr": None}, "lr must be a number"),
        ({"beta1": 1.0}, r"beta1 must lie in \[0, 1\)"),
        ({"beta2": -0.1}, "beta2 must lie in"),
        ({"eps": 0.0}, "eps must lie in"),
        ({"clip_norm": 0.0}, r"clip_norm must lie in \(0,"),
    ],
)
def test_unusable_run_time_values_are_refused(given: dict[str, float], message: str) -> None:
    spec = optim.chain(optim.clip_by_norm(1.0), optim.adam())
    with pytest.raises(InvalidInputError, match=message):
        spec.check_hyper(given)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "adma"}, "unknown 'adma'; known: sgd, adagrad"),
        ({}, "optimizer kind"),
        ("adam", "must be a mapping"),
        ({"kind": "adam", "lr": "1e-3"}, "adam: lr must be a number"),
        ({"kind": "adam", "momentum": 0.9}, "adam: unknown 'momentum'; known: lr, beta1, beta2, eps, amsgrad"),
        ({"kind": "adam", "amsgrad": 1}, "amsgrad must be true or false, got 1"),
        ({"kind": "adam", "betas": [0.9, 0.99]}, "unknown 'betas'"),
        ({"kind": "sgd", "nesterov": True}, "nesterov needs momentum > 0"),
        ({"kind": "sgd", "momentum": 1.0}, "momentum must lie in"),
        ({"kind": "ftrl", "initial_accumulator_value": 0.0}, "initial_accumulator_value must lie in"),
        ({"kind": "ftrl", "lr": 0.0}, "lr must lie in"),
        ({"kind": "rmsprop", "alpha": 1.0}, "alpha must lie in"),
        ({"kind": "adam", "transforms": {"kind": "l2"}}, "must be a list"),
        ({"kind": "adam", "transforms": ["l2"]}, "a transform must be a mapping"),
        ({"kind": "adam", "transforms": [{"kind": "clip"}]}, "unknown 'clip'; known: clip_by_value"),
        ({"kind": "adam", "transforms": [{"kind": "l2"}]}, "transform l2: weight must be a number, got None"),
        ({"kind": "adam", "transforms": [{"kind": "l2", "weight": -1.0}]}, "weight must lie in"),
        ({"kind": "adam", "transforms": [{"kind": "l2", "w": 1.0}]}, "unknown 'w'; known: weight"),
        ({"kind": "adam", "transforms": [{"kind": "l2", "weight": 0.1}] * 2}, "may stand in a chain once"),
    ],
)
def test_an_unusable_definition_is_refused(data: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        OptimizerSpec.from_dict(data)


def test_a_spec_put_together_by_hand_is_checked_too() -> None:
    with pytest.raises(InvalidInputError, match=r"build it with kvemb\.optim\.adam"):
        OptimizerSpec("adam", options=(), hyper=())
    with pytest.raises(InvalidInputError, match=r"build it with kvemb\.optim\.sgd"):
        OptimizerSpec(
            "sgd",
            options=(("momentum", True), ("nesterov", False)),
            hyper=(("lr", 0.1), ("momentum", 0.0), ("weight_decay", 0.0)),
        )
    with pytest.raises(InvalidInputError, match="known: clip_by_value"):
        TransformSpec("clip", ())


def test_chain_takes_transforms_then_one_optimizer() -> None:
    inner = optim.chain(optim.l2(0.1), optim.sgd())
    outer = optim.chain(optim.clip_by_norm(1.0), inner)
    assert [t.kind for t in outer.transforms] == ["clip_by_norm", "l2"]
    for parts in [(), (optim.l2(0.1),), (optim.sgd(), optim.l2(0.1)), (optim.sgd(), optim.adam())]:
        with pytest.raises(InvalidInputError, match="transforms, then one optimizer"):
            optim.chain(*parts)


def test_betas_must_be_a_pair() -> None:
    with pytest.raises(InvalidInputError, match="two numbers"):
        optim.adam(betas=0.9)  # type: ignore[arg-type]
