"""prepare: rows are there before their batch is used, and training has the same result as without."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster
from torch import Tensor, nn

from kvemb.errors import InvalidInputError
from trainer.bridge import batches_ahead
from trainer.lookahead.pull_threads import NAME
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer, prepare

Batch = dict[str, Tensor]
FEATURES = {"users": "user", "items": "items"}


class Model(nn.Module):
    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__()
        self.users = Embedding(cluster.table("user", 4))
        self.items = EmbeddingBag(cluster.table("item", 4), mode="sum")

    def forward(self, batch: Batch) -> Tensor:
        return (self.users(batch["user"]) * self.items(batch["items"])).sum(dim=1)


def draw(n: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"user": torch.randint(0, 50, (8,), generator=generator), "items": torch.randint(0, 90, (8, 3), generator=generator)}
        for _ in range(n)
    ]


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


def train(model: nn.Module, optimizer: SparseOptimizer, loader: Any) -> list[float]:
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_named_features_are_looked_up_ahead_and_nothing_is_pulled_in_forward() -> None:
    cluster = MemoryCluster()
    model = Model(cluster)
    loader = prepare(model, draw(6), features=FEATURES)
    train(model, SparseOptimizer(model), loader)
    assert (model.users.shared.n_ahead, model.users.shared.n_pulled) == (12, 0)
    assert cluster.n_pulls == 6, "one pull for all tables of a batch"
    assert ours() == []


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_the_optimizer_may_be_made_before_or_after(optimizer_first: bool) -> None:
    model = Model(MemoryCluster())
    made = [SparseOptimizer(model)] if optimizer_first else []
    loader = prepare(model, draw(4), features=FEATURES)
    optimizer = made[0] if made else SparseOptimizer(model)
    train(model, optimizer, loader)
    assert (model.users.shared.n_ahead, model.users.shared.n_pulled) == (8, 0)


def test_rows_are_as_old_as_capacity_says() -> None:
    """A batch may lack the pushes of the `capacity` batches before it, and no others."""
    cluster = MemoryCluster()
    model = Embedding(cluster.table("one", 1))
    optimizer = SparseOptimizer(model)
    ids = torch.tensor([3])
    start = float(cluster.tables["one"].pull(ids.numpy())[0, 0])
    seen = []
    for batch in prepare(model, [ids] * 12, features={"": lambda batch: batch}, threads_num=1, capacity=3):
        rows = model(batch)
        seen.append(round((start - rows.item()) / 0.5))  # steps of sgd(0.5) that are in it
        rows.sum().backward()
        optimizer.step()
    assert all(max(0, i - 3) <= n <= i for i, n in enumerate(seen)), seen


def test_as_many_threads_pull_as_was_said() -> None:
    model = Model(MemoryCluster())
    names = set()
    for _ in prepare(model, draw(6), features=FEATURES, threads_num=5, capacity=6):
        names |= set(ours())
    assert len(names) == 5


@pytest.mark.parametrize(("mode", "better"), [("async", "bounded"), ("sync", "exact")])
def test_a_default_by_which_rows_are_old_is_said_once(
    mode: str, better: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches_ahead, "_told_stale", [])
    model = Model(MemoryCluster(mode))
    prepare(model, draw(1), features=FEATURES, consistency="stale")
    assert not caplog.messages
    for _ in range(2):
        prepare(model, draw(1), features=FEATURES)
    (said,) = caplog.messages
    assert f'consistency is "stale" unless given: rows may lack the pushes of batches that were read ahead. "{better}"' in said


def test_a_pool_of_the_callers_own_runs_the_pulls_and_stays_open() -> None:
    model = Model(MemoryCluster())
    with ThreadPoolExecutor(1, thread_name_prefix="the-callers") as pool:
        loader = prepare(model, draw(6), features=FEATURES, executor=pool)
        train(model, SparseOptimizer(model), loader)
        assert model.users.shared.n_ahead == 12
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("the-callers")]
        assert pool.submit(len, "open").result() == 4


def test_batches_in_evaluation_are_looked_up_ahead_without_being_recorded() -> None:
    cluster = MemoryCluster()
    model = Model(cluster).eval()
    optimizer = SparseOptimizer(model)
    with torch.no_grad():
        for batch in prepare(model, draw(4), features=FEATURES):
            assert not model(batch).requires_grad
    optimizer.step()
    assert (model.users.shared.n_ahead, model.users.shared.n_pulled, cluster.pushes) == (8, 0, [])


@pytest.mark.parametrize(
    "features",
    [
        {"users": ["user"], "items": lambda batch: batch["items"]},
        {"users": ("user",), "items": lambda batch: (batch["items"].reshape(-1), torch.arange(8) * 3)},
    ],
)
def test_parts_of_a_batch_are_named_in_several_ways(features: dict[str, Any]) -> None:
    model = Model(MemoryCluster())
    train(model, SparseOptimizer(model), prepare(model, draw(3), features=features))
    assert model.users.shared.n_ahead + model.users.shared.n_pulled == 6
    assert model.users.shared.n_ahead >= 3


def test_a_module_that_is_to_be_left_alone_is_pulled_when_it_is_called() -> None:
    model = Model(MemoryCluster())
    train(model, SparseOptimizer(model), prepare(model, draw(3), features={"users": "user", "items": None}))
    assert (model.users.shared.n_ahead, model.users.shared.n_pulled) == (3, 3)


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ({"users": "user"}, "'items'"),
        ({**FEATURES, "clicks": "user"}, "'clicks'"),
        ({**FEATURES, "users": 1.5}, "users"),
        ({**FEATURES, "users": []}, "users"),
    ],
)
def test_features_that_do_not_fit_the_model_are_refused(features: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        prepare(Model(MemoryCluster()), draw(2), features=features)


def test_a_part_that_a_batch_does_not_have_is_an_error_at_that_batch() -> None:
    model = Model(MemoryCluster())
    batches = draw(4)
    del batches[2]["user"]
    run = iter(prepare(model, batches, features=FEATURES))
    assert next(run) is batches[0]
    assert next(run) is batches[1]
    with pytest.raises(InvalidInputError, match="mapping with 'items' and has no part 'user'"):
        next(run)
    assert ours() == []


def test_a_batch_that_the_loop_changes_is_not_served_what_it_was() -> None:
    cluster = MemoryCluster()
    model = Embedding(cluster.table("one", 2))
    for batch in prepare(model, [torch.tensor([1, 2]), torch.tensor([3, 4])], features={"": lambda batch: batch}):
        batch += 10
        assert np.array_equal(model(batch).detach().numpy(), cluster.tables["one"].pull(batch.numpy()))


def test_an_error_of_a_pull_comes_up_at_its_batch() -> None:
    class Failing(MemoryCluster):
        def pull_versions(self, ids: Any, *, stored: bool = True) -> Any:
            if self.n_pulls == 3:
                raise OSError("storage")
            return super().pull_versions(ids)

    model, batches = Model(Failing()), draw(6)
    run = iter(prepare(model, batches, features=FEATURES, threads_num=1, capacity=2))
    assert all(next(run) is batch for batch in batches[:3])
    with pytest.raises(OSError, match="storage"):
        next(run)
    assert ours() == []


def test_leaving_early_leaves_nothing_behind_and_the_next_epoch_is_whole() -> None:
    model = Model(MemoryCluster())
    batches = draw(7)
    loader = prepare(model, batches, features=FEATURES)
    for i, _ in enumerate(loader):
        if i == 2:
            break
    assert ours() == []
    assert model.users.shared.lookahead is None
    assert [batch is known for batch, known in zip(loader, batches, strict=True)] == [True] * 7
    assert len(loader) == 7


def test_staleness_of_what_was_pushed_is_told() -> None:
    class Told:
        changed_fraction, batches_elapsed = 0.5, 3

    model = Model(MemoryCluster())
    loader = prepare(model, draw(3), features=FEATURES)
    assert loader.staleness is None
    for _ in loader:
        ack: Any = type("Ack", (), {"staleness": Told})()
        model.users.shared.lookahead.pushed(ack)  # type: ignore[union-attr]
    assert loader.staleness is Told
    assert (loader.mean_staleness.changed_fraction, loader.mean_staleness.most_elapsed, loader.mean_staleness.n) == (0.5, 3, 3)
    assert "50.00%" in loader.report


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"no kvemb\.torch"):
        prepare(nn.Linear(2, 1), [], features={})


@pytest.mark.parametrize("model", [[torch.tensor([1])], nn.Linear], ids=["loader", "class"])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(InvalidInputError, match=r"the model must be a torch.nn.Module, got (list|<class)"):
        prepare(model, [])  # type: ignore[arg-type]
