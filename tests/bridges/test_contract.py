"""One contract for all bridges: every behaviour in every framework, on real storage. docs/frameworks.md has the table, held to this file.

Where a framework is not installed its column is skipped. Keras' promises are in tests/keras_bridge: its backend is chosen for a process.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import one_of

import kvemb

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
BRIDGES = {"torch": "torch.nn", "tensorflow": "tensorflow", "jax": "jax.numpy"}
"""By name, what must be importable."""
SERVER = {"redis": "redis-server", "redis-cluster": "redis-server", "memcached": "memcached"}
N, DIM = 12, 4


def side(bridge: str) -> Any:
    pytest.importorskip(BRIDGES[bridge])
    return import_module(f"{bridge}_side")


@pytest.fixture(scope="module", params=one_of("redis", "memcached", "redis-cluster"))
def cluster(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    """A sync job of one trainer, two shards."""
    require_server(SERVER[request.param])
    nodes = 3 if request.param == "redis-cluster" else 1
    job = kvemb.local(store=request.param, nodes=nodes, shards=2, mode="sync", trainers=1)
    with job as url, kvemb.connect(url, trainer="contract") as cluster:
        yield cluster


def tables(cluster: kvemb.Cluster, name: str, rule: Any) -> dict[str, Any]:
    made = {}
    for of in ("user", "item"):
        made[of] = cluster.create_table(f"{name}.{of}", dim=DIM, optimizer=rule, initializer=kvemb.init.normal(std=0.5))
    return made


def batches(n: int) -> list[dict[str, Any]]:
    """Every row in each batch, some twice: rules that move rows without a gradient move none then."""
    rng = np.random.default_rng(3)
    every = [[np.concatenate([rng.permutation(N), rng.integers(0, N, 6)]) for _ in range(2)] for _ in range(n)]
    wanted = rng.normal(size=(N, N)).astype(np.float32)
    return [{"user": user, "item": item, "label": wanted[user, item]} for user, item in every]


def losses(of: Any, cluster: kvemb.Cluster, name: str, kind: str, ahead: str | None = None) -> tuple[list[float], list[float]]:
    made = tables(cluster, name, of.RULES[kind])
    rows = {feature: table.pull(range(N)) for feature, table in made.items()}
    data = batches(30)
    return of.on_tables(made, data, ahead), of.on_its_own(rows, data, kind)


def equal_losses(of: Any, cluster: kvemb.Cluster, name: str, kind: str, ahead: str | None = None) -> None:
    got, expected = losses(of, cluster, name, kind, ahead)
    np.testing.assert_allclose(got, expected, rtol=2e-4)
    assert np.mean(got[-5:]) < 0.98 * np.mean(got[:5]), "it learns, so that equal losses mean something"


def learns(of: Any, cluster: kvemb.Cluster, name: str) -> None:
    got, _ = losses(of, cluster, name, "sgd", "stale")
    assert np.isfinite(got).all()
    assert np.mean(got[-5:]) < 0.98 * np.mean(got[:5])


def shares(of: Any, cluster: kvemb.Cluster, name: str) -> None:
    table = tables(cluster, name, of.RULES["sgd"])["user"]
    rows = table.pull(range(N))
    data = batches(20)
    got, expected = of.on_tables({"user": table, "item": table}, data), of.on_its_own({"user": rows, "item": rows}, data, "sgd")
    np.testing.assert_allclose(got, expected, rtol=2e-4)


def pushes_nothing(of: Any, cluster: kvemb.Cluster, name: str) -> None:
    made, before = tables(cluster, name, of.RULES["sgd"]), cluster.changes
    assert np.isfinite(of.evaluated(made, batches(1)[0]))
    assert cluster.changes == before


def brings_rows_back(of: Any, cluster: kvemb.Cluster, name: str, folder: Path) -> None:
    pytest.importorskip("pyarrow")
    made, data = tables(cluster, name, of.RULES["adagrad"]), batches(20)
    of.on_tables(made, data[:10])
    cluster.save(str(folder))
    expected = of.on_tables(made, data[10:])
    cluster.load(str(folder))
    assert of.on_tables(made, data[10:]) == pytest.approx(expected, rel=1e-6)


BEHAVIOURS: dict[str, Callable[[Any, Any, str, Path], None]] = {
    "losses of its own embedding: SGD": lambda of, cluster, name, _: equal_losses(of, cluster, name, "sgd"),
    "losses of its own embedding: Adagrad": lambda of, cluster, name, _: equal_losses(of, cluster, name, "adagrad"),
    "losses of its own embedding: Adam": lambda of, cluster, name, _: equal_losses(of, cluster, name, "adam"),
    "the same with rows pulled ahead, exact": lambda of, cluster, name, _: equal_losses(of, cluster, name, "sgd", "exact"),
    "rows pulled ahead, stale": lambda of, cluster, name, _: learns(of, cluster, name),
    "two features share a table": lambda of, cluster, name, _: shares(of, cluster, name),
    "evaluation pushes nothing": lambda of, cluster, name, _: pushes_nothing(of, cluster, name),
    "save, train on, load, train again: the same losses": brings_rows_back,
}


@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_contract(cluster: kvemb.Cluster, bridge: str, behaviour: str, tmp_path: Path) -> None:
    BEHAVIOURS[behaviour](side(bridge), cluster, f"{bridge}.{list(BEHAVIOURS).index(behaviour)}", tmp_path)


def test_the_page_has_the_contracts_table() -> None:
    head = f"| | {' | '.join(BRIDGES)} |\n|---|{'---|' * len(BRIDGES)}\n"
    table = head + "".join(f"| {behaviour} |{' yes |' * len(BRIDGES)}\n" for behaviour in BEHAVIOURS)
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/frameworks.md is to have:\n{table}"
