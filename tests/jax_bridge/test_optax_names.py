"""Tables with optax's optimizers, by optax's names: the rows that optax makes of the same gradients, over 200 steps."""

from typing import Any

import numpy as np
import pytest
from memory_cluster import MemoryCluster

jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")

import kvemb.jax as kj  # noqa: E402
from kvemb.errors import InvalidInputError  # noqa: E402

CASES = [
    ("sgd", {"learning_rate": 0.1}),
    ("sgd", {"learning_rate": 0.05, "momentum": 0.9}),
    ("sgd", {"learning_rate": 0.05, "momentum": 0.8, "nesterov": True}),
    ("adagrad", {"learning_rate": 0.1}),
    ("adam", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.99}),
    ("adamw", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ("rmsprop", {"learning_rate": 0.01}),
    ("rmsprop", {"learning_rate": 0.01, "eps": 0.5}),
    ("rmsprop", {"learning_rate": 0.01, "eps": 1e-3, "centered": True, "momentum": 0.5}),
    ("rmsprop", {"learning_rate": 0.01, "eps_in_sqrt": False}),
    ("rmsprop", {"learning_rate": 0.01, "eps_in_sqrt": False, "centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize(("name", "given"), CASES, ids=[f"{name}-{'-'.join(given)}" for name, given in CASES])
def test_two_hundred_steps_are_optaxs(name: str, given: dict[str, Any]) -> None:
    table = MemoryCluster().table("word", 3, getattr(kj, name)(**given))
    step = kj.embed(lambda params, rows, batch: (rows["word"] * batch["grad"]).sum(), {"word": table})
    rule = getattr(optax, name)(**given)
    rows = jnp.asarray(table.pull(range(5)))
    state, rng = rule.init(rows), np.random.default_rng(1)
    for _ in range(200):
        grad = rng.normal(size=(5, 3)).astype(np.float32)
        step({}, {"word": np.arange(5), "grad": grad})
        updates, state = rule.update(jnp.asarray(grad), state, rows)
        rows = optax.apply_updates(rows, updates)
    np.testing.assert_allclose(table.pull(range(5)), rows, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("adagrad", {"initial_accumulator_value": 0.0}, "eps"),
        ("adam", {"eps_root": 1e-8}, "eps_root"),
        ("sgd", {"learning_rate": optax.linear_schedule(0.1, 0.0, 10)}, "schedule"),
    ],
)
def test_what_a_parameter_server_does_not_do_is_refused(name: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        getattr(kj, name)(**({"learning_rate": 0.1} | given))
