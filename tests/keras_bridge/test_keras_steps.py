"""Every way to write a step of a Keras model: rows are those of the plain model, or it is refused with what to do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import BATCH, DIM, N_WORDS, SEED, all_words, names_of, two_words

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import distribute

BACKEND = keras.backend.backend()
STATELESS = pytest.mark.skipif(BACKEND == "jax", reason="a compiled step of Keras on JAX has the state of the compiled optimizer alone")
CLOSE = {"rtol": 2e-3, "atol": 5e-5}
Run = Callable[[Any, Any, Any], None]


def gradients_of(model: Any, x: Any, y: Any, optimizer: Any) -> list[Any]:
    """Gradients of the trainable weights, as one writes it on torch and TensorFlow."""
    if BACKEND == "torch":
        model.zero_grad()
        optimizer.scale_loss(model.compute_loss(x=x, y=y, y_pred=model(x, training=True))).backward()
        return [weight.value.grad for weight in model.trainable_weights]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(model.compute_loss(x=x, y=y, y_pred=model(x, training=True)))
    found: list[Any] = tape.gradient(loss, model.trainable_weights)
    return found


class OwnStep(keras.Model):
    """A train_step of one's own, as Keras's guides write it; `applies` says what is done with gradients."""

    applies: Any = None

    def train_step(self, *args: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(args[-1])
        if BACKEND == "jax":
            return self._on_jax(args[0], x, y)
        gradients = gradients_of(self, x, y, self.optimizer)
        if self.applies is None:
            self.optimizer.apply(gradients, self.trainable_weights)
        else:
            self.applies(gradients)
        return {"loss": 0.0}

    def _on_jax(self, state: Any, x: Any, y: Any) -> Any:
        import jax

        trainable, fixed, optimizer, metrics = state

        def loss_of(trainable: Any) -> Any:
            predicted, after = self.stateless_call(trainable, fixed, x, training=True)
            mapping = list(zip(self.optimizer.variables, optimizer, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return self.optimizer.scale_loss(self.compute_loss(x=x, y=y, y_pred=predicted)), after

        (_, fixed), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        if self.applies is None:
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        else:
            trainable = self.applies(trainable, gradients)
        return {}, (trainable, fixed, optimizer, metrics)


def own_step() -> Any:
    plain = two_words()
    return OwnStep(plain.inputs, plain.outputs)


def fit(model: Any, x: Any, y: Any) -> None:
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def one_batch_at_a_time(model: Any, x: Any, y: Any) -> None:
    for at in range(0, len(x), BATCH):
        model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])


def compiled_twice(model: Any, x: Any, y: Any) -> None:
    fit(model, x[: 2 * BATCH], y[: 2 * BATCH])
    model.compile(keras.optimizers.SGD(0.5), "mae")
    fit(model, x, y)


def frozen_for_a_while(model: Any, x: Any, y: Any) -> None:
    for trainable in (True, False, True):
        model.get_layer("vocabulary").trainable = trainable
        model.compile(keras.optimizers.SGD(0.2), "mse")
        fit(model, x[: 2 * BATCH], y[: 2 * BATCH])


Rule = Callable[[], Any]
SGD: Rule = lambda: keras.optimizers.SGD(0.2)  # noqa: E731
WAYS: dict[str, tuple[Callable[[], Any], Run, Rule, dict[str, Any]]] = {
    "fit, SGD": (two_words, fit, SGD, {}),
    "fit, Adam, eager": (two_words, fit, lambda: keras.optimizers.Adam(0.02), {"run_eagerly": True}),
    "fit, SGD, not jitted": (two_words, fit, SGD, {"jit_compile": False}),
    "train_on_batch, Adagrad": (two_words, one_batch_at_a_time, lambda: keras.optimizers.Adagrad(0.1), {}),
    "second compile": (two_words, compiled_twice, SGD, {}),
    "frozen for a while": (two_words, frozen_for_a_while, SGD, {}),
    "own step, Adam": (own_step, fit, lambda: keras.optimizers.Adam(0.02), {}),
    "own step, Adagrad, eager": (own_step, fit, lambda: keras.optimizers.Adagrad(0.1), {"run_eagerly": True}),
    "own step, clipnorm": (own_step, fit, lambda: keras.optimizers.SGD(1.0, clipnorm=0.02), {}),
    "own step, loss scale": (own_step, fit, lambda: keras.optimizers.LossScaleOptimizer(SGD(), initial_scale=2.0**9), {}),
}
if BACKEND == "tensorflow":
    WAYS["fit, SGD, jitted"] = (two_words, fit, SGD, {"jit_compile": True})
else:  # Keras on TensorFlow cannot divide the sparse gradients of its own layer
    WAYS["own step, loss scale factor"] = (own_step, fit, lambda: keras.optimizers.SGD(0.2, loss_scale_factor=64.0), {})


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_the_plain_model(cluster: kvemb.Cluster, name: str, way: str) -> None:
    make, run, rule, options = WAYS[way]
    plain, ours = make(), make()
    for model in (plain, ours):
        model.compile(rule(), "mse", **options)
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    x, y = all_words(6)
    for model in (plain, ours):
        run(model, x, y)
    same(plain, ours, table)


def same(plain: Any, ours: Any, table: Any) -> None:
    """Rows and dense weights are those of the plain model, and have moved."""
    rows = plain.get_layer("vocabulary").get_weights()[0]
    assert np.abs(rows - two_words().get_layer("vocabulary").get_weights()[0]).max() > 1e-3
    np.testing.assert_allclose(table.pull(np.arange(N_WORDS)), rows, **CLOSE)
    for mine, theirs in zip(ours.layers[-1].get_weights(), plain.layers[-1].get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


def test_two_models_that_share_a_layer_train_its_rows_in_turn(cluster: kvemb.Cluster, name: str) -> None:
    def two() -> tuple[Any, Any]:
        inner = two_words()
        ids = keras.Input((2,), dtype="int32")
        outer = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(inner(ids)))
        for model in (inner, outer):
            model.compile(SGD(), "mse")
        return inner, outer

    plain, ours = two(), two()
    (table,) = distribute(ours[0], cluster, min_rows=1, names=names_of(name), quiet=True).tables
    x, y = all_words(4)
    with pytest.raises(InvalidInputError, match="Connect the model that you train, be it one around it"):
        ours[1].train_on_batch(x, y)
    distribute(ours[1], cluster, quiet=True)
    for models in (plain, ours):
        for model in (*models, *models):
            model.optimizer.learning_rate = 0.05  # of both models, and of the layer that is in both
            fit(model, x, y)
    same(plain[0], ours[0], table)


def test_a_loaded_model_follows_its_optimizer_as_before(cluster: kvemb.Cluster, name: str, tmp_path: Any) -> None:
    plain, ours = two_words(), two_words()
    for model in (plain, ours):
        model.compile(SGD(), "mse")
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    distribute(loaded, cluster, quiet=True)
    x, y = all_words(4)
    for model in (plain, loaded):
        model.optimizer.learning_rate = 0.5
        fit(model, x, y)
    same(plain, loaded, table)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.compile("adam", "mse")
    with pytest.raises(InvalidInputError, match=r"has the rule sgd.*compile it with an optimizer of the table's rule"):
        distribute(loaded, cluster, quiet=True)


def two_optimizers(model: Any) -> Callable[[list[Any]], None]:
    """Gradients of embeddings go to one of their own."""
    model.of_rows = keras.optimizers.Adam(0.02)

    def apply(gradients: list[Any]) -> None:
        pairs = list(zip(gradients, model.trainable_weights, strict=True))
        rows = model.get_layer("vocabulary").trainable_weights
        model.of_rows.apply_gradients([pair for pair in pairs if any(pair[1] is one for one in rows)])
        model.optimizer.apply_gradients([pair for pair in pairs if not any(pair[1] is one for one in rows)])

    return apply


@STATELESS
@pytest.mark.parametrize("eager", [True, False])
def test_an_optimizer_of_the_embeddings_beside_the_compiled_one_is_followed_where_it_is_named(
    cluster: kvemb.Cluster, name: str, eager: bool
) -> None:
    plain, ours, unnamed = models = [own_step() for _ in range(3)]
    for model in models:
        model.compile(SGD(), "mse", run_eagerly=eager)
        model.applies = two_optimizers(model)
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), optimizer=ours.of_rows, quiet=True).tables
    distribute(unnamed, cluster, min_rows=1, names=names_of(f"{name}.u"), quiet=True)
    x, y = all_words(6)
    with pytest.raises(InvalidInputError, match=r"Adam 'adam.*' is given the gradients of table .* follow SGD .*optimizer="):
        fit(unnamed, x, y)
    for model in (plain, ours):
        fit(model, x, y)
    same(plain, ours, table)


def by_hand(model: Any) -> Any:
    if BACKEND == "jax":
        return lambda values, gradients: [value - 0.1 * gradient for value, gradient in zip(values, gradients, strict=True)]

    def apply(gradients: list[Any]) -> None:
        for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
            weight.assign(keras.ops.convert_to_tensor(weight) - 0.1 * gradient)

    return apply


def twice(model: Any) -> Any:
    return lambda gradients: [model.optimizer.apply(gradients, model.trainable_weights) for _ in range(2)]


def dense_alone(model: Any) -> Any:
    if BACKEND == "jax":
        return lambda values, gradients: [*values[:1], *(v - 0.1 * g for v, g in zip(values[1:], gradients[1:], strict=True))]
    return lambda gradients: model.optimizer.apply_gradients(list(zip(gradients[-2:], model.trainable_weights[-2:], strict=True)))


@pytest.mark.parametrize(
    ("applies", "says"),
    [
        pytest.param(by_hand, "something that is no Keras optimizer updates the variables of table", id="by hand"),
        pytest.param(twice, "applies gradients of table .* 2 times.*Add the losses up", id="twice", marks=STATELESS),
        pytest.param(dense_alone, "3 steps looked up rows of table .* Apply them with the model's optimizer", id="dense alone"),
    ],
)
def test_a_step_that_leaves_rows_out_is_refused(cluster: kvemb.Cluster, name: str, applies: Any, says: str) -> None:
    ours = own_step()
    ours.compile(SGD(), "mse")
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    before = table.pull(np.arange(N_WORDS))
    ours.applies = applies(ours)
    with pytest.raises(InvalidInputError, match=says):
        fit(ours, *all_words(4))
    np.testing.assert_array_equal(table.pull(np.arange(N_WORDS)), before)


def test_first_steps_that_overflow_are_not_taken_for_steps_that_leave_rows_out(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = two_words(), two_words()
    for model in (plain, ours):
        model.compile(keras.optimizers.LossScaleOptimizer(SGD(), initial_scale=2.0**127), "mse")
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    x, y = all_words(16)
    for model in (plain, ours):
        fit(model, x, 100 * y)
    assert 3 < 16 - int(plain.optimizer.iterations) < 16
    same(plain, ours, table)


@STATELESS
def test_gradients_that_are_left_out_now_and_then_are_told(cluster: kvemb.Cluster, name: str) -> None:
    ours = own_step()
    ours.compile(SGD(), "mse", run_eagerly=True)
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    steps: list[int] = []

    def every_other(gradients: list[Any]) -> None:
        steps.append(0)
        if len(steps) % 2:
            ours.optimizer.apply(gradients, ours.trainable_weights)

    ours.applies = every_other
    with pytest.warns(UserWarning, match="gathered over several batches are lost"):
        fit(ours, *all_words(6))


def gradients_by_hand(model: Any, x: Any, y: Any) -> None:
    if BACKEND == "jax":
        import jax

        fixed = [one.value for one in model.non_trainable_variables]
        loss = lambda trained: keras.ops.mean(model.stateless_call(trained, fixed, x)[0] - y)  # noqa: E731
        jax.grad(loss)([one.value for one in model.trainable_variables])
    elif BACKEND == "torch":
        keras.ops.mean(model(x) - y).backward()
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            mean = keras.ops.mean(model(x) - y)
        tape.gradient(mean, model.trainable_variables)


def test_a_loop_of_ones_own_is_refused_where_it_asks_for_gradients(cluster: kvemb.Cluster, name: str) -> None:
    ours = two_words()
    ours.compile(SGD(), "mse")
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    x, y = all_words(1)
    with pytest.raises(InvalidInputError, match=r"its gradients would not be pushed.*write a step of your own as its train_step"):
        gradients_by_hand(ours, x, keras.ops.convert_to_tensor(y))
    assert keras.ops.convert_to_numpy(ours(x)).shape == y.shape, "a call that trains nothing looks rows up"


class Contrast(keras.Model):
    """Negatives that are drawn in its call, or come with the batch."""

    def __init__(self, drawn: bool) -> None:
        keras.utils.set_random_seed(SEED)
        super().__init__()
        self.vocabulary, self.drawn = keras.layers.Embedding(N_WORDS, DIM, name="vocabulary"), drawn
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        negatives = keras.random.randint((BATCH, 2), 0, N_WORDS, seed=self.seeds) if self.drawn else x[:, :1]
        return keras.ops.sum(keras.ops.mean(self.vocabulary(x), 1) - keras.ops.mean(self.vocabulary(negatives), 1), -1, keepdims=True)


def test_negatives_that_are_drawn_in_the_call_are_refused(cluster: kvemb.Cluster, name: str) -> None:
    x, y = all_words(1)
    for drawn in (True, False):
        model = Contrast(drawn)
        model(x)
        model.compile(SGD(), "mse")
        distribute(model, cluster, min_rows=1, names=names_of(f"{name}.{drawn}"), quiet=True)
        if drawn:
            with pytest.raises(InvalidInputError, match=r"draws in its call.*draw them in the input pipeline, as an input of the model"):
                model.train_on_batch(x, y)
        else:
            assert model.train_on_batch(x, y) > model.train_on_batch(x, y)


@STATELESS
def test_a_layer_that_a_step_calls_again_is_fed_by_name(cluster: kvemb.Cluster, name: str) -> None:
    class Again(OwnStep):
        def train_step(self, *args: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(args[-1])
            self(keras.ops.flip(x, axis=-1), training=True)
            return super().train_step(*args)

    def made() -> Any:
        plain = two_words()
        model = Again(plain.inputs, plain.outputs)
        model.compile(SGD(), "mse")
        return model

    plain, ours, unnamed = made(), made(), made()
    x, y = all_words(4)
    distribute(unnamed, cluster, min_rows=1, names=names_of(f"{name}.u"), quiet=True)
    with pytest.raises(InvalidInputError, match=r"its call 2 in a step .*calls the model several times.*features="):
        fit(unnamed, x, y)
    feeds = {"vocabulary": [lambda x: keras.ops.flip(x, axis=-1), lambda x: x]}
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), features=feeds, quiet=True).tables
    for model in (plain, ours):
        fit(model, x, y)
    same(plain, ours, table)
