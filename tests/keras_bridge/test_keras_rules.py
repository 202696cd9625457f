"""Tables follow the rule and the rate of a compiled optimizer: after 200 steps rows are those of keras.layers.Embedding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import BATCH, CLOSE, N_WORDS, all_words, both, names_of, pairs, sequential, two_words

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import distribute

N_STEPS = 200
RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "SGD with a schedule, momentum and nesterov": lambda: keras.optimizers.SGD(_falling(0.02), momentum=0.9, nesterov=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "Adam with a schedule": lambda: keras.optimizers.Adam(_falling(0.02)),
    "AMSGrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.005),
    "RMSprop, centered, momentum": lambda: keras.optimizers.RMSprop(0.002, rho=0.95, momentum=0.5, centered=True, epsilon=1e-4),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=1e-3, l2_regularization_strength=1e-2, beta=0.1),
}


def _falling(rate: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(rate, decay_steps=50, decay_rate=0.7)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", RULES)
def test_rows_are_those_of_keras_after_200_steps(cluster: kvemb.Cluster, name: str, rule: str) -> None:
    plain, ours = both(two_words, RULES[rule])
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    x, y = all_words(N_STEPS)
    losses = [model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    expected = plain.layers[0].get_weights()[0]
    np.testing.assert_allclose(table.pull(np.arange(N_WORDS)), expected, rtol=2e-3, atol=2e-5 if "Ftrl" not in rule else 1e-4)


@pytest.mark.parametrize("names", [None, ["embed"], ["kernel"]])
@pytest.mark.parametrize("kind", [keras.optimizers.AdamW, keras.optimizers.SGD])
def test_rows_that_are_excluded_from_weight_decay_do_not_decay(
    cluster: kvemb.Cluster, name: str, kind: type, names: list[str] | None
) -> None:
    plain, ours = both(two_words, lambda: kind(0.02, weight_decay=0.5))
    for model in (plain, ours):
        excluded = {"var_list": [model.layers[0].embeddings]} if names is None else {"var_names": names}
        model.optimizer.exclude_from_weight_decay(**excluded)
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    x, y = all_words(10)
    for model in (plain, ours):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(table.pull(np.arange(N_WORDS)), plain.layers[0].get_weights()[0], rtol=2e-3, atol=2e-5)


def test_a_rate_that_a_callback_sets_is_followed(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = both(sequential)
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    (_, x), y = pairs(60)
    losses = []
    for model in (plain, ours):
        slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.2 / (1 + epoch))
        losses.append(model.fit(x, y, batch_size=20, epochs=4, shuffle=False, callbacks=[slower], verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)


@pytest.mark.parametrize("clip", [{"clipnorm": 0.02}, {"clipvalue": 0.002}])
def test_rows_are_clipped_as_the_dense_weight(cluster: kvemb.Cluster, name: str, clip: dict[str, float]) -> None:
    plain, ours = both(two_words, lambda: keras.optimizers.SGD(1.0, **clip))
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    x, y = all_words(6)
    losses = [model.fit(x, 5 * y, batch_size=BATCH, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)
    unclipped, _ = both(two_words, lambda: keras.optimizers.SGD(1.0))
    assert abs(unclipped.fit(x, 5 * y, batch_size=BATCH, shuffle=False, verbose=0).history["loss"][0] - losses[0][0]) > 1e-3


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0), "global_clipnorm.*Take clipnorm or clipvalue"),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True), "use_ema.*Compile without it"),
        (lambda: keras.optimizers.Nadam(0.1), "no update rule for Nadam; compile with one of"),
        (lambda: keras.optimizers.Adam(0.1, weight_decay=0.1), "weight_decay.*take AdamW"),
        (lambda: keras.optimizers.Ftrl(0.1, learning_rate_power=-0.3), "learning_rate_power"),
    ],
)
def test_what_rows_cannot_follow_is_refused_by_name(cluster: kvemb.Cluster, name: str, rule: Callable[[], Any], says: str) -> None:
    ours = sequential()
    ours.compile(rule(), "mse")
    with pytest.raises(InvalidInputError, match=says):
        distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    assert type(ours.layers[0]) is keras.layers.Embedding, "nothing was changed"


def test_a_rule_that_is_compiled_later_is_refused_at_the_step(cluster: kvemb.Cluster, name: str) -> None:
    ours = both(sequential)[1]
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    ours.compile("adam", "mse")
    (_, x), y = pairs(20)
    with pytest.raises(InvalidInputError, match="compiled with Adam now, its tables were made for SGD"):
        ours.train_on_batch(x, y)


def test_a_rule_for_all_tables_keeps_its_own_rate(cluster: kvemb.Cluster, name: str) -> None:
    ours = sequential()
    ours.compile(keras.optimizers.SGD(0.0), "mse")
    (table,) = distribute(ours, cluster, min_rows=1, optimizer=kvemb.optim.adagrad(0.5), names=names_of(name), quiet=True).tables
    (_, x), y = pairs(20)
    before, dense = table.pull(x), ours.layers[-1].get_weights()[0]
    ours.train_on_batch(x, y)
    assert np.abs(table.pull(x) - before).max() > 0.1
    np.testing.assert_array_equal(ours.layers[-1].get_weights()[0], dense)
