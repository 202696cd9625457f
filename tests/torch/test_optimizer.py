"""SparseOptimizer: what is pushed and when."""

import itertools
import math

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster
from torch import nn

from kvemb.client.ack import Staleness
from kvemb.errors import InvalidInputError, PushRejectedError, ShardUnavailableError
from kvemb.optim import OptimizerSpec
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer


class Model(nn.Module):
    """Two tables, one of them used by two modules."""

    def __init__(self, cluster: MemoryCluster, optimizer: OptimizerSpec | None = None) -> None:
        super().__init__()
        self.users = Embedding(cluster.table("user", 4, optimizer))
        self.items = EmbeddingBag(cluster.table("item", 4, optimizer), mode="sum")
        self.same_items = Embedding(cluster.table("item", 4, optimizer))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * (self.items(items) + self.same_items(items[:, 0]))).sum(dim=1)


USERS, ITEMS = torch.tensor([1, 2, 1]), torch.tensor([[5, 6], [7, 5], [6, 6]])


def dense_twin(cluster: MemoryCluster) -> tuple[nn.Embedding, nn.Embedding]:
    """The same initial rows in torch's own modules; ids are their indices."""
    rows = (torch.from_numpy(cluster.tables[name].pull(np.arange(10))) for name in ("user", "item"))
    users, items = (nn.Embedding.from_pretrained(r, freeze=False, sparse=True) for r in rows)
    return users, items


def twin_forward(users: nn.Embedding, items: nn.Embedding) -> torch.Tensor:
    return (users(USERS) * (items(ITEMS).sum(dim=1) + items(ITEMS[:, 0]))).sum(dim=1)


def test_all_tables_travel_in_one_push_and_shared_tables_add_up() -> None:
    cluster = MemoryCluster()
    model = Model(cluster)
    twins = dense_twin(cluster)
    optimizer = SparseOptimizer(model)
    model(USERS, ITEMS).sum().backward()
    optimizer.step()
    twin_forward(*twins).sum().backward()
    (push,) = cluster.pushes
    assert list(push) == ["user", "item"]
    for (ids, grads), twin in zip(push.values(), twins, strict=True):
        expected = twin.weight.grad.coalesce()
        assert ids.tolist() == expected.indices()[0].tolist()
        assert ids.dtype == np.int64
        np.testing.assert_allclose(grads, expected.values().numpy(), rtol=1e-6)


def test_gradients_of_several_backward_passes_accumulate_until_the_step() -> None:
    once, twice = MemoryCluster(), MemoryCluster()
    for cluster, batches in ((once, [slice(0, 3)]), (twice, [slice(0, 2), slice(2, 3)])):
        model = Model(cluster)
        optimizer = SparseOptimizer(model)
        for batch in batches:
            model(USERS[batch], ITEMS[batch]).sum().backward()
        optimizer.step()
    for name in ("user", "item"):
        assert len(twice.pushes) == 1
        assert np.array_equal(once.pushes[0][name][0], twice.pushes[0][name][0])
        np.testing.assert_allclose(once.pushes[0][name][1], twice.pushes[0][name][1], rtol=1e-5)


def test_a_second_backward_through_the_same_graph_adds_up() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    loss = module(torch.tensor([3])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert cluster.pushes[0]["t"][1].tolist() == [[2.0, 2.0]]


class FailsInBackward(torch.autograd.Function):
    """Hands its input on, and fails on the way back."""

    @staticmethod
    def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("half way")


def test_a_backward_that_fails_half_way_leaves_no_gradient_of_a_row_as_in_torch() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    failing = FailsInBackward.apply(module(torch.tensor([2]))).sum()
    loss = module(torch.tensor([3])).sum()  # made last, so its gradient is there first
    module(torch.tensor([4])).sum().backward()
    with pytest.raises(ArithmeticError):
        (failing + loss).backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    ((ids, grads),) = cluster.pushes[0].values()
    assert dict(zip(ids.tolist(), grads.tolist(), strict=True)) == {3: [1.0, 1.0], 4: [1.0, 1.0]}


def test_ids_that_change_in_place_after_the_lookup_change_nothing() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    for ids in (torch.tensor([3, 5, 9]), torch.tensor([9, 3, 3]), torch.arange(5000)):
        expected, loss = ids.unique().tolist(), module(ids).sum()
        ids += 1
        loss.backward()
        optimizer.step()
        assert sorted(cluster.pushes[-1]["t"][0].tolist()) == expected


def test_zero_grad_between_forward_and_backward_loses_nothing() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    loss = module(torch.tensor([3])).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert cluster.pushes[0]["t"][0].tolist() == [3]


def test_zero_grad_drops_gradients_that_were_not_pushed() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    module(torch.tensor([3])).sum().backward()
    optimizer.zero_grad()
    module(torch.tensor([4])).sum().backward()
    optimizer.step()
    assert [push["t"][0].tolist() for push in cluster.pushes] == [[4]]


def test_zero_grad_can_keep_rows_with_a_gradient_of_zero() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    module(torch.tensor([3])).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert cluster.pushes[0]["t"][1].tolist() == [[0.0, 0.0]]


def test_a_step_uses_the_gradients_up() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    module(torch.tensor([3])).sum().backward()
    optimizer.step()
    optimizer.step()
    assert len(cluster.pushes) == 1


def test_padding_is_never_pushed() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2), padding_idx=0)
    optimizer = SparseOptimizer(module)
    module(torch.tensor([[0, 3], [4, 0]])).sum().backward()
    optimizer.step()
    assert cluster.pushes[0]["t"][0].tolist() == [3, 4]


def test_ids_of_an_unsigned_table_are_pushed_unsigned() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2, id_dtype="uint64"))
    optimizer = SparseOptimizer(module)
    module(torch.from_numpy(np.array([2**64 - 2, 7], np.uint64))).sum().backward()
    optimizer.step()
    ids = cluster.pushes[0]["t"][0]
    assert (ids.dtype, ids.tolist()) == (np.uint64, [7, 2**64 - 2])


def test_the_push_carries_the_oldest_versions_that_were_seen() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    first = module(torch.tensor([3, 4])).sum()
    cluster.tables["t"].apply(np.array([3]), np.ones((1, 2), np.float32), {})
    second = module(torch.tensor([3, 5])).sum()
    (first + second).backward()
    optimizer.step()
    assert cluster.versions[0]["t"].tolist() == [0, 0, 0]
    module(torch.tensor([3, 9])).sum().backward()
    optimizer.step()
    now = cluster.versions[1]["t"]
    assert now[0] > 0
    assert now[1] == 0


def test_a_sync_step_waits_for_its_release_and_takes_part_even_without_gradients() -> None:
    cluster = MemoryCluster("sync")
    optimizer = SparseOptimizer(Model(cluster), timeout_s=7.0)
    optimizer.step()
    assert cluster.pushes == [{}], "no gradient is no step of a table, as in torch"
    assert optimizer.last_ack.waited_s == 7.0


def test_a_gradient_of_no_row_is_a_step_of_its_table() -> None:
    cluster = MemoryCluster("sync")
    module = Embedding(cluster.table("t", 2), padding_idx=3)
    optimizer = SparseOptimizer(module)
    for ids in ([3], []):
        module(torch.tensor(ids, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert [len(push["t"][0]) for push in cluster.pushes] == [0, 0]
    module(torch.tensor([4])).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).zero_grad()
    optimizer.step()
    assert cluster.pushes[2] == {}, "its gradient was dropped"


def test_an_async_step_does_not_wait_and_without_gradients_pushes_nothing() -> None:
    cluster = MemoryCluster("async")
    model = Model(cluster)
    optimizer = SparseOptimizer(model)
    optimizer.step()
    assert optimizer.last_ack is None
    assert optimizer.staleness is None
    model.users(USERS).sum().backward()
    optimizer.step()
    assert [list(push) for push in cluster.pushes] == [["user"]]
    assert optimizer.last_ack.waited_s is None
    assert optimizer.staleness == Staleness(0.0, 0)


@pytest.mark.parametrize("max_unapplied", [0, 1, 3])
def test_an_async_step_waits_until_no_more_pushes_are_unapplied_than_may_be(max_unapplied: int) -> None:
    cluster = MemoryCluster("async")
    model = Model(cluster)
    optimizer = SparseOptimizer(model, timeout_s=7.0, max_unapplied=max_unapplied)
    acks = []
    for step in range(1, 6):
        model(USERS, ITEMS).sum().backward()
        optimizer.step()
        acks.append(optimizer.last_ack)
        assert [ack.waited_s for ack in acks] == [7.0] * max(0, step - max_unapplied) + [None] * min(step, max_unapplied)
        optimizer.step()  # without gradients there is no push, and nothing to wait for
        assert sum(ack.waited_s is not None for ack in acks) == max(0, step - max_unapplied)


def test_a_push_that_is_late_still_counts_and_one_that_failed_is_told_once() -> None:
    cluster = MemoryCluster("async")
    model = Model(cluster)
    optimizer = SparseOptimizer(model, max_unapplied=1)

    def step() -> None:
        model(USERS, ITEMS).sum().backward()
        optimizer.step()

    step()
    first = optimizer.last_ack
    first.error = ShardUnavailableError("late")
    for _ in range(2):
        with pytest.raises(ShardUnavailableError, match="late"):
            step()
    first.error = PushRejectedError("refused")
    with pytest.raises(PushRejectedError, match="refused"):
        step()
    assert len(cluster.pushes) == 1
    assert model.users.pending.leaves, "what was not handed over is kept"
    optimizer.step()
    assert len(cluster.pushes) == 2
    optimizer.last_ack.error, optimizer.last_ack.failure_seen = PushRejectedError("told by the push before"), True
    step()
    assert len(cluster.pushes) == 3


@pytest.mark.parametrize("max_unapplied", [-1, True, 1.5, None])
def test_a_number_of_pushes_that_is_none_is_refused(max_unapplied: object) -> None:
    with pytest.raises(InvalidInputError, match="max_unapplied"):
        SparseOptimizer(Model(MemoryCluster()), max_unapplied=max_unapplied)


def test_gradients_that_could_not_be_handed_over_are_kept() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    module(torch.tensor([3])).sum().backward()
    cluster.failure = ShardUnavailableError("shard 0 did not answer")
    with pytest.raises(ShardUnavailableError):
        optimizer.step()
    cluster.failure = None
    optimizer.step()
    assert cluster.pushes[0]["t"][0].tolist() == [3]


def test_a_closure_is_evaluated_and_its_loss_returned() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.tensor([3])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(float(cluster.tables["t"]._read(np.array([3], np.uint64))[0].sum()) + 2 * 0.5)
    assert len(cluster.pushes) == 1


def test_a_model_without_tables_or_with_two_clusters_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="Embedding"):
        SparseOptimizer(nn.Linear(2, 2))
    two = nn.ModuleList([Embedding(MemoryCluster().table(name, 2)) for name in "ab"])
    with pytest.raises(InvalidInputError, match="2 clusters"):
        SparseOptimizer(two)


def test_a_newer_optimizer_takes_the_model_over() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    old, new = SparseOptimizer(module), SparseOptimizer(module)
    module(torch.tensor([3])).sum().backward()
    with pytest.raises(InvalidInputError, match="newer"):
        old.step()
    new.step()
    assert len(cluster.pushes) == 1


def test_a_long_accumulation_is_bounded_per_module() -> None:
    cluster = MemoryCluster()
    model = nn.ModuleList([Embedding(cluster.table("t", 2)) for _ in range(2)])
    SparseOptimizer(model)
    for module in itertools.islice(itertools.cycle(model), 2000):
        module(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidInputError, match="2000 lookups"):
        model[0](torch.tensor([1]))


def test_lookups_that_nobody_pushes_are_told_of_once_and_long_before_they_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = Embedding(MemoryCluster().table("t", 2))
    SparseOptimizer(model)
    for _ in range(100):
        model(torch.tensor([1])).sum().backward()
    assert not caplog.messages
    for _ in range(3):
        model(torch.tensor([1])).sum().backward()
    (message,) = caplog.messages
    assert message.startswith("table 't': 100 lookups have a gradient and wait for step() of the optimizer that was given to distribute")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidInputError, match="timeout_s"):
        SparseOptimizer(Embedding(MemoryCluster().table("t", 2)), timeout_s=timeout_s)


def test_rows_are_recomputed_under_checkpointing() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    scale = torch.ones(2, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda s: module(torch.tensor([3])) * s, scale, use_reentrant=False)
    out.sum().backward()
    optimizer.step()
    assert cluster.pushes[0]["t"][1].tolist() == [[1.0, 1.0]]


def test_infinities_of_both_signs_in_one_row_are_refused_without_a_warning() -> None:
    module = Embedding(MemoryCluster().table("one", 2))
    optimizer = SparseOptimizer(module)
    for sign in (1.0, -1.0):
        (module(torch.tensor([3])) * sign * math.inf).sum().backward()
    with pytest.raises(InvalidInputError, match="NaN or Inf"):
        optimizer.step()
