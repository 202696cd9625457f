"""One line converts a model of flax.nnx or equinox: losses, rows and parameters are those of the plain program, on real storage."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

import kvemb  # noqa: E402
import kvemb.jax as kj  # noqa: E402
from kvemb.errors import InvalidInputError  # noqa: E402

N_USERS, N_WORDS, DIM, RATE = 40, 60, 4, 0.05


class NnxModel(nnx.Module):  # type: ignore[misc]
    """Two tables, one of them looked up twice, and one embedding that stays."""

    def __init__(self, rngs: Any) -> None:
        self.user = nnx.Embed(N_USERS, DIM, rngs=rngs)
        self.word = nnx.Embed(N_WORDS, DIM, rngs=rngs)
        self.small = nnx.Embed(3, DIM, rngs=rngs)
        self.top = nnx.Linear(3 * DIM, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        words = self.word(batch["words"]).mean(axis=1) + self.word(batch["title"])
        return self.top(jnp.concatenate([self.user(batch["user"] % N_USERS), words, self.small(batch["title"] % 3)], axis=-1))[:, 0]


class EqxModel(eqx.Module):  # type: ignore[misc]
    """The same for one example; vmap makes a batch of it."""

    user: Any
    word: Any
    small: Any
    top: Any

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.user, self.word = eqx.nn.Embedding(N_USERS, DIM, key=keys[0]), eqx.nn.Embedding(N_WORDS, DIM, key=keys[1])
        self.small, self.top = eqx.nn.Embedding(3, DIM, key=keys[2]), eqx.nn.Linear(3 * DIM, 1, key=keys[3])

    def __call__(self, batch: Any) -> Any:
        words = jax.vmap(self.word)(batch["words"]).mean(axis=0) + self.word(batch["title"])
        return self.top(jnp.concatenate([self.user(batch["user"] % N_USERS), words, self.small(batch["title"] % 3)]))[0]


def nnx_loss(model: Any, batch: Any) -> Any:
    return ((model(batch) - batch["label"]) ** 2).mean()


def eqx_loss(model: Any, batch: Any) -> Any:
    return ((eqx.filter_jit(lambda model, batch: jax.vmap(model)(batch))(model, batch) - batch["label"]) ** 2).mean()


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "nnx": (lambda: NnxModel(nnx.Rngs(0)), nnx_loss),
    "equinox": (lambda: EqxModel(jax.random.key(0)), eqx_loss),
}


def batches(n: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "user": rng.integers(0, 3 * N_USERS, 16),
            "words": rng.integers(0, N_WORDS, (16, 3)),
            "title": rng.integers(0, N_WORDS, 16),
            "label": rng.normal(size=16).astype(np.float32),
        }
        for _ in range(n)
    ]


def plain_run(library: str, data: list[Any]) -> tuple[list[float], Any]:
    """The plain program: its losses and its model."""
    make, loss_fn = MODELS[library]
    model, rule = make(), optax.sgd(RATE)
    if library == "nnx":
        graph, params = nnx.split(model)
        loss_of = lambda params, batch: loss_fn(nnx.merge(graph, params), batch)  # noqa: E731
    else:
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        loss_of = lambda params, batch: loss_fn(eqx.combine(params, rest), batch)  # noqa: E731
    losses, step = [], jax.jit(jax.value_and_grad(loss_of))
    for batch in data:
        loss, grads = step(params, batch)
        params = optax.apply_updates(params, rule.update(grads, rule.init(params), params)[0])
        losses.append(float(loss))
    return losses, nnx.merge(graph, params) if library == "nnx" else eqx.combine(params, rest)


def weight_of(embedding: Any) -> Any:
    return np.asarray(embedding.embedding[...] if hasattr(embedding, "embedding") else embedding.weight)


@pytest.mark.parametrize("way", ["pulled", "ahead", "two batches a step"])
@pytest.mark.parametrize("library", MODELS)
def test_losses_rows_and_parameters_are_those_of_the_plain_program(sync_cluster: kvemb.Cluster, library: str, way: str) -> None:
    make, loss_fn = MODELS[library]
    data, name = batches(12), lambda path: f"{library}.{way.replace(' ', '')}.{path}"
    done = kj.distribute(make(), sync_cluster, optimizer=kj.sgd(RATE), min_rows=10, names=name, quiet=True)
    assert [table.name for table in done.tables] == [name("user"), name("word")]
    assert "'small' stays: 3 rows, fewer than min_rows=10" in str(done)
    rule = optax.MultiSteps(optax.sgd(RATE), 2) if "two" in way else optax.sgd(RATE)
    step, params = done.step(loss_fn, optimizer=rule), done.params
    state, losses = rule.init(params), []
    loader = kj.prepare(step, data, consistency="exact", threads_num=2, capacity=3) if way == "ahead" else data
    for batch in loader:
        parts = [{name: of[at : at + 8] for name, of in batch.items()} for at in (0, 8)] if "two" in way else [batch]
        of_parts = []
        for part in parts:
            params, state, loss = step(params, state, part)
            of_parts.append(float(loss))
        losses.append(np.mean(of_parts))
    expected, model = plain_run(library, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    user, word = done.tables
    np.testing.assert_allclose(user.pull(np.arange(N_USERS)), weight_of(model.user), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(word.pull(np.arange(N_WORDS)), weight_of(model.word), rtol=1e-5, atol=1e-6)
    trained = done.model(params)
    np.testing.assert_allclose(weight_of(trained.small), weight_of(model.small), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(step.evaluate(params, data[0]), loss_fn(model, data[0]), rtol=1e-5)


@pytest.mark.parametrize("library", MODELS)
def test_a_second_trainer_opens_the_tables_with_their_rows(sync_cluster: kvemb.Cluster, library: str) -> None:
    make, _ = MODELS[library]
    options: Any = {"optimizer": kj.sgd(RATE), "min_rows": 10, "names": lambda path: f"{library}.again.{path}", "quiet": True}
    (user, _) = kj.distribute(make(), sync_cluster, **options).tables
    user.assign([0], np.full((1, DIM), 7, np.float32))
    again = kj.distribute(make(), sync_cluster, **options)
    assert "it is not trained yet, and rows that it has stay" in str(again)
    assert (again.tables[0].pull([0]) == 7).all()


def test_options_reach_the_tables(sync_cluster: kvemb.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    model = eqx.filter_eval_shape(MODELS["equinox"][0])  # has shapes alone
    options: Any = {"initializer": kvemb.init.uniform(1.0, 2.0), "dtype": "float16", "seed": 3, "reduce": "mean", "leave": ["word"]}
    done = kj.distribute(model, sync_cluster, optimizer=kj.adagrad(0.2), min_rows=10, names={"user": "user"}, prefix="options.", **options)
    (table,) = done.tables
    of = table.definition
    assert (of.name, of.dtype, of.seed, of.reduce, of.optimizer.kind) == ("options.user", "float16", 3, "mean", "adagrad")
    assert table.pull([5]).min() >= 1.0
    said = capsys.readouterr().err
    assert "'user' (Embedding), 40 x 4 -> table 'options.user': made; rows begin as uniform(low=1, high=2); adagrad(lr=0.2" in said
    assert "'word' stays: leave=[…] names it" in said


class Dropped(nnx.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        self.user, self.dropout = nnx.Embed(20, DIM, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class OwnEmbed(nnx.Embed):  # type: ignore[misc]
    """A subclass."""


def refused() -> dict[str, tuple[Callable[[], Any], dict[str, Any], str]]:
    own = lambda: nnx.List([OwnEmbed(20, DIM, rngs=nnx.Rngs(0))])  # noqa: E731
    half = lambda: eqx.nn.Embedding(20, DIM, dtype=jnp.bfloat16, key=jax.random.key(0))  # noqa: E731
    nnx_model, eqx_model = (make for make, _ in MODELS.values())
    return {
        "a class of its own": (lambda: nnx.Sequential(*own()), {}, "OwnEmbed is a class of its own.*leave="),
        "16 bits": (half, {}, "its weight is bfloat16"),
        "optax": (nnx_model, {"optimizer": optax.sgd(0.1)}, "cannot be asked for its rule. Give the tables' as kvemb.jax.adagrad"),
        "other state": (Dropped, {}, "holds RngCount, RngKey beside nnx.Param.*kvemb.jax.embed"),
        "no library": (lambda: {"user": jnp.zeros((20, DIM))}, {}, "model is dict.*kvemb.jax.embed"),
        "names nothing": (eqx_model, {"leave": ["item"]}, "leave: no embedding is at 'item'; there are: user, word, small"),
        "one name twice": (eqx_model, {"names": lambda path: "one"}, "'user' and 'word' would both be table 'one'"),
        "too few rows": (eqx_model, {"min_rows": 100}, "no embedding to replace: 'user' stays"),
        "no weights": (lambda: eqx.filter_eval_shape(eqx_model), {}, "has a shape and no weights; give initializer="),
    }


@pytest.mark.parametrize("case", refused())
def test_what_cannot_be_a_table_is_refused_by_name_and_nothing_changes(sync_cluster: kvemb.Cluster, case: str) -> None:
    make, options, says = refused()[case]
    model, before = make(), sync_cluster.tables()
    with pytest.raises(InvalidInputError, match=says):
        kj.distribute(model, sync_cluster, **{"optimizer": kj.sgd(RATE), "min_rows": 10, "quiet": True} | options)
    assert sync_cluster.tables() == before
    assert not any("Rows" in type(one).__name__ for one in vars(model).values()) if isinstance(model, nnx.Module) else True


LOSSES: dict[str, tuple[Any, str]] = {
    "ids of a weight": (
        lambda model, batch: model.word(jnp.argmax(model.small(batch["title"]), -1)).sum(),
        "made of parameters or of rows",
    ),
    "ids of rows": (lambda model, batch: model.word(model.user(batch["user"]).argmax(-1)).sum(), "made of parameters or of rows"),
    "a loop": (
        lambda model, batch: jax.lax.fori_loop(0, 3, lambda i, sum: sum + model.word(batch["title"]).sum(), 0.0),
        "looked up inside of (scan|while)",
    ),
    "all rows": (lambda model, batch: model.word.attend(jnp.zeros(DIM)).sum(), "attend.. needs all rows"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_whose_ids_are_not_known_before_is_refused_at_its_step(sync_cluster: kvemb.Cluster, case: str) -> None:
    loss_fn, says = LOSSES[case]
    name = lambda path: f"refused.{path}"  # noqa: E731
    done = kj.distribute(MODELS["nnx"][0](), sync_cluster, optimizer=kj.sgd(RATE), min_rows=10, names=name, quiet=True)
    with pytest.raises(InvalidInputError, match=says):
        done.step(loss_fn)(done.params, batches(1)[0])


def test_a_model_over_tables_says_where_it_can_be_called(sync_cluster: kvemb.Cluster) -> None:
    model = MODELS["nnx"][0]()
    kj.distribute(model, sync_cluster, optimizer=kj.sgd(RATE), min_rows=10, names=lambda path: f"outside.{path}", quiet=True)
    with pytest.raises(InvalidInputError, match="asked for outside of a step"):
        model(batches(1)[0])
