"""What the contract asks of a framework, written once: each behaviour is a function of that framework's side.

A side has RULES (update rules of tables), REPEATS (whether ids may come twice in a batch), `on_its_own` (losses of the framework's own
embedding), and two models over tables: `Trained` (step, evaluated, ahead, exported; `forget` drops gradients of a step that was not pushed,
where the framework keeps them; `trained_ahead` instead of `ahead` where the framework has the loop) and `TrainedBags` (step). Its `turns`
trains the tower of each batch by Adam, and `turns_alone` the framework's own embeddings, whose rows it returns.
"""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb.client.ack import Ack
from kvemb.errors import ClosedError
from kvemb.local_cluster import LocalCluster

HERE = Path(__file__).resolve().parent
N, DIM = 12, 4
SLOW_START_S = 150.0  # a process that imports a framework on a busy machine


def tables(cluster: Any, name: str, rule: Any, **options: Any) -> dict[str, Any]:
    first = kvemb.init.normal(std=0.5)
    return {of: cluster.create_table(f"{name}.{of}", dim=DIM, optimizer=rule, initializer=first, **options) for of in ("user", "item")}


def batches(n: int, repeats: bool) -> list[dict[str, Any]]:
    """Every row in each batch, some twice: rules that move rows without a gradient move none then."""
    rng = np.random.default_rng(3)
    every = [[np.concatenate([rng.permutation(N), rng.integers(0, N, 6)]) for _ in range(2)] for _ in range(n)]
    wanted = rng.normal(size=(N, N)).astype(np.float32)
    cut = slice(None) if repeats else slice(0, N)
    return [{"user": user[cut], "item": item[cut], "label": wanted[user, item][cut]} for user, item in every]


def halves(rank: int, repeats: bool) -> list[dict[str, Any]]:
    """What each of two trainers has of every batch."""
    return [{name: of[rank::2] for name, of in batch.items()} for batch in batches(10, repeats)]


def pulled(made: dict[str, Any]) -> dict[str, Any]:
    return {feature: table.pull(np.arange(N)) for feature, table in made.items()}


def trained(of: Any, made: dict[str, Any], data: list[Any], **ahead: Any) -> list[float]:
    model = of.Trained(made)
    if ahead and hasattr(model, "trained_ahead"):
        return list(model.trained_ahead(data, **ahead))
    return [model.step(batch) for batch in (model.ahead(data, **ahead) if ahead else data)]


def equal_losses(of: Any, cluster: Any, name: str, kind: str = "sgd", **ahead: Any) -> None:
    made, data = tables(cluster, name, of.RULES[kind]), batches(30, of.REPEATS)
    expected = of.on_its_own(pulled(made), data, kind)
    got = trained(of, made, data, **ahead)
    np.testing.assert_allclose(got, expected, rtol=2e-4)
    learned(got)


def turns(of: Any, cluster: Any, name: str) -> None:
    """A tower that a step does not use counts the step, or does not, as in the framework: Adam's first step there shows it."""
    made, of_turns = tables(cluster, name, of.RULES["adam"]), ["user"] * 12 + ["item"] * 3 + ["user", "item"] * 3
    data = list(zip(of_turns, batches(len(of_turns), of.REPEATS), strict=True))
    expected = of.turns_alone(pulled(made), data)
    of.turns(made, data)
    cluster.flush()
    for tower, rows in pulled(made).items():
        np.testing.assert_allclose(rows, expected[tower], rtol=1e-3, atol=1e-5)


def learned(losses: list[float]) -> None:
    """Equal losses mean something where they fall."""
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.98 * np.mean(losses[:5])


def learns(of: Any, cluster: Any, name: str, **ahead: Any) -> None:
    learned(trained(of, tables(cluster, name, of.RULES["sgd"]), batches(30, of.REPEATS), **ahead))


def shares(of: Any, cluster: Any, name: str) -> None:
    table = tables(cluster, name, of.RULES["sgd"])["user"]
    rows, data = table.pull(np.arange(N)), batches(20, of.REPEATS)
    got, expected = trained(of, {"user": table, "item": table}, data), of.on_its_own({"user": rows, "item": rows}, data, "sgd")
    np.testing.assert_allclose(got, expected, rtol=2e-4)


def bag_batches(empty: bool, weighted: bool) -> list[dict[str, Any]]:
    """Bags of up to three ids above 0, filled up with 0."""
    rng, made = np.random.default_rng(5), []
    for _ in range(12):
        n_ids = rng.integers(0 if empty else 1, 4, 10)
        if empty:
            n_ids[3] = 0
        word = np.where(np.arange(3) < n_ids[:, None], rng.integers(1, N, (10, 3)), 0)
        weight = (rng.uniform(0.2, 2.0, (10, 3)) if weighted else np.ones((10, 3))).astype(np.float32)
        made.append({"word": word, "weight": weight, "label": rng.normal(size=10).astype(np.float32)})
    return made


def bags(of: Any, cluster: Any, name: str, *, empty: bool, weighted: bool) -> Any:
    """Losses and rows are those of the maths: sum of (row * weight), squared error, SGD. Returns the table."""
    table = tables(cluster, name, of.RULES["sgd"])["user"]
    rows, model = table.pull(np.arange(N)).astype(np.float64), of.TrainedBags(table)
    for batch in bag_batches(empty, weighted):
        factor = batch["weight"] * (batch["word"] > 0)
        error = (rows[batch["word"]].sum(2) * factor).sum(1) - batch["label"]
        assert model.step(batch) == pytest.approx(np.mean(error**2), rel=1e-4)
        gradient = np.zeros((N, 1))
        np.add.at(gradient, batch["word"], (2 / len(error) * error[:, None] * factor)[..., None])
        rows -= 0.5 * gradient
    np.testing.assert_allclose(table.pull(np.arange(N)), rows, rtol=1e-3, atol=1e-5)
    return table


def pads_without_a_row(of: Any, cluster: Any, name: str) -> None:
    table = bags(of, cluster, name, empty=True, weighted=False)
    assert table.pull(np.arange(2), return_versions=True)[1].astype(bool).tolist() == [False, True]


def pushes_nothing(of: Any, cluster: Any, name: str) -> None:
    model, before = of.Trained(tables(cluster, name, of.RULES["sgd"])), cluster.changes
    assert np.isfinite(model.evaluated(batches(1, of.REPEATS)[0]))
    assert cluster.changes == before


def brings_rows_back(of: Any, cluster: Any, name: str, folder: Path) -> None:
    pytest.importorskip("pyarrow")
    made, data = tables(cluster, name, of.RULES["adagrad"]), batches(20, of.REPEATS)
    trained(of, made, data[:10])
    cluster.save(str(folder))
    expected = trained(of, made, data[10:])
    cluster.load(str(folder))
    assert trained(of, made, data[10:]) == pytest.approx(expected, rel=1e-6)


def exports(of: Any, cluster: Any, name: str) -> None:
    made, data = tables(cluster, name, of.RULES["sgd"], num_ids=N), batches(5, of.REPEATS)
    model = of.Trained(made)
    for batch in data:
        model.step(batch)
    assert model.exported(made, data[0]) == pytest.approx(model.evaluated(data[0]), rel=1e-5)


def outlives_interrupts(of: Any, cluster: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before a step's push: nothing was pushed, the step is taken again. While its push is waited for: it counts, once."""
    made, data = tables(cluster, name, of.RULES["sgd"]), batches(12, of.REPEATS)
    expected = of.on_its_own(pulled(made), data, "sgd")
    model, got = of.Trained(made), []
    for at, batch in enumerate(data):
        if at == 4:
            _interrupted(monkeypatch, type(cluster), "push", model, batch)
            model.forget()
        if at == 7:
            _interrupted(monkeypatch, Ack, "wait_released", model, batch)
            cluster.flush()
            got.append(expected[at])
        else:
            got.append(model.step(batch))
    np.testing.assert_allclose(got, expected, rtol=2e-4)


def _interrupted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, model: Any, batch: Any) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.step(batch)


def refuses_in_a_fork(of: Any, cluster: Any, name: str) -> None:
    made, (batch, *_) = tables(cluster, name, of.RULES["sgd"]), batches(1, of.REPEATS)
    model = of.Trained(made)
    model.step(batch)
    cluster.flush()
    rows = pulled(made)["user"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the child does without
        child = os.fork()
    if child == 0:
        os._exit(_in_child(lambda: np.array_equal(made["user"].pull(np.arange(N)), rows), lambda: model.step(batch)))
    assert os.waitpid(child, 0)[1] == 0, "the child pulled other rows, or its step was not refused"
    assert np.isfinite(model.step(batch)), "the parent goes on"


def _in_child(same_rows: Callable[[], bool], step: Callable[[], Any]) -> int:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # a hang ends the child
    try:
        if not same_rows():
            return 2
        step()
    except ClosedError:
        return 0
    finally:
        signal.alarm(0)
    return 3


def two_trainers(of: Any, _: Any, name: str) -> None:
    """Each takes half of every batch: the mean of their losses is that of one process with all of it."""
    with (
        LocalCluster("redis", 1, shards=1, mode="sync", trainers=2, durability="os", barrier_timeout_s=SLOW_START_S) as local,
        kvemb.connect(local.url, trainer="first", timeout_s=120) as cluster,
    ):
        made = tables(cluster, name, of.RULES["sgd"], reduce="mean")
        whole = [
            {key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(halves(0, of.REPEATS), halves(1, of.REPEATS), strict=True)
        ]
        expected = of.on_its_own(pulled(made), whole, "sgd")
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path])
        command = [sys.executable, str(HERE / "other_trainer.py"), local.url, of.__name__, name]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as other:
            try:
                model = of.Trained(made)
                first = [model.step(half) for half in halves(0, of.REPEATS)]
                said, _ = other.communicate(timeout=SLOW_START_S)
            except BaseException:
                other.kill()
                raise
    np.testing.assert_allclose((np.array(first) + np.array(json.loads(said))) / 2, expected, rtol=2e-4)
