"""A shard that starts waits for storage at every step, not only until it has joined: a node that hangs meanwhile ends no start."""

import importlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from matrix import one_of

from kvemb.config import load
from kvemb.errors import DeadlineExceededError, FencedError, NodeUnavailableError
from kvemb.testing.real_servers import ServerNodes
from paramserver.lifecycle.shard import Shard
from paramserver.lifecycle.start import start

PATIENCE_S = 90.0
KINDS = {"redis": "redis-server", "memcached": "memcached"}
STEPS = {
    "the registry of tables is read": "paramserver.model.table_registry.Registry.load",
    "a table of kvemb.yaml is created": "paramserver.model.table_registry.Registry.create",
    "the last owner is asked for": "paramserver.recovery.claim_shard._owner",
    "this process says that it is the owner": "paramserver.recovery.claim_shard._take",
}


@pytest.fixture
def nodes(request: pytest.FixtureRequest, require_server: Callable[[str], str], tmp_path: Path) -> Any:
    kind = request.param
    require_server(KINDS[kind])
    (tmp_path / "nodes").mkdir()
    made = ServerNodes(kind, 2, tmp_path / "nodes", 64)
    yield made
    made.reset()
    made.close()


def started(nodes: ServerNodes, folder: Path, wait: Callable[[float], None], start_timeout_s: float = PATIENCE_S) -> Shard:
    tree = {
        "cluster": "demo",
        "storage": {"kind": nodes.config.kind, "nodes": list(nodes.config.nodes), "timeout_s": 1.0},
        "parameter_servers": {"shards": ["127.0.0.1:1"], "data_dir": str(folder / "shards")},
        "tables": {"t": {"dim": 2, "optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}},
    }
    path = folder / "kvemb.yaml"
    path.write_text(yaml.safe_dump(tree))
    return start(load(path, {}), 0, listen="127.0.0.1:0", start_timeout_s=start_timeout_s, wait=wait)


def before(monkeypatch: pytest.MonkeyPatch, step: str, then: Callable[[], None]) -> None:
    """Have something happen before a step of the start is taken for the first time."""
    where, _, name = step.rpartition(".")
    try:
        owner: Any = importlib.import_module(where)
    except ModuleNotFoundError:
        module, _, cls = where.rpartition(".")
        owner = getattr(importlib.import_module(module), cls)
    original, called = getattr(owner, name), []

    def patched(*args: Any, **kwargs: Any) -> Any:
        if not called:
            called.append(True)
            then()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, patched)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("nodes", one_of("memcached", "redis"), indirect=True)
def test_a_node_that_hangs_is_waited_for_at_every_step_of_a_start(
    nodes: ServerNodes, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before(monkeypatch, step, lambda: nodes.pause(1))

    def wait(pause_s: float) -> None:
        nodes.resume(1)
        time.sleep(pause_s)

    with caplog.at_level(logging.INFO, "paramserver"):
        shard = started(nodes, tmp_path, wait)
    epoch = shard._parts.engine.epoch
    assert shard.stop(PATIENCE_S) == ""
    assert epoch == 1  # the tries together are one start
    assert "waiting for storage" in caplog.text


@pytest.mark.parametrize("nodes", ["memcached"], indirect=True)
def test_a_node_that_hangs_for_good_ends_a_start_when_its_time_is_up(
    nodes: ServerNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, STEPS["the last owner is asked for"], lambda: nodes.pause(1))
    waited: list[float] = []
    with pytest.raises((NodeUnavailableError, DeadlineExceededError)):
        started(nodes, tmp_path, lambda pause_s: (waited.append(pause_s), time.sleep(pause_s))[0], start_timeout_s=8.0)
    assert waited


@pytest.mark.parametrize("nodes", ["memcached"], indirect=True)
def test_who_waits_to_say_that_a_shard_is_his_does_not_say_it_once_another_one_has_it(
    nodes: ServerNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, STEPS["this process says that it is the owner"], lambda: nodes.pause(1))

    def taken_over(pause_s: float) -> None:
        (epoch,) = (tmp_path / "shards").rglob("epoch")
        epoch.write_text("2\n")
        nodes.resume(1)

    with pytest.raises(FencedError, match="a process with epoch 2 has taken the shard over"):
        started(nodes, tmp_path, taken_over)
