"""distribute: a plain program of TensorFlow 2 trains the same rows and weights as before, with one line more."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import kvemb  # noqa: E402
import kvemb.tensorflow as kt  # noqa: E402
from kvemb.errors import InvalidInputError, TableMismatchError  # noqa: E402

if tf.keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend in this process", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
N_WORDS, N_USERS, DIM = 60, 20, 4
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.5),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.1),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
}


class Model(tf.Module):
    """Logistic regression over rows, by each of TensorFlow's lookups."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.towers = {
            "word": tf.Variable(rng.normal(size=(N_WORDS, DIM)).astype("f")),
            "user": tf.Variable(rng.normal(size=(N_USERS, DIM)).astype("f")),
        }
        self.kernel = tf.Variable(rng.normal(size=(DIM, 1)).astype("f"))
        self.bias = tf.Variable(0.0)

    def __call__(self, batch: Any) -> Any:
        word, user = self.towers["word"], self.towers["user"]
        vectors = (
            tf.nn.embedding_lookup_sparse(word, batch["text"], None, combiner="mean")
            + tf.nn.safe_embedding_lookup_sparse(word, batch["tags"], combiner="sqrtn")
            + tf.reduce_sum(tf.nn.embedding_lookup(word, batch["title"], max_norm=3.0), 1)
            + tf.gather(user, batch["user"])
            + tf.gather_nd(user, batch["user"][:, tf.newaxis])
        )
        return tf.matmul(vectors, self.kernel)[:, 0] + self.bias

    def loss(self, batch: Any) -> Any:
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(batch["label"], self(batch)))


def sparse(rng: Any, size: int, least: int) -> Any:
    rows = [rng.integers(0, N_WORDS, rng.integers(least, 4)) for _ in range(size)]
    return tf.RaggedTensor.from_row_lengths(np.concatenate(rows), [len(one) for one in rows]).to_sparse()


def batches(n: int, seed: int = 3) -> list[dict[str, Any]]:
    """Every row is in each, most of them several times: Keras's Adam moves the rows of no batch, too."""
    rng, made = np.random.default_rng(seed), []
    for at in range(n):
        size = N_WORDS // 2 + at % 3  # of another size now and then
        title = np.resize(rng.permutation(N_WORDS), (size, 3))
        user = np.resize(rng.permutation(N_USERS), size)
        label = rng.integers(0, 2, size).astype("f")
        made.append(
            {
                "text": sparse(rng, size, 1),
                "tags": sparse(rng, size, 0),
                "title": tf.constant(title),
                "user": tf.constant(user),
                "label": tf.constant(label),
            }
        )
    return made


def summed(gradient: Any) -> Any:
    """Each id once: Keras squares those of an id that comes twice one by one (docs/frameworks.md)."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    ids, at = tf.unique(gradient.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(gradient.values, at, tf.size(ids)), ids, gradient.dense_shape)


def stepped(
    model: Any, optimizer: Any, treat: Callable[[list[Any]], list[Any]] = lambda grads: list(map(summed, grads))
) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(batch)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(treat(grads), model.trainable_variables, strict=True))
        return loss

    return step


def converted(cluster: Any, name: str, optimizer: Any, **options: Any) -> Model:
    model = Model()
    kt.distribute(model, cluster, optimizer=optimizer, min_rows=10, names=lambda path: f"{name}.{path}", quiet=True, **options)
    return model


def rows_of(model: Any) -> dict[str, Any]:
    return {name: tf.gather(of, tf.range(of.shape[0])).numpy() for name, of in model.towers.items()}


def check_equal(model: Any, plain: Any) -> None:
    for name, rows in rows_of(model).items():
        np.testing.assert_allclose(rows, plain.towers[name], rtol=2e-4, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(model.kernel, plain.kernel, rtol=2e-4, atol=2e-6)


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "graph": lambda step: tf.function(step, reduce_retracing=True),
    "a trace for each size": tf.function,
    "rows as arguments": kt.function,
}


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_rows_weights_and_losses_are_those_of_the_same_program_without_the_line(sync_cluster: kvemb.Cluster, rule: str, way: str) -> None:
    plain, theirs, ours = Model(), OPTIMIZERS[rule](), OPTIMIZERS[rule]()
    model = converted(sync_cluster, f"{rule}.{way}", ours)
    np.testing.assert_array_equal(rows_of(model)["word"], plain.towers["word"])
    step, expected = WAYS[way](stepped(model, ours)), stepped(plain, theirs)
    for batch in batches(8):
        np.testing.assert_allclose(step(batch), expected(batch), rtol=2e-5)
    check_equal(model, plain)
    assert (int(ours.iterations), int(theirs.iterations)) == (8, 8)


def test_batches_whose_rows_are_pulled_ahead_train_the_same(sync_cluster: kvemb.Cluster) -> None:
    plain, theirs, ours, data = Model(), OPTIMIZERS["adagrad"](), OPTIMIZERS["adagrad"](), batches(8)
    model = converted(sync_cluster, "ahead", ours)
    step, expected = kt.function(stepped(model, ours)), stepped(plain, theirs)
    ahead = kt.prepare(step, data, consistency="exact", threads_num=1, capacity=2)
    np.testing.assert_allclose([step(batch) for batch in ahead], [expected(batch) for batch in data], rtol=2e-5)
    check_equal(model, plain)
    assert "not foreseen" not in ahead.report


def clipped_by_their_norm(grads: list[Any]) -> list[Any]:
    return tf.clip_by_global_norm(grads, 0.05)[0]


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "graph"])
def test_what_a_program_does_to_gradients_holds_for_rows(sync_cluster: kvemb.Cluster, wrap: Any, name: str) -> None:
    plain, theirs, ours = Model(), OPTIMIZERS["sgd"](), OPTIMIZERS["sgd"]()
    model = converted(sync_cluster, name, ours)

    def penalised(model: Any, optimizer: Any) -> Any:
        def step(first: Any, second: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = model.loss(first)
                penalty = 0.1 * tf.nn.l2_loss(tf.gather(model.towers["user"], tf.unique(second["user"])[0])) + model.loss(second)
            variables = [model.towers["word"], model.towers["user"], model.kernel, model.bias]
            pairs = zip(tape.gradient(loss, variables), tape.gradient(penalty, variables), strict=True)
            together = [joined(one, other) for one, other in pairs]
            optimizer.apply_gradients(zip(clipped_by_their_norm(together), variables, strict=True))

        return wrap(step)

    data = batches(6)
    for model_of, optimizer in ((model, ours), (plain, theirs)):
        step = penalised(model_of, optimizer)
        for first, second in zip(data[::2], data[1::2], strict=True):
            step(first, second)
    check_equal(model, plain)


def joined(one: Any, other: Any) -> Any:
    """Gradients of two batches, as a program adds them up by hand."""
    if not isinstance(one, tf.IndexedSlices):
        return one + other
    ids = tf.concat([one.indices, other.indices], 0)
    return tf.IndexedSlices(tf.concat([one.values, other.values], 0), ids, one.dense_shape)


def test_a_loop_in_a_function_trains_as_one_outside(sync_cluster: kvemb.Cluster) -> None:
    plain, theirs, ours = Model(), OPTIMIZERS["sgd"](), OPTIMIZERS["sgd"]()
    model = converted(sync_cluster, "loop", ours)
    users = tf.random.stateless_uniform([6, 12], [1, 2], 0, N_USERS, tf.int64)

    def epoch(model: Any, optimizer: Any) -> Any:
        user = model.towers["user"]

        @tf.function
        def run(users: Any) -> None:
            for ids in tf.data.Dataset.from_tensor_slices(users):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(user, ids)))
                optimizer.apply_gradients([(tape.gradient(loss, user), user)])

        return run

    for model_of, optimizer in ((plain, theirs), (model, ours)):
        if model_of is plain:
            optimizer.build([plain.towers["user"]])
        epoch(model_of, optimizer)(users)
    check_equal(model, plain)
    assert int(ours.iterations) == 6


def test_schedules_momentum_and_clipping_are_the_optimizers(sync_cluster: kvemb.Cluster) -> None:
    def made() -> Any:
        rate = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
        return tf.keras.optimizers.SGD(rate, momentum=0.9)

    plain, theirs, ours = Model(), made(), made()
    model = converted(sync_cluster, "schedule", ours)
    step, expected = tf.function(stepped(model, ours)), stepped(plain, theirs)
    for batch in batches(4):
        step(batch)
        expected(batch)
    check_equal(model, plain)


def test_a_trainer_without_gradients_of_a_table_takes_part_in_its_step_at_the_rate_of_now(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")

    def made() -> Any:
        return tf.keras.optimizers.SGD(tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))

    def train(url: str, rank: int) -> dict[str, Any]:
        with kvemb.connect(url, trainer=f"rank-{rank}", timeout_s=60) as cluster:
            model, ours = Model(), made()
            kt.distribute(model, cluster, optimizer=ours, min_rows=10, quiet=True)
            for batch in batches(3):
                with tf.GradientTape() as tape:
                    loss = model.loss(batch) if rank == 0 else tf.reduce_sum(tf.gather(model.towers["word"], batch["title"]))
                variables = model.trainable_variables
                ours.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            cluster.flush()
            return rows_of(model)

    with kvemb.local(store="redis", shards=2, mode="sync", trainers=2, durability="os") as url, ThreadPoolExecutor(2) as pool:
        ours, others = pool.map(partial(train, url), range(2))
    np.testing.assert_array_equal(ours["user"], others["user"])
    assert not np.allclose(ours["user"], Model().towers["user"])


def test_weight_decay_leaves_out_the_variables_that_the_optimizer_excludes(sync_cluster: kvemb.Cluster) -> None:
    def made(model: Any) -> Any:
        optimizer = tf.keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_list=[model.towers["user"]])
        return optimizer

    model, plain = Model(), Model()
    ours, theirs = made(model), made(plain)
    kt.distribute(model, sync_cluster, optimizer=ours, min_rows=10, names=lambda path: f"decay.{path}", quiet=True)
    for batch in batches(3):
        stepped(model, ours)(batch)
        stepped(plain, theirs)(batch)
    check_equal(model, plain)


def test_built_beforehand_it_takes_gradients_without_variables(sync_cluster: kvemb.Cluster) -> None:
    plain, theirs, ours = Model(), OPTIMIZERS["adam"](), OPTIMIZERS["adam"]()
    model = converted(sync_cluster, "built", ours)
    for model_of, optimizer in ((model, ours), (plain, theirs)):
        optimizer.build(model_of.trainable_variables)
        for batch in batches(2):
            with tf.GradientTape() as tape:
                loss = model_of.loss(batch)
            optimizer.apply([summed(of) for of in tape.gradient(loss, model_of.trainable_variables)])
    check_equal(model, plain)
    assert sum(int(np.prod(of.shape)) for of in ours.variables) == 2 + 2 * (DIM + 1), "no state for rows"


def test_two_pushes_may_be_on_their_way(require_server: Callable[[str], str]) -> None:
    """In an async job rows may be older than the step before, so the gradient here does not depend on them."""
    require_server("redis-server")
    model, optimizer = tf.Module(), tf.keras.optimizers.SGD(0.5)
    model.word = tf.Variable(tf.zeros([N_WORDS, DIM]))
    with kvemb.local(store="redis", durability="os") as url, kvemb.connect(url, timeout_s=60) as cluster:
        done = kt.distribute(model, cluster, optimizer=optimizer, min_rows=10, max_unapplied=2, quiet=True)

        @tf.function
        def step(ids: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(model.word, ids))
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))

        for at in range(20):
            step(tf.constant([at, 0, 0]))
        cluster.flush()
        rows = tf.gather(model.word, range(N_WORDS)).numpy()
        assert done.steps.last_ack.staleness.changed_fraction <= 1.0
    expected = np.zeros((N_WORDS, DIM), np.float32)
    expected[:20] = -0.5
    expected[0] = -0.5 * 41
    np.testing.assert_array_equal(rows, expected)


READS = {
    "a product": lambda word: tf.matmul(tf.ones([1, N_WORDS]), word),
    "a penalty": tf.nn.l2_loss,
    "a sum": tf.reduce_sum,
    "a conversion": tf.convert_to_tensor,
    "a slice": lambda word: word[1],
    "a part of a row": lambda word: tf.gather_nd(word, [[1, 2]]),
    "a columns' gather": lambda word: tf.gather(word, [1], axis=1),
    "a value": lambda word: word.value(),
    "an assignment": lambda word: word.assign(tf.zeros([N_WORDS, DIM])),
    "a scatter": lambda word: word.scatter_sub(tf.IndexedSlices(tf.ones([1, DIM]), [1])),
}


@pytest.fixture
def word(sync_cluster: kvemb.Cluster, name: str) -> Any:
    model = converted(sync_cluster, name, OPTIMIZERS["sgd"]())
    return model.towers["word"]


def test_a_read_or_write_of_the_whole_variable_is_refused_and_says_what_to_do(word: Any) -> None:
    for use in [*READS.values(), lambda word: word.numpy(), np.asarray]:
        with pytest.raises(InvalidInputError, match=r"'towers.word'.*(tf.gather.*table.assign.*leave=\['towers.word'\])"):
            use(word)
    for use in READS.values():
        with pytest.raises((InvalidInputError, TypeError, ValueError), match=r"(?s)'towers.word'.*leave=\['towers.word'\]"):
            tf.function(lambda use=use: use(word), autograph=False)()
    assert "TableVariable" in repr(word)
    with pytest.raises(InvalidInputError, match=r"an argument of a tf.function.*find it in the model"):
        tf.function(lambda of: tf.gather(of, [1]))(word)
    with pytest.raises(InvalidInputError, match="ids"):
        tf.gather(word, [N_WORDS])


def test_a_gradient_of_all_rows_or_none_is_refused_and_changes_nothing(sync_cluster: kvemb.Cluster) -> None:
    optimizer = OPTIMIZERS["sgd"]()
    model, (batch,) = converted(sync_cluster, "whole", optimizer), batches(1)
    before = rows_of(model)
    with pytest.raises(InvalidInputError, match=r"gradient of table 'whole.towers.*IndexedSlices"):
        stepped(model, optimizer, lambda grads: [tf.convert_to_tensor(of) for of in grads])(batch)
    with pytest.raises(InvalidInputError, match="no variable has a gradient"):
        stepped(model, optimizer, lambda grads: [None] * len(grads))(batch)
    with pytest.raises(InvalidInputError, match="NaN"):
        stepped(model, optimizer, lambda grads: list(map(nan, grads)))(batch)

    @tf.function
    def in_a_loop(ids: Any) -> Any:
        total = 0.0
        with tf.GradientTape() as tape:
            for at in tf.range(3):
                total += tf.reduce_sum(tf.gather(model.towers["word"], ids[at : at + 1]))
        return tape.gradient(total, model.towers["word"])

    with pytest.raises(Exception, match=r"through a loop of a tf.function.*take the tape into the loop"):
        in_a_loop(tf.constant([1, 2, 3]))
    for name, rows in rows_of(model).items():
        np.testing.assert_array_equal(rows, before[name])
    np.testing.assert_array_equal(model.kernel, Model().kernel)


def nan(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient.values * np.nan, gradient.indices, gradient.dense_shape)


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "graph"])
def test_a_push_that_fails_leaves_the_other_variables(
    sync_cluster: kvemb.Cluster, monkeypatch: pytest.MonkeyPatch, wrap: Any, name: str
) -> None:
    plain, theirs, ours = Model(), OPTIMIZERS["sgd"](), OPTIMIZERS["sgd"]()
    model, (batch, *_) = converted(sync_cluster, name, ours), batches(1)
    step = wrap(stepped(model, ours))
    with monkeypatch.context() as patch:
        patch.setattr(type(sync_cluster), "push", lambda *_, **__: (_ for _ in ()).throw(InvalidInputError("no shard")))
        with pytest.raises(Exception, match="no shard"):
            step(batch)
    np.testing.assert_array_equal(model.kernel, plain.kernel)
    step(batch)
    stepped(plain, theirs)(batch)
    check_equal(model, plain)


def test_a_function_that_was_traced_before_fails_and_the_memory_is_free(sync_cluster: kvemb.Cluster) -> None:
    model, optimizer = Model(), OPTIMIZERS["sgd"]()
    before = tf.function(lambda ids: tf.gather(model.towers["word"], ids))
    total = tf.function(lambda: tf.reduce_sum(model.towers["word"]))
    before(tf.constant([7]))
    total()
    kt.distribute(model, sync_cluster, optimizer=optimizer, min_rows=10, names=lambda path: f"before.{path}", quiet=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"not in \[0, 1\)"):
        before(tf.constant([7]))
    assert np.isnan(total())


def test_a_checkpoint_has_the_dense_part_and_knows_the_rows_step(sync_cluster: kvemb.Cluster, tmp_path: Path) -> None:
    optimizer, data = OPTIMIZERS["adagrad"](), batches(5)
    model = converted(sync_cluster, "saved", optimizer)
    step, saved = tf.function(stepped(model, optimizer)), tf.train.Checkpoint(model=model, optimizer=optimizer)
    for batch in data[:2]:
        step(batch)
    path, rows = saved.save(str(tmp_path / "dense")), str(tmp_path / "rows")
    sync_cluster.save(rows)
    expected = [float(step(batch)) for batch in data[2:]]

    saved.restore(path).assert_consumed()
    with pytest.warns(kt.MixedStepsWarning, match=r"of step 2 of table 'saved.towers.word', and its rows are at step 5"):
        model(data[0])
    sync_cluster.load(rows)
    saved.restore(path).assert_consumed()
    assert [float(step(batch)) for batch in data[2:]] == expected

    plain = Model()
    other = tf.train.Checkpoint(model=plain).save(str(tmp_path / "plain"))
    with pytest.raises(tf.errors.OpError, match="float"):
        tf.train.Checkpoint(model=model).restore(other)
    with pytest.raises(tf.errors.OpError, match="int64"):
        tf.train.Checkpoint(model=plain).restore(path)


def test_a_saved_model_is_made_of_a_plain_copy(sync_cluster: kvemb.Cluster, tmp_path: Path) -> None:
    optimizer, (batch,) = OPTIMIZERS["sgd"](), batches(1)
    model = converted(sync_cluster, "copy", optimizer)
    stepped(model, optimizer)(batch)
    with pytest.raises(InvalidInputError, match=r"a SavedModel is refused.*kvemb.tensorflow.materialize\(model\)"):
        tf.saved_model.save(model, str(tmp_path / "model"))
    with pytest.raises(InvalidInputError, match="are 1280 bytes, above max_bytes=1279"):
        kt.materialize(model, max_bytes=1279)
    copy = kt.materialize(model)
    np.testing.assert_allclose(copy(batch), model(batch), rtol=1e-6)
    assert [type(of) for of in copy.towers.values()] == [type(copy.kernel)] * 2
    copy.score = tf.function(lambda user: tf.matmul(tf.gather(copy.towers["user"], user), copy.kernel), [tf.TensorSpec([None], tf.int64)])
    tf.saved_model.save(copy, str(tmp_path / "model"))
    user = tf.constant([1, 2], tf.int64)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.score(user), copy.score(user))
    with pytest.raises(InvalidInputError, match="no variable over a table"):
        kt.materialize(copy)


def test_options_reach_the_tables(sync_cluster: kvemb.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = Model(), OPTIMIZERS["adagrad"]()
    model.frozen = tf.Variable(tf.ones([50, 2]), trainable=False)
    done = kt.distribute(
        model,
        sync_cluster,
        optimizer=optimizer,
        min_rows=20,
        names={"towers.user": "options.user"},
        leave=["towers.word"],
        initializer=kvemb.init.constant(0.5),
        dtype="bfloat16",
        seed=7,
        reduce="mean",
        max_unapplied=3,
    )
    (user,) = done.tables
    of = user.definition
    assert (of.name, of.dtype, of.seed, of.reduce, of.optimizer.kind, of.num_ids) == (
        "options.user",
        "bfloat16",
        7,
        "mean",
        "adagrad",
        N_USERS,
    )
    assert tf.gather(model.towers["user"], [3]).numpy().tolist() == [[0.5] * DIM]
    assert done.steps._steps.max_unapplied == 3
    said = capsys.readouterr().err
    assert said.strip() == str(done)
    assert "'towers.user' (ResourceVariable), 20 x 4 -> table 'options.user': made; rows begin as constant(value=0.5); adagrad(" in said
    assert re.search(r"'towers.word' stays: leave=\[…\] names it", said)
    assert re.search(r"'kernel' stays: 4 rows, fewer than min_rows=20", said)
    assert re.search(r"'frozen' stays: it is not trained", said)


def test_a_second_trainer_opens_the_tables_and_their_rows_stay(sync_cluster: kvemb.Cluster) -> None:
    optimizer, (batch,) = OPTIMIZERS["sgd"](), batches(1)
    model = converted(sync_cluster, "second", optimizer)
    stepped(model, optimizer)(batch)
    other, theirs = Model(seed=5), OPTIMIZERS["sgd"]()
    names: Callable[[str], str] = lambda path: f"second.{path}"  # noqa: E731
    done = kt.distribute(other, sync_cluster, optimizer=theirs, min_rows=10, names=names, quiet=True)
    check_rows = rows_of(model)
    for name, rows in rows_of(other).items():
        np.testing.assert_array_equal(rows, check_rows[name])
    assert "20 x 4 -> table 'second.towers.user': it existed and keeps its rows; the variable's weights are not used; sgd" in str(done)
    assert "note: the rows of 'second.towers.user' (1 step of training), 'second.towers.word' (1 step of training) are those of" in str(
        done
    )
    own = kt.distribute(Model(), sync_cluster, optimizer=OPTIMIZERS["adam"](), min_rows=10, names=names, prefix="own/", quiet=True)
    assert [table.name for table in own.tables] == [f"own/{table.name}" for table in done.tables]
    with pytest.raises(TableMismatchError):
        kt.distribute(Model(), sync_cluster, optimizer=OPTIMIZERS["adam"](), min_rows=10, names=names)


def plain_with(**variables: Any) -> Any:
    model = tf.Module()
    for name, of in variables.items():
        setattr(model, name, of)
    return model


def mirrored() -> Any:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return Model()


def built() -> tuple[Any, Any]:
    model, optimizer = Model(), OPTIMIZERS["adam"]()
    optimizer.build(model.trainable_variables)
    return model, optimizer


@pytest.mark.parametrize(
    ("made", "options", "why"),
    [
        (lambda: ([], OPTIMIZERS["sgd"]()), {}, r"must be a tf.Module, got list.*model = tf.Module\(\)"),
        (lambda: (Model(), "adam"), {}, "optimizer is builtins.str.*tf.keras.optimizers"),
        (lambda: (Model(), tf.compat.v1.train.AdamOptimizer()), {}, "give the one of tf.keras.optimizers"),
        (lambda: (Model(), tf.keras.optimizers.Nadam()), {}, "no update rule for Nadam"),
        (lambda: (Model(), tf.keras.optimizers.SGD(0.1, global_clipnorm=1.0)), {}, "global_clipnorm"),
        (
            lambda: (Model(), tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
            {},
            "gradient_accumulation_steps: do it in the loop",
        ),
        (lambda: (Model(), tf.keras.optimizers.SGD(0.1, loss_scale_factor=2.0)), {}, "loss_scale_factor"),
        (lambda: (Model(), tf.keras.optimizers.LossScaleOptimizer(OPTIMIZERS["sgd"]())), {}, "LossScaleOptimizer"),
        (built, {}, "the optimizer has state for towers.user, towers.word already"),
        (lambda: (Model(), OPTIMIZERS["sgd"]()), {"min_rows": 1000}, r"no variable .* to replace.*'towers.word' stays \(60 rows"),
        (lambda: (tf.Module(), OPTIMIZERS["sgd"]()), {}, "does its first call make them"),
        (lambda: (Model(), OPTIMIZERS["sgd"]()), {"leave": ["word"]}, "leave: no variable .* is at 'word'; there are: .*towers.word"),
        (
            lambda: (Model(), OPTIMIZERS["sgd"]()),
            {"names": lambda path: "same"},
            "'towers.user' and 'towers.word' would both be table 'same'",
        ),
        (lambda: (Model(), OPTIMIZERS["sgd"]()), {"names": {"towers.word": ""}}, "variable 'towers.word': .*give names="),
        (lambda: (Model(), OPTIMIZERS["sgd"]()), {"max_unapplied": -1}, "max_unapplied is -1"),
        (lambda: (plain_with(w=tf.Variable(tf.ones([20, 2], tf.float16))), OPTIMIZERS["sgd"]()), {}, "'w': it is float16"),
        (lambda: (mirrored(), OPTIMIZERS["sgd"]()), {}, "'towers.user': MirroredVariable is no plain .* outside of a strategy's scope"),
        (lambda: (plain_with(w=tf.Variable(tf.ones([20, 2]), constraint=abs)), OPTIMIZERS["sgd"]()), {}, "'w': constraint"),
    ],
)
def test_what_cannot_be_distributed_is_refused_and_nothing_changes(sync_cluster: kvemb.Cluster, made: Any, options: Any, why: str) -> None:
    model, optimizer = made()
    tables = set(sync_cluster.tables())
    with pytest.raises(InvalidInputError, match=why):
        kt.distribute(model, sync_cluster, optimizer=optimizer, **{"min_rows": 10, **options})
    assert set(sync_cluster.tables()) == tables
    assert not isinstance(model, Model) or np.isfinite(model.towers["word"].numpy()).all()


def test_distribute_is_for_once(sync_cluster: kvemb.Cluster) -> None:
    optimizer = OPTIMIZERS["sgd"]()
    model = converted(sync_cluster, "once", optimizer)
    with pytest.raises(InvalidInputError, match="pushes rows already"):
        kt.distribute(Model(), sync_cluster, optimizer=optimizer, min_rows=10)
    with pytest.raises(InvalidInputError, match=r"'towers.word' stays \(it is table 'once.towers.word' already\)"):
        kt.distribute(model, sync_cluster, optimizer=OPTIMIZERS["sgd"](), min_rows=10)
