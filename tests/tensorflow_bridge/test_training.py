"""Training through kvemb.tensorflow: the losses of TensorFlow's own variables on real storage, whatever way rows come."""

import itertools
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from memory_cluster import MemoryAck, MemoryCluster

tf = pytest.importorskip("tensorflow")

import kvemb  # noqa: E402
import kvemb.tensorflow as kt  # noqa: E402
from kvemb import optim  # noqa: E402
from kvemb.errors import InvalidInputError  # noqa: E402

N_WORDS, N_USERS, DIM, RATE = 40, 12, 4, 0.5
FAR = 1 << 40


def batches(n: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    made = []
    for at in range(n):
        size = 14 + at % 3
        words = [rng.integers(0, N_WORDS, rng.integers(1, 4)) + FAR for _ in range(size)]
        ragged = tf.RaggedTensor.from_row_lengths(np.concatenate(words), [len(one) for one in words])
        made.append(
            {
                "word": ragged,
                "user": tf.constant(rng.integers(0, N_USERS, size)),
                "label": tf.constant(rng.integers(0, 2, size), tf.float32),
            }
        )
    return made


class Model:
    """Logistic regression over rows, on a cluster's tables or on plain variables."""

    def __init__(self, word: Any, user: Any, rows: Any = None) -> None:
        self.word, self.user, self.rows = word, user, rows
        self.weight = tf.Variable(tf.linspace(-1.0, 1.0, DIM))

    def loss(self, batch: Any) -> Any:
        lookups: Any = tf.nn if self.rows is None else kt
        ids = batch["word"] - FAR if self.rows is None else batch["word"]
        word = lookups.embedding_lookup_sparse(self.word, ids, None, combiner="mean")
        user = lookups.embedding_lookup(self.user, batch["user"])
        logits = tf.linalg.matvec(word + user, self.weight)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(batch["label"], logits))

    def step(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(batch)
        if self.rows is None:
            (gradient, *of_rows) = tape.gradient(loss, [self.weight, self.word, self.user])
            for variable, rows in zip((self.word, self.user), of_rows, strict=True):
                variable.assign_sub(RATE * tf.convert_to_tensor(rows))
        else:
            (gradient,) = tape.gradient(loss, [self.weight])
        self.weight.assign_sub(0.1 * gradient)
        if self.rows is not None:
            self.rows.step()
        return loss


def on_tables(cluster: Any, suffix: str) -> Model:
    rule, first = optim.sgd(RATE), kvemb.init.normal(std=0.5)
    made = [cluster.create_table(f"{name}{suffix}", dim=DIM, optimizer=rule, initializer=first) for name in ("word", "user")]
    return Model(*made, kt.RowsOptimizer(made))


def on_variables(of: Model) -> Model:
    return Model(tf.Variable(of.word.pull(np.arange(N_WORDS) + FAR)), tf.Variable(of.user.pull(range(N_USERS))))


@pytest.mark.parametrize("way", ["eager", "graph", "rows as arguments", "prepared eager", "prepared graph", "prepared rows"])
def test_losses_are_those_of_tensorflows_variables(sync_cluster: kvemb.Cluster, way: str) -> None:
    model = on_tables(sync_cluster, f".{way.replace(' ', '_')}")
    plain, data = tf.function(on_variables(model).step, reduce_retracing=True), batches(20)
    step: Any = model.step
    if way.endswith("graph"):
        step = tf.function(model.step, reduce_retracing=True)
    elif "rows" in way:
        step = kt.function(model.step)
    loader: Any = data
    if way.startswith("prepared"):
        loader = kt.prepare(step, data, consistency="exact", threads_num=2, capacity=3)
    losses = [float(step(batch)) for batch in loader]
    np.testing.assert_allclose(losses, [float(plain(batch)) for batch in data], rtol=2e-5)
    assert losses[-1] != losses[0]
    if way.startswith("prepared"):
        assert "0 of 20 batches were pulled again" in loader.report
        assert "not foreseen" not in loader.report


def test_a_tape_outside_of_a_graph_trains_rows_looked_up_inside() -> None:
    cluster = MemoryCluster("sync")
    word = cluster.table("word", DIM)
    rows = kt.RowsOptimizer([word])
    loss_of = tf.function(lambda ids: tf.reduce_sum(kt.embedding_lookup(word, ids)))
    loss_of(tf.constant([4]))  # traced outside of any tape
    with tf.GradientTape() as tape:
        loss = loss_of(tf.constant([3]))
    tape.gradient(loss, [])
    rows.step()
    assert cluster.pushes[-1]["word"][0].tolist() == [3]
    assert cluster.pushes[-1]["word"][1].tolist() == [[1.0] * DIM]


def test_batches_of_other_sizes_are_no_new_trace() -> None:
    cluster, n_traced = MemoryCluster(), 0
    word = cluster.table("word", DIM)

    def step(batch: Any) -> Any:
        nonlocal n_traced
        n_traced += 1
        return tf.reduce_sum(kt.embedding_lookup(word, batch["ids"]))

    traced = kt.function(step)
    for size in (3, 1, 7, 20):
        traced({"ids": tf.range(size)})
    assert n_traced == 2, "one for the ids, one to run"


def test_a_dataset_is_prepared_and_nothing_happens_to_it_while_the_step_is_traced() -> None:
    cluster = MemoryCluster()
    word, n_steps = cluster.table("word", DIM), tf.Variable(0)
    rows = kt.RowsOptimizer([word])

    def step(ids: Any, label: Any) -> Any:
        n_steps.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kt.embedding_lookup(word, ids * 2)) * tf.reduce_sum(label)
        tape.gradient(loss, [])
        rows.step()
        return loss

    dataset = tf.data.Dataset.from_tensor_slices((tf.range(12), tf.ones([12]))).batch(4)
    traced = kt.function(step)
    batches = kt.prepare(traced, dataset, threads_num=1, capacity=2)
    assert (n_steps.numpy(), cluster.pushes, len(batches)) == (0, [], 3)
    for ids, label in batches:
        traced(ids, label)
    assert (n_steps.numpy(), len(cluster.pushes)) == (3, 3)
    assert "not foreseen" not in batches.report


def test_rows_looked_up_under_no_tape_are_told_at_the_first_step() -> None:
    cluster = MemoryCluster()
    model = on_memory(cluster)
    model.loss(batches(1)[0])
    with pytest.raises(InvalidInputError, match="none has a gradient"):
        model.rows.step()
    assert cluster.pushes == []


def test_rows_that_no_optimizer_trains_are_refused_in_backward() -> None:
    word = MemoryCluster().table("word", DIM)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(kt.embedding_lookup(word, [1]))
    with pytest.raises(InvalidInputError, match="no RowsOptimizer trains them"):
        tape.gradient(loss, [])


def test_gradients_of_several_backward_passes_add_up_and_can_be_dropped() -> None:
    cluster = MemoryCluster()
    word = cluster.table("word", DIM)
    rows = kt.RowsOptimizer([word])
    for ids in ([1, 2], [2, 3]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kt.embedding_lookup(word, ids))
        tape.gradient(loss, [])
    rows.step()
    ids, grads = cluster.pushes[-1]["word"]
    assert dict(zip(ids.tolist(), grads[:, 0].tolist(), strict=True)) == {1: 1.0, 2: 2.0, 3: 1.0}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(kt.embedding_lookup(word, [1]))
    tape.gradient(loss, [])
    rows.drop()
    rows.step()
    assert len(cluster.pushes) == 1


def test_a_push_that_fails_keeps_its_gradients() -> None:
    cluster = MemoryCluster()
    word = cluster.table("word", DIM)
    rows = kt.RowsOptimizer([word])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(kt.embedding_lookup(word, [1]))
    tape.gradient(loss, [])
    cluster.failure = ConnectionError("no shard answers")
    with pytest.raises(ConnectionError):
        rows.step()
    cluster.failure = None
    rows.step()
    assert len(cluster.pushes) == 1


def test_run_time_values_travel_with_the_next_push() -> None:
    cluster = MemoryCluster()
    model = on_memory(cluster)
    model.rows.hyper["word"]["lr"] = 0.25
    model.step(batches(1)[0])
    assert [cluster.hyper[-1][name]["lr"] for name in ("word", "user")] == [0.25, RATE]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda ids: float(tf.reduce_sum(ids)), "must be what tf.function takes"),
        (lambda ids: tf.reduce_sum(ids), "0 tables of 0 clusters"),
    ],
)
def test_a_step_that_cannot_be_prepared_is_refused(step: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        kt.prepare(step, [tf.constant([1])])


def test_ids_that_are_made_of_rows_cannot_be_known_ahead() -> None:
    word = MemoryCluster().table("word", DIM)

    def step(ids: Any) -> Any:
        first = kt.embedding_lookup(word, ids)
        return kt.embedding_lookup(word, tf.cast(first[:, 0] * 0, tf.int64) + 1)

    with pytest.raises(InvalidInputError, match="are they made of other rows"):
        kt.function(step)(tf.constant([1]))
    assert tf.function(step)(tf.constant([1])).shape == (1, DIM), "in a plain tf.function they are pulled one after the other"


def test_an_iterator_is_not_consumed_to_find_lookups() -> None:
    with pytest.raises(InvalidInputError, match="dataset is an iterator"):
        kt.prepare(lambda ids: ids, iter([tf.constant([1])]))


def on_memory(cluster: MemoryCluster) -> Model:
    made = [cluster.table(name, DIM, optim.sgd(RATE)) for name in ("word", "user")]
    return Model(*made, kt.RowsOptimizer(made))


def counted(ended: str) -> Any:
    """A dataset of a generator: batches 0, 1, 2, and then its end, an error, or more for ever."""

    def generate() -> Any:
        for at in itertools.count():
            if at == 3 and ended == "ends":
                return
            if at == 3 and ended == "raises":
                raise ValueError("a line that cannot be read")
            yield np.array([at, at + 1])

    return tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([None], tf.int64))


@pytest.mark.parametrize(("threads_num", "capacity"), [(1, 1), (3, 8), ("auto", "auto")])
@pytest.mark.parametrize("ended", ["ends", "raises", "goes on"])
def test_a_prepared_dataset_ends_as_its_generator_does(ended: str, threads_num: Any, capacity: Any) -> None:
    cluster, got = MemoryCluster(), []
    word = cluster.table("word", DIM)
    step = kt.function(lambda ids: tf.reduce_sum(kt.embedding_lookup(word, ids)))
    prepared = kt.prepare(step, counted(ended), threads_num=threads_num, capacity=capacity)
    error = pytest.raises(tf.errors.InvalidArgumentError, match="a line that cannot be read") if ended == "raises" else nullcontext()
    with error, prepared:
        for batch in prepared:
            got.append(batch.numpy().tolist())
            step(batch)
            if len(got) == 20:
                break
    assert got == [[at, at + 1] for at in range(20 if ended == "goes on" else 3)]
    assert "not foreseen" not in prepared.report
    assert not [one.name for one in threading.enumerate() if one.name.startswith("kvemb-pull") and one.is_alive() and not one.daemon]


def test_a_step_whose_wait_fails_is_not_pushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MemoryCluster("sync")
    word = cluster.table("word", DIM)
    rows = kt.RowsOptimizer([word])

    def train(ids: list[int]) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kt.embedding_lookup(word, ids))
        tape.gradient(loss, [])
        rows.step()

    with monkeypatch.context() as patch:
        patch.setattr(MemoryAck, "wait_released", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train([1])
    train([2])
    assert [push["word"][0].tolist() for push in cluster.pushes] == [[1], [2]]
