"""A step of kvemb.jax: the losses of a table of JAX's own, on real storage, whatever way its rows come."""

from typing import Any

import numpy as np
import pytest
from memory_cluster import MemoryCluster

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")

import kvemb  # noqa: E402
import kvemb.jax as kj  # noqa: E402
from kvemb.errors import InvalidInputError, ShardUnavailableError  # noqa: E402

N_WORDS, N_USERS, DIM, RATE = 40, 12, 4, 0.5
FAR = 1 << 40  # ids that 32 bits do not hold


def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
    logits = rows["word"].mean(axis=1) @ params["w"] + rows["user"] @ params["w"] + params["b"]
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()


def batches(n: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "word": rng.integers(0, N_WORDS, (16, 3)) + FAR,
            "user": rng.integers(0, N_USERS, 16),
            "label": rng.integers(0, 2, 16).astype(np.float32),
        }
        for _ in range(n)
    ]


def first_params() -> dict[str, Any]:
    return {"w": jnp.linspace(-1.0, 1.0, DIM), "b": jnp.zeros(())}


def tables(cluster: Any, suffix: str = "", optimizer: Any = None) -> dict[str, Any]:
    rule, first = optimizer or kj.sgd(RATE), kvemb.init.normal(std=0.5)
    return {name: cluster.create_table(f"{name}{suffix}", dim=DIM, optimizer=rule, initializer=first) for name in ("word", "user")}


class Plain:
    """The same training with dense tables of JAX's own."""

    def __init__(self, of: dict[str, Any], rule: Any) -> None:
        self.rows = {"word": jnp.asarray(of["word"].pull(np.arange(N_WORDS) + FAR)), "user": jnp.asarray(of["user"].pull(range(N_USERS)))}
        self.params, self.dense, self.rule = first_params(), optax.sgd(0.1), rule
        self.state, self.row_state = self.dense.init(self.params), rule.init(self.rows)

        def step(params: Any, rows: Any, state: Any, row_state: Any, batch: Any) -> Any:
            def loss_of(params: Any, rows: Any) -> Any:
                return loss_fn(params, {"word": rows["word"][batch["word"] - FAR], "user": rows["user"][batch["user"]]}, batch)

            loss, (grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(params, rows)
            updates, state = self.dense.update(grads, state, params)
            row_updates, row_state = rule.update(row_grads, row_state, rows)
            return optax.apply_updates(params, updates), optax.apply_updates(rows, row_updates), state, row_state, loss

        self._step = step

    def take(self, batch: Any) -> float:
        made = self._step(self.params, self.rows, self.state, self.row_state, batch)
        self.params, self.rows, self.state, self.row_state, loss = made
        return float(loss)


GATHERING: dict[str, Any] = {
    "mean": lambda rule: optax.MultiSteps(rule, 3),
    "sum": lambda rule: optax.MultiSteps(rule, 3, use_grad_mean=False),
    "more batches later": lambda rule: optax.MultiSteps(rule, lambda step: jnp.where(step < 3, 1, 4)),
    "as a transformation": lambda rule: optax.MultiSteps(rule, 3).gradient_transformation(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("way", GATHERING)
def test_rows_change_where_multi_steps_change_parameters_and_as_a_table_of_jaxs_own(
    sync_cluster: kvemb.Cluster, rule: str, way: str
) -> None:
    of = tables(sync_cluster, f".{rule}.{way.replace(' ', '_')}", getattr(kj, rule)(RATE))
    plain, data = Plain(of, GATHERING[way](getattr(optax, rule)(RATE))), batches(13)
    step, dense = kj.embed(loss_fn, of, optimizer=GATHERING[way](optax.sgd(0.1))), GATHERING[way](optax.sgd(0.1))
    plain.dense, plain.state = dense, dense.init(plain.params)
    params, n_changes = first_params(), 0
    state = dense.init(params)
    loader = kj.prepare(step, data, consistency="exact", threads_num=2, capacity=3) if way == "mean" else data
    for batch in loader:
        before = plain.rows
        params, state, loss = step(params, state, batch)
        np.testing.assert_allclose(loss, plain.take(batch), rtol=2e-6)
        n_changes += bool(np.any(np.asarray(before["word"]) != np.asarray(plain.rows["word"])))
        np.testing.assert_allclose(of["word"].pull(np.arange(N_WORDS) + FAR), plain.rows["word"], rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(of["user"].pull(range(N_USERS)), plain.rows["user"], rtol=2e-6, atol=1e-6)
    assert n_changes == {"more batches later": 5}.get(way, 4), "and not at the batches between"


def test_gathered_gradients_survive_a_push_that_failed(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    of, (first, second), dense = memory_tables(cluster), batches(2), optax.MultiSteps(optax.sgd(0.1), 2)
    step, params = kj.embed(loss_fn, of, optimizer=dense), first_params()
    params, state, _ = step(params, dense.init(params), first)
    before = of["word"].pull(first["word"].reshape(-1))
    with monkeypatch.context() as broken:
        broken.setattr(cluster, "push", lambda *_, **__: (_ for _ in ()).throw(ShardUnavailableError("away")))
        with pytest.raises(ShardUnavailableError):
            step(params, state, second)
    step(params, state, second)
    assert (of["word"].pull(first["word"].reshape(-1)) != before).any(axis=1).all(), "the first batch's rows, too"


def test_a_state_from_the_middle_of_a_step_is_told(cluster: MemoryCluster) -> None:
    dense, (first, second) = optax.MultiSteps(optax.sgd(0.1), 2), batches(2)
    params, state, _ = kj.embed(loss_fn, memory_tables(cluster), optimizer=dense)(first_params(), dense.init(first_params()), first)
    fresh = kj.embed(loss_fn, memory_tables(cluster), optimizer=dense)
    with pytest.warns(UserWarning, match="gathered gradients of 1 batches, and those of rows here are of 0.* Save where a step is whole"):
        fresh(params, state, second)


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


def memory_tables(cluster: MemoryCluster, rule: Any = None) -> dict[str, Any]:
    return {name: cluster.table(name, DIM, rule or kj.sgd(RATE)) for name in ("word", "user")}


def test_a_step_is_compiled_a_few_times_and_then_never_again(cluster: MemoryCluster) -> None:
    n_traced = 0

    def counting(params: Any, rows: Any, batch: Any) -> Any:
        nonlocal n_traced
        n_traced += 1
        return loss_fn(params, rows, batch)

    step = kj.embed(counting, memory_tables(cluster))
    for n_words in (1, 3, 9, 20, 40, 11, 2, 33):
        for batch in batches(3, seed=n_words):
            batch["word"] = batch["word"] % n_words
            step(first_params(), batch)
    assert n_traced <= 5


def test_padding_is_zeros_and_neither_pulled_nor_trained(cluster: MemoryCluster) -> None:
    word = cluster.table("word", DIM)
    step = kj.embed(lambda params, rows, batch: (rows["word"] * params).sum(), {"word": word}, padding_id=-1)
    batch = {"word": np.array([[5, -1], [-1, -1]])}
    rows = step.rows(batch)["word"]
    assert rows.shape == (2, 2, DIM)
    np.testing.assert_array_equal(rows[0, 0], word.pull([5])[0])
    assert not np.asarray(rows).reshape(4, DIM)[1:].any()
    step(jnp.float32(1.0), batch)
    assert [ids.tolist() for ids, _ in cluster.pushes[-1].values()] == [[5]]
    step(jnp.float32(1.0), {"word": np.array([[-1, -1]])})
    assert len(cluster.pushes) == 1, "nothing to push"


def test_features_that_share_a_table_are_one_pull_and_their_gradients_add_up(cluster: MemoryCluster) -> None:
    item = cluster.table("item", DIM)
    step = kj.embed(lambda params, rows, batch: rows["seen"].sum() + 2 * rows["bought"].sum(), {"seen": item, "bought": item})
    step({}, {"seen": np.array([1, 2, 2]), "bought": np.array([2, 3])})
    ids, grads = cluster.pushes[-1]["item"]
    assert cluster.n_pulls == 1
    assert dict(zip(ids.tolist(), grads[:, 0].tolist(), strict=True)) == {1: 1.0, 2: 4.0, 3: 2.0}


def test_without_an_optimizer_it_is_value_and_grad_by_the_parameters(cluster: MemoryCluster) -> None:
    step = kj.embed(lambda p, rows, batch: (loss_fn(p, rows, batch), rows["user"].shape[0]), memory_tables(cluster), has_aux=True)
    (batch,) = batches(1)
    rows = step.rows(batch)
    (loss, aux), grads = step(first_params(), batch)
    expected, expected_grads = jax.value_and_grad(loss_fn)(first_params(), rows, batch)
    assert aux == 16
    np.testing.assert_allclose([loss, *grads["w"]], [expected, *expected_grads["w"]], rtol=1e-6)


def test_a_push_that_fails_leaves_parameters_and_state_as_they_were(cluster: MemoryCluster) -> None:
    step = kj.embed(loss_fn, memory_tables(cluster), optimizer=optax.adam(0.1))
    params, (batch,) = first_params(), batches(1)
    state = optax.adam(0.1).init(params)
    cluster.failure = ConnectionError("no shard answers")
    with pytest.raises(ConnectionError):
        step(params, state, batch)
    cluster.failure = None
    assert np.isfinite(step(params, state, batch)[2])


def test_ids_that_jax_may_have_cut_to_32_bits_are_refused(cluster: MemoryCluster) -> None:
    cut = jnp.asarray(np.array([FAR + 3]))
    assert cut.tolist() == [3], "JAX says nothing of it"
    step = kj.embed(lambda params, rows, batch: rows["word"].sum(), {"word": cluster.table("word", DIM)})
    with pytest.raises(InvalidInputError, match=r"feature 'word'.*int32.*another row would be trained. Give these ids as a NumPy array"):
        step({}, {"word": cut})
    assert cluster.pushes == []
    step({}, {"word": np.array([FAR + 3])})
    assert cluster.pushes[-1]["word"][0].tolist() == [FAR + 3]


def test_ids_in_arrays_of_jax_are_taken_where_they_are_whole(cluster: MemoryCluster) -> None:
    few = kj.embed(lambda params, rows, batch: rows["few"].sum(), {"few": cluster.table("few", DIM, num_ids=100)})
    few({}, {"few": jnp.arange(3)})
    assert cluster.pushes[-1]["few"][0].tolist() == [0, 1, 2]
    many = kj.embed(lambda params, rows, batch: rows["many"].sum(), {"many": cluster.table("many", DIM)})
    with jax.enable_x64(True):
        many({}, {"many": jnp.asarray(np.array([FAR + 3]))})
    assert cluster.pushes[-1]["many"][0].tolist() == [FAR + 3]


def test_parameters_and_state_are_given_away_and_nothing_else(cluster: MemoryCluster) -> None:
    step, params = kj.embed(loss_fn, memory_tables(cluster), optimizer=optax.adam(0.1)), first_params()
    state, (batch,) = optax.adam(0.1).init(params), batches(1)
    batch["label"] = jnp.asarray(batch["label"])
    new_params, new_state, _ = step(params, state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new_params, new_state, batch["label"])))
    step(new_params, new_state, batch)  # the batch can be used again
    assert len(cluster.pushes) == 2


def test_gradients_that_are_not_finite_are_refused(cluster: MemoryCluster) -> None:
    step = kj.embed(lambda params, rows, batch: rows["word"].sum() * jnp.inf, {"word": cluster.table("word", DIM)})
    with pytest.raises(InvalidInputError, match="NaN or Inf"):
        step({}, {"word": np.array([1])})


def test_run_time_values_travel_with_the_next_push(cluster: MemoryCluster) -> None:
    step = kj.embed(loss_fn, memory_tables(cluster))
    step.hyper["word"]["lr"] = 0.25
    step(first_params(), batches(1)[0])
    assert [cluster.hyper[-1][name]["lr"] for name in ("word", "user")] == [0.25, RATE]


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_a_step_inside_of_a_transformation_is_refused(cluster: MemoryCluster, transform: str) -> None:
    step = kj.embed(loss_fn, memory_tables(cluster))
    (batch,) = batches(1)
    with pytest.raises(InvalidInputError, match=r"inside of jax\.jit"):
        getattr(jax, transform)(lambda b: step(first_params(), batch | {"b": b})[0])(jnp.ones(2))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tables": {}}, "mapping from feature"),
        ({"tables": {"word": "word"}}, "a kvemb table"),
        ({"optimizer": 0.1}, "optax transformation"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_unapplied": -1}, "max_unapplied"),
    ],
)
def test_what_cannot_be_embedded_is_refused(cluster: MemoryCluster, change: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        kj.embed(**({"loss_fn": loss_fn, "tables": memory_tables(cluster)} | change))


def test_a_batch_that_does_not_fit_is_refused_by_name(cluster: MemoryCluster) -> None:
    step = kj.embed(loss_fn, memory_tables(cluster))
    with pytest.raises(InvalidInputError, match="no ids of user"):
        step({}, {"word": np.array([1])})
    with pytest.raises(InvalidInputError, match="no mapping"):
        step({}, np.array([1]))
    with pytest.raises(InvalidInputError, match="call step"):
        step({}, {}, {})
    with pytest.raises(InvalidInputError, match="expected integers"):
        step({}, {"word": np.array([[0.5]]), "user": np.array([1])})


def clip_all(grads: Any, row_grads: Any) -> Any:
    return optax.clip_by_global_norm(0.05).update((grads, row_grads), optax.EmptyState())[0]


def test_rows_and_parameters_are_clipped_by_one_norm(cluster: MemoryCluster) -> None:
    of = memory_tables(cluster)
    step = kj.embed(
        lambda params, rows, batch: loss_fn(params, rows, batch), of, optimizer=optax.sgd(0.1), row_grads=clip_all, padding_id=-1
    )
    (batch,) = batches(1)
    batch["word"][:4, 1] = -1
    ids = {"word": np.unique(batch["word"])[1:], "user": np.unique(batch["user"])}
    before = {name: of[name].pull(ids[name]) for name in of}

    def by_rows(params: Any, rows: Any) -> Any:
        padded = jnp.concatenate([rows["word"], jnp.zeros((1, DIM))])
        at = np.where(batch["word"] == -1, len(ids["word"]), np.searchsorted(ids["word"], batch["word"]))
        return loss_fn(params, {"word": padded[at], "user": rows["user"][np.searchsorted(ids["user"], batch["user"])]}, batch)

    grads, row_grads = clip_all(*jax.grad(by_rows, (0, 1))(first_params(), {name: jnp.asarray(rows) for name, rows in before.items()}))
    params, _, _ = step(first_params(), optax.sgd(0.1).init(first_params()), batch)
    np.testing.assert_allclose(params["w"], first_params()["w"] - 0.1 * grads["w"], rtol=1e-5)
    for name in of:
        np.testing.assert_allclose(of[name].pull(ids[name]), before[name] - RATE * row_grads[name], rtol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        optax.chain(optax.MultiSteps(optax.adam(0.1), 4), optax.scale(0.5)),
        optax.MultiSteps(optax.chain(optax.clip(1.0), optax.adam(0.1)), 4),
        optax.multi_transform({"all": optax.chain(optax.zero_nans(), optax.sgd(0.1))}, "all"),
    ],
    ids=["clip", "MultiSteps within others", "within MultiSteps", "within others"],
)
def test_a_transformation_of_all_gradients_is_refused_unless_it_is_said_what_rows_get(cluster: MemoryCluster, rule: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"holds optax's .* not those of rows. Give what changes gradients as row_grads="):
        kj.embed(loss_fn, memory_tables(cluster), optimizer=rule)
    kj.embed(loss_fn, memory_tables(cluster), optimizer=rule, row_grads=lambda grads, rows: (grads, rows))


def test_multi_steps_that_skip_batches_are_refused(cluster: MemoryCluster) -> None:
    rule = optax.MultiSteps(optax.adam(0.1), 4, should_skip_update_fn=optax.skip_not_finite)
    with pytest.raises(InvalidInputError, match=r"should_skip_update_fn.* Leave it out, and give row_grads="):
        kj.embed(loss_fn, memory_tables(cluster), optimizer=rule, row_grads=lambda grads, rows: (grads, rows))


@pytest.mark.filterwarnings("error")
def test_a_schedule_that_rows_do_not_follow_is_told_once(cluster: MemoryCluster) -> None:
    data, rule = batches(5), optax.sgd(optax.linear_schedule(0.1, 0.0, 10))
    with pytest.warns(UserWarning, match=r"set step.hyper\[table\]") as said:
        with_rule(kj.embed(loss_fn, memory_tables(cluster), optimizer=rule), rule, data)
    assert len(said) == 1
    followed = kj.embed(loss_fn, memory_tables(cluster), optimizer=rule)
    followed.hyper["word"]["lr"] = 0.01
    with_rule(followed, rule, data)


def with_rule(step: Any, rule: Any, data: list[Any]) -> None:
    params = first_params()
    state = rule.init(params)
    for batch in data:
        params, state, _ = step(params, state, batch)
