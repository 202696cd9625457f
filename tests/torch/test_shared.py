"""Lookups that modules share: what is pulled together, and that it is never another step's or other ids' rows."""

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster, MemoryTable
from torch import Tensor, nn

from kvemb import optim
from trainer.bridge.shared_lookups import EarlyLookup, SharedLookups, found_of, unique_of
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer

IDS, OTHER_IDS = torch.tensor([5, 1, 5, 3]), torch.tensor([2, 1, 4, 4])


class Model(nn.Module):
    """A weight and a vector per feature, as factorization machines have."""

    def __init__(self, cluster: MemoryCluster, **options: int) -> None:
        super().__init__()
        self.weights = EmbeddingBag(cluster.table("weight", 1), mode="sum")
        self.vectors = Embedding(cluster.table("vector", 4), **options)

    def forward(self, ids: Tensor, vector_ids: Tensor | None = None) -> Tensor:
        vectors = self.vectors(ids if vector_ids is None else vector_ids)
        return self.weights(ids.reshape(1, -1)).sum() + vectors.square().sum()


def tables(cluster: MemoryCluster) -> tuple[MemoryTable, MemoryTable]:
    return cluster.tables["weight"], cluster.tables["vector"]


def train(model: Model, optimizer: SparseOptimizer, *ids: Tensor) -> None:
    model(*ids).backward()
    optimizer.step()


def test_from_the_second_step_on_tables_of_the_same_ids_are_one_pull() -> None:
    cluster = MemoryCluster()
    model = Model(cluster)
    optimizer = SparseOptimizer(model)
    train(model, optimizer, IDS)
    assert cluster.n_pulls == 0
    train(model, optimizer, OTHER_IDS)
    train(model, optimizer, IDS)
    assert cluster.n_pulls == 2


def test_sharing_changes_no_bit_of_what_is_trained() -> None:
    shared, alone = MemoryCluster(), MemoryCluster()
    models = [Model(shared), Model(alone)]
    optimizers = [SparseOptimizer(model) for model in models]
    for module in (models[1].weights, models[1].vectors):
        module.shared = SharedLookups({module.table.name: module.table}, alone)
    for ids in (IDS, OTHER_IDS, IDS, OTHER_IDS):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, ids)
    assert shared.n_pulls == 3
    assert alone.n_pulls == 0
    for mine, theirs in zip(tables(shared), tables(alone), strict=True):
        assert np.array_equal(mine.pull(np.arange(9)), theirs.pull(np.arange(9)))


def test_rows_pulled_ahead_do_not_outlive_the_step() -> None:
    cluster = MemoryCluster()
    model = Model(cluster)
    optimizer = SparseOptimizer(model)
    for _ in range(2):
        train(model, optimizer, IDS)
    model.vectors(IDS)  # pulls the weights, too, which are not needed now
    optimizer.step()
    before = model.weights(IDS.reshape(1, -1)).detach().clone()
    cluster.tables["weight"].apply(IDS.unique().numpy(), np.ones((3, 1), np.float32), {"lr": 1.0})
    optimizer.zero_grad()
    optimizer.step()
    assert not torch.equal(model.weights(IDS.reshape(1, -1)), before)


def test_a_table_that_was_pulled_ahead_in_vain_is_not_pulled_ahead_again() -> None:
    cluster = MemoryCluster()
    model = Model(cluster)
    optimizer = SparseOptimizer(model)
    for _ in range(2):
        train(model, optimizer, IDS)
    assert cluster.n_pulls == 1
    train(model, optimizer, IDS, OTHER_IDS)
    train(model, optimizer, IDS, OTHER_IDS)
    assert cluster.n_pulls == 2


def test_other_ids_in_the_same_tensor_are_pulled_anew() -> None:
    cluster = MemoryCluster()
    model = Model(cluster)
    optimizer = SparseOptimizer(model)
    for _ in range(2):
        train(model, optimizer, IDS)
    ids = IDS.clone()
    model.vectors(ids)
    ids.numpy()[0] = 8  # behind torch's back
    assert torch.equal(model.weights(ids.reshape(1, -1)).flatten(), torch.from_numpy(cluster.tables["weight"].pull(ids.numpy())).sum(0))


def test_an_input_that_changes_after_the_forward_pass_changes_no_push() -> None:
    cluster = MemoryCluster()
    for model in (Embedding(cluster.table("one", 2)), Model(cluster)):
        ids = torch.tensor([1, 2, 3])
        optimizer = SparseOptimizer(model)
        loss = model(ids).sum()
        ids += 4
        loss.backward()
        optimizer.step()
        for pushed, _ in cluster.pushes.pop().values():
            assert pushed.tolist() == [1, 2, 3]


def test_evaluation_shares_nothing() -> None:
    cluster = MemoryCluster()
    model = Model(cluster)
    optimizer = SparseOptimizer(model)
    for _ in range(2):
        train(model, optimizer, IDS)
    model.eval()
    model(IDS)
    with torch.no_grad():
        model.train()(IDS)
    assert cluster.n_pulls == 1


def test_tables_of_other_kinds_of_ids_are_not_pulled_ahead() -> None:
    cluster = MemoryCluster()
    cluster.table("vector", 4, optim.sgd(0.5), id_dtype="uint64")
    model = Model(cluster)
    optimizer = SparseOptimizer(model)
    for _ in range(3):
        train(model, optimizer, IDS)
    assert cluster.n_pulls == 0


def test_padding_is_part_of_what_is_asked_for() -> None:
    cluster = MemoryCluster()
    model = Model(cluster, padding_idx=3)
    optimizer = SparseOptimizer(model)
    for _ in range(3):
        train(model, optimizer, IDS)
    assert cluster.n_pulls == 0
    assert all(3 not in push["vector"][0] for push in cluster.pushes)


def ahead(table: MemoryTable, ids: Tensor) -> EarlyLookup:
    wanted = unique_of(ids.numpy().astype(np.uint64))
    return EarlyLookup(ids.numpy().astype(np.uint64), found_of(wanted, table.pull(wanted.ids.astype(np.int64), return_versions=True)))


def test_installed_rows_serve_lookups_of_their_ids_until_the_step() -> None:
    cluster = MemoryCluster()
    table = cluster.table("weight", 2)
    module = Embedding(table)
    optimizer = SparseOptimizer(module)
    expected = module(IDS)
    n_pulls = table.n_pulls
    module.shared.install({"weight": [ahead(table, OTHER_IDS), ahead(table, IDS)]})
    n_pulls = table.n_pulls
    rows = module(IDS)
    assert torch.equal(rows, expected)
    assert table.n_pulls == n_pulls
    module(torch.tensor([8]))
    assert table.n_pulls == n_pulls + 1
    rows.sum().backward()
    optimizer.step()
    module(IDS)
    assert table.n_pulls == n_pulls + 2


def test_a_newer_optimizer_keeps_the_lookups_that_modules_share() -> None:
    model = Model(MemoryCluster())
    first = SparseOptimizer(model).shared
    assert SparseOptimizer(model).shared is first is model.weights.shared
