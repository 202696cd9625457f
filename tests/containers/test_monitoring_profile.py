"""The profile `monitoring` for real: Prometheus scrapes shards and trainers, and what the dashboard asks has an answer.

Grafana is not started: where these tests run there is no image of it (tests/integration/test_monitoring.py checks its files).
"""

import json
import socket
import urllib.parse
import urllib.request
from typing import Any

import pytest
import yaml
from composed import ROOT, docker
from test_compose import project, require_demo

DASHBOARD = json.loads((ROOT / "deploy/monitoring/dashboard.json").read_text(encoding="utf-8"))
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
RULES = len(yaml.safe_load((ROOT / "deploy/monitoring/alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"])


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, on which the composed Prometheus is published."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = int(probe.getsockname()[1])
    monkeypatch.setenv("KVEMB_PROMETHEUS_PORT", str(free))
    return free


def ask(port: int, path: str, **words: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=30) as reply:
        return json.load(reply)["data"]


def up(port: int) -> set[str]:
    """The ports at which Prometheus scrapes, where that works."""
    return {target["labels"]["instance"] for target in ask(port, "targets")["activeTargets"] if target["health"] == "up"}


def has_value(port: int, expr: str) -> bool:
    answer = ask(port, "query", query=expr.replace("$cluster", "demo").replace("$__rate_interval", "30s"))
    return any(one["value"][1] != "NaN" for one in answer["result"])


# The demo's pushes do not say which versions they were computed from, so nothing is known of their staleness: these do.
WITH_VERSIONS = """
import kvemb, numpy as np
with kvemb.connect("/etc/kvemb/kvemb.yaml") as cluster:
    table = cluster.create_table("versioned", dim=2, optimizer=kvemb.optim.sgd(), exist_ok=True)
    ids = np.arange(100)
    for _ in range(20):
        _, versions = table.pull(ids, return_versions=True)
        table.push(ids, np.ones((100, 2)), versions=versions).wait_applied()
"""


def test_prometheus_scrapes_shards_and_trainers_and_every_panel_has_data_while_the_demo_trains(port: int) -> None:
    with project("kvemb-test-monitoring", ROOT / "deploy/kvemb.yaml", ("monitoring",)) as cluster:
        cluster.up("memcached-0", "memcached-1", "ps-0", "ps-1", "prometheus")
        cluster.wait(lambda: up(port) >= {"ps-0:9470", "ps-1:9470"}, "both shards to be scraped")
        assert sum(len(group["rules"]) for group in ask(port, "rules")["groups"]) == RULES
        cluster.compose("up", "-d", "trainer")
        docker("update", "--cpus", "0.4", cluster.container("trainer"))  # or it may be over before it is found and scraped twice
        cluster.wait(lambda: len(up(port)) == 4, "both trainers to be scraped")
        cluster.kvemb("save", "/checkpoints/one")
        waiting = set(QUERIES)

        def filled() -> bool:
            cluster.compose("exec", "-T", "ps-0", "python", "-c", WITH_VERSIONS)
            waiting.intersection_update(query for query in list(waiting) if not has_value(port, query[1]))
            return not waiting

        try:
            cluster.wait(filled, "data of every panel")
        except TimeoutError as error:
            raise AssertionError(waiting) from error
        require_demo(cluster)
