"""What each consistency promises, on real clusters: exact is bit for bit training without prefetch; bounded never exceeds k."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster
from torch import Tensor, nn

import kvemb
from kvemb.errors import InvalidInputError
from tests.warm_clusters import warm_url
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer, prepare

pytestmark = pytest.mark.timeout(240)
N_STEPS, N_IDS, BATCH = 24, 60, 16


class Model(nn.Module):
    """Two tables, one asked twice; few ids, so that every batch shares rows with the ones before it."""

    def __init__(self, cluster: Any, suffix: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.users = Embedding(table(cluster, f"user{suffix}"))
        self.items = EmbeddingBag(table(cluster, f"item{suffix}"), mode="sum")
        self.last = Embedding(table(cluster, f"item{suffix}"))
        self.dense = nn.Linear(8, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        items = self.items(batch["items"]) + self.last(batch["items"][:, -1])
        return self.dense(torch.cat([self.users(batch["user"]), items], dim=1)).squeeze(1)


def table(cluster: Any, name: str) -> Any:
    """The same rows under any name: half of the ids assigned, the others new."""
    existed = name in cluster.tables()
    made = cluster.create_table(name, dim=4, optimizer=kvemb.optim.adam(0.05), initializer=kvemb.init.zeros(), exist_ok=True)
    if not existed:
        made.assign(np.arange(N_IDS // 2), np.random.default_rng(5).normal(size=(N_IDS // 2, 4)).astype(np.float32))
    return made


def draw(seed: int, n: int = N_STEPS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, N_IDS, shape, generator=generator)

    return [{"user": ids(BATCH), "items": ids(BATCH, 3), "label": torch.rand(BATCH, generator=generator)} for _ in range(n)]


def train(model: Model, seed: int, wrap: Callable[[nn.Module, Any], Any], micro: int = 1) -> list[float]:
    optimizer, dense = SparseOptimizer(model), torch.optim.Adam([*model.dense.parameters()], 0.01)
    losses = []
    for i, batch in enumerate(wrap(model, draw(seed))):
        loss = (model(batch) - batch["label"]).square().mean() / micro
        loss.backward()
        losses.append(loss.item())
        if (i + 1) % micro == 0:
            optimizer.step()
            dense.step()
            dense.zero_grad()
    return losses


def plain(model: nn.Module, batches: Any) -> Any:
    return batches


@pytest.fixture(scope="module")
def sync_url(require_server: Callable[[str], str]) -> Iterator[str]:
    require_server("redis-server")
    with warm_url(store="redis", nodes=2, shards=2, mode="sync", trainers=1) as url:
        yield url


@pytest.mark.parametrize("capacity", [1, 4])
@pytest.mark.parametrize("micro", [1, 3])
def test_exact_has_the_losses_of_training_without_prefetch_bit_for_bit(sync_url: str, capacity: int, micro: int) -> None:
    loaders = []

    def exact(model: nn.Module, batches: Any) -> Any:
        loaders.append(prepare(model, batches, consistency="exact", threads_num=2, capacity=capacity))
        return loaders[0]

    with kvemb.connect(sync_url, trainer="one") as cluster:
        name = f".{capacity}.{micro}"
        expected = train(Model(cluster, f"{name}.plain"), 0, plain, micro)
        assert train(Model(cluster, f"{name}.exact"), 0, exact, micro) == expected
    assert expected[-1] < expected[0]
    report = loaders[0].report
    assert "were pulled again" in report
    if (capacity, micro) != (1, 3):  # one batch ahead of three: the others are pulled between the steps
        assert f"rows of 0 of {N_STEPS - 1} batches" in report, report
    assert "exact: 0.00%" not in report, "something had to be mended"


def test_without_exact_the_losses_are_others(sync_url: str) -> None:
    """So that equal losses mean something."""
    with kvemb.connect(sync_url, trainer="one") as cluster:
        expected = train(Model(cluster, ".fresh"), 0, plain)
        assert train(Model(cluster, ".stale"), 0, lambda model, batches: prepare(model, batches, capacity=4)) != expected


def test_two_trainers_are_exact_together(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with (
        warm_url(store="redis", shards=2, mode="sync", trainers=2) as url,
        kvemb.connect(url, trainer="a") as first,
        kvemb.connect(url, trainer="b") as second,
        ThreadPoolExecutor(2) as executor,
    ):
        for name in ("user.plain", "item.plain", "user.exact", "item.exact"):
            table(first, name)
        models = [[Model(cluster, suffix) for cluster in (first, second)] for suffix in (".plain", ".exact")]

        def run(models: list[Model], wrap: Callable[[nn.Module, Any], Any]) -> list[list[float]]:
            return list(executor.map(lambda seed: train(models[seed], seed, wrap), range(2), timeout=200))

        expected = run(models[0], plain)
        got = run(models[1], lambda model, batches: prepare(model, batches, consistency="exact", capacity=2))
    assert got == expected


def test_steps_of_another_loop_in_between_are_noticed(sync_url: str) -> None:
    with kvemb.connect(sync_url, trainer="one") as cluster:
        model = Embedding(table(cluster, "user.between"))
        optimizer = SparseOptimizer(model)
        ids = torch.tensor([1, 2, 3])
        run = iter(prepare(model, [ids] * 4, consistency="exact", features={"": lambda batch: batch}, capacity=2))
        next(run)
        for batch in prepare(model, [ids] * 3, consistency="exact", features={"": lambda batch: batch}):
            model(batch).sum().backward()
            optimizer.step()
        assert np.array_equal(model(next(run)).detach().numpy(), model.table.pull([1, 2, 3]))
        run.close()  # type: ignore[attr-defined]


def test_a_step_that_fails_makes_rows_be_pulled_again() -> None:
    cluster = MemoryCluster("sync")
    model = Embedding(cluster.table("one", 2))
    optimizer = SparseOptimizer(model)
    ids = torch.tensor([1, 2, 3])
    for i, batch in enumerate(prepare(model, [ids] * 6, consistency="exact", features={"": lambda batch: batch}, capacity=1)):
        rows = model(batch)
        assert np.array_equal(rows.detach().numpy(), cluster.tables["one"].pull(ids.numpy())), i
        rows.sum().backward()
        cluster.failure = OSError("storage") if i == 2 else None
        if i == 2:
            with pytest.raises(OSError, match="storage"):
                optimizer.step()
            # In doubt: it was applied all the same.
            cluster.tables["one"].apply(ids.numpy(), np.ones((3, 2), np.float32), {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0})
            optimizer.zero_grad()
        else:
            optimizer.step()


def test_bounded_never_lacks_more_than_k_batches(require_server: Callable[[str], str]) -> None:
    """A second trainer pushes all the while; versions say what the rows lacked when their batch came."""
    require_server("redis-server")
    k = 2
    with (
        warm_url(store="redis", shards=1) as url,
        kvemb.connect(url, trainer="slow") as cluster,
        kvemb.connect(url, trainer="busy") as other,
    ):
        words = cluster.create_table("word", dim=2, optimizer=kvemb.optim.sgd(0.1))
        ids = np.arange(50)
        same = other.table("word")
        ack = same.push(ids, np.ones((50, 2), np.float32))
        ack.wait_applied()
        model = Embedding(words)
        seen: list[int] = []

        def versions_used() -> Any:
            (ahead,) = model.shared._installed["word"]
            return ahead.found.versions

        loader = prepare(
            model, [torch.from_numpy(ids)] * 30, consistency="bounded", k=k, features={"": lambda b: b}, threads_num=1, capacity=4
        )
        for i, _ in enumerate(loader):
            current = cluster.progress()[0][1]  # no push is under way at this moment
            seen.append(current - int(versions_used().min() & np.uint64((1 << 48) - 1)))
            for _ in range(i % 3):
                same.push(ids, np.ones((50, 2), np.float32)).wait_applied()
    assert all(0 <= lack <= k for lack in seen), seen
    assert max(seen) > 0, "some were used although rows had changed"
    assert "pulled again" in loader.report
    assert ": the rows of 0 of" not in loader.report


def test_an_interrupt_while_the_shards_are_asked_does_not_wait_for_pulls() -> None:
    cluster: Any = MemoryCluster()
    model, gate, asked = Embedding(cluster.table("one", 2)), threading.Event(), threading.Event()

    def progress() -> list[tuple[int, int]]:
        if threading.current_thread() is threading.main_thread():
            assert asked.wait(90)
            raise KeyboardInterrupt
        if cluster.calls:
            asked.set()
            gate.wait(90)
        cluster.calls.append("progress")
        return [(1, 1)]

    cluster.progress, cluster.calls = progress, []
    loader = prepare(model, few_ids(8), consistency="bounded", k=1, features={"": lambda batch: batch}, threads_num=1, capacity=4)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert time.monotonic() - began_s < 80
    gate.set()


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("sync", {"consistency": "fresh"}, "stale, bounded, exact"),
        ("async", {"consistency": "exact"}, "sync mode"),
        ("sync", {"consistency": "exact", "k": 1}, "k goes with 'bounded'"),
        ("async", {"consistency": "bounded"}, "k goes with 'bounded'"),
        ("async", {"k": 3}, "k goes with 'bounded'"),
        ("async", {"consistency": "bounded", "k": -1}, "0 or more"),
        ("async", {"consistency": "bounded", "k": True}, "0 or more"),
    ],
)
def test_modes_that_cannot_be_kept_are_refused(mode: str, options: dict[str, Any], said: str) -> None:
    model = Embedding(MemoryCluster(mode).table("one", 2))
    with pytest.raises(InvalidInputError, match=said):
        prepare(model, [], **options)


class Product(nn.Module):
    """Two tables whose rows meet: what one of them lacks shows in the other's gradients."""

    def __init__(self, cluster: Any) -> None:
        super().__init__()
        self.one, self.two = Embedding(cluster.table("one", 2)), Embedding(cluster.table("two", 2))

    def forward(self, ids: Tensor) -> Tensor:
        return 0.002 * ((self.one(ids) * self.two(ids)).sum() - 1).square()


def few_ids(n: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 8, (6,), generator=generator) for _ in range(n)]


def exactly(model: nn.Module, batches: Any) -> Any:
    features = {path: lambda batch: batch for path, module in model.named_modules() if isinstance(module, Embedding)}
    return prepare(model, batches, consistency="exact", features=features, threads_num=1, capacity=3)


@pytest.mark.parametrize("optimizers", ["of parts", "of more"])
def test_exact_with_optimizers_of_other_modules_than_the_prepared_made_before(optimizers: str) -> None:
    def losses(wrap: Callable[[nn.Module, Any], Any]) -> list[float]:
        cluster = MemoryCluster("sync")
        model = Product(cluster)
        more = nn.ModuleList([model, Embedding(cluster.table("three", 2))])
        steps = [SparseOptimizer(part) for part in ([model.one, model.two] if optimizers == "of parts" else [more])]
        seen = []
        for ids in wrap(model, few_ids()):
            loss = model(ids)
            loss.backward()
            for one in steps:
                one.step()
            seen.append(loss.item())
        return seen

    assert losses(exactly) == losses(plain)


@pytest.mark.parametrize("when", ["behind_the_step", "before_the_forward_pass"])
@pytest.mark.parametrize("change", ["assign", "push", "erase", "another_model"])
def test_exact_sees_what_the_same_connection_does_to_rows_beside_the_steps(sync_url: str, change: str, when: str) -> None:
    with kvemb.connect(sync_url, trainer="one") as cluster:

        def disturb(table: Any, other: SparseOptimizer, module: nn.Module, i: int) -> None:
            ids = np.arange(8)
            if change == "assign":
                table.assign(ids, np.full((8, 4), i, np.float32))
            elif change == "push":
                table.push(ids, np.ones((8, 4), np.float32)).wait_applied()
            elif change == "erase":
                table.erase(ids)
            else:
                module(torch.from_numpy(ids)).square().sum().backward()
                other.step()

        def losses(wrap: Callable[[nn.Module, Any], Any], name: str) -> list[float]:
            words = table(cluster, f"{change}.{when}.{name}")
            model, module = Embedding(words), Embedding(words)
            optimizer, other = SparseOptimizer(model), SparseOptimizer(module)
            seen = []
            for i, ids in enumerate(wrap(model, few_ids(8))):
                if i % 2 and when == "before_the_forward_pass":
                    disturb(words, other, module, i)
                loss = (model(ids).sum() - 1).square()
                loss.backward()
                optimizer.step()
                if i % 2 and when == "behind_the_step":
                    disturb(words, other, module, i)
                seen.append(loss.item())
            return seen

        assert losses(exactly, "exact") == losses(plain, "plain")


def test_exact_needs_one_optimizer_for_all_tables() -> None:
    cluster = MemoryCluster("sync")
    model = nn.ModuleList([Embedding(cluster.table("one", 2)), Embedding(cluster.table("two", 2))])
    loader = prepare(model, [torch.tensor([1])], consistency="exact", features={"0": lambda b: b, "1": lambda b: b})
    SparseOptimizer(model[0])
    with pytest.raises(InvalidInputError, match="one SparseOptimizer"):
        next(iter(loader))
