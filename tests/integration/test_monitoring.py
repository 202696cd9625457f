"""Rules and dashboard for Prometheus: checked by promtool, and run by a real Prometheus that scrapes real shards under load."""

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scraped import ports_side_by_side, program, text, until

import kvemb
from kvemb.local_cluster import LocalCluster

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")], ids=["check", "test"])
def test_promtool_finds_the_rules_right_and_each_fires_on_its_condition(words: tuple[str, ...]) -> None:
    done = subprocess.run([program("promtool"), *words], cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_is_tested_and_has_its_entry_in_the_handbook() -> None:
    tested = (MONITORING / "alerts_test.yml").read_text()
    headings = re.findall(r"^### (\w+)", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    for rule in RULES:
        assert tested.count(f"alertname: {rule['alert']}") >= 2
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
    assert headings == [rule["alert"] for rule in RULES]


def test_the_dashboard_is_what_its_program_writes() -> None:
    written = subprocess.run([sys.executable, MONITORING / "dashboard.py"], capture_output=True, text=True, check=True).stdout
    assert written == (MONITORING / "dashboard.json").read_text()


def test_promtool_finds_the_configuration_of_the_composed_prometheus_right_and_it_names_the_composed_shards() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "config", MONITORING / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = {job["job_name"]: job for job in yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]}
    (static,) = jobs["kvemb"]["static_configs"]
    for file in (ROOT / "deploy").glob("kvemb*.yaml"):
        servers = yaml.safe_load(file.read_text())["parameter_servers"]
        hosts = [address.rpartition(":")[0] for address in servers["shards"]]
        assert static["targets"] == [f"{host}:{servers['metrics_port']}" for host in hosts], file
        # Those that may come are looked up by name: one that is not there is no target, so its absence is no alert.
        (grown,) = jobs["kvemb"]["dns_sd_configs"]
        services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        further = [name for name, of in services.items() if of.get("profiles") == ["grow"] and "--shard" in of.get("command", ())]
        assert (grown["names"], grown["port"]) == (further, servers["metrics_port"]), file


# Of Grafana's documentation of its provisioning files: which keys there are, and which of them must be. No Grafana runs here.
SOURCE_KEYS = {"name", "type", "access", "url", "uid", "isDefault", "editable", "orgId", "jsonData", "version"}
PROVIDER_KEYS = {"name", "type", "options", "orgId", "folder", "folderUid", "disableDeletion", "updateIntervalSeconds", "allowUiUpdates"}


def test_grafana_is_given_a_default_source_and_a_provider_whose_folder_compose_fills() -> None:
    files = {path.parent.name: yaml.safe_load(path.read_text()) for path in (MONITORING / "grafana").rglob("*.yml")}
    assert set(files) == {"datasources", "dashboards"}
    assert {file["apiVersion"] for file in files.values()} == {1}
    (source,), (provider,) = files["datasources"]["datasources"], files["dashboards"]["providers"]
    assert {"name", "type", "access", "url"} <= set(source) <= SOURCE_KEYS
    assert {"name", "type", "options"} <= set(provider) <= PROVIDER_KEYS
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert services[host]["ports"][0].endswith(f":{port}")
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./deploy/monitoring/grafana"] == "/etc/grafana/provisioning"
    assert mounts["./deploy/monitoring/dashboard.json"].startswith(provider["options"]["path"] + "/")
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == mounts["./deploy/monitoring/dashboard.json"]


def test_a_panel_has_what_grafana_needs_of_it() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert sorted(set(ids)) == sorted(ids)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]}
    assert len(places) == len(ids)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}


class Prometheus:
    """Debian's Prometheus, scraping every second; rules fire without delay."""

    def __init__(self, folder: Path, shards: list[int], trainer: int) -> None:
        self._folder, self._port = folder, ports_side_by_side(1)
        rules = {"groups": [{"name": "kvemb", "rules": [{key: rule[key] for key in rule if key != "for"} for rule in RULES]}]}
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        jobs = [("kvemb", shards), ("trainers", [trainer])]
        scraped = [{"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]} for name, ports in jobs]
        tree = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": scraped,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(tree))

    def __enter__(self) -> "Prometheus":
        options = [f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/tsdb"]
        with (self._folder / "prometheus.log").open("wb") as log:
            listen = f"--web.listen-address=127.0.0.1:{self._port}"
            self._child = subprocess.Popen([program("prometheus"), *options, listen], stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        self._child.wait(30)

    def ask(self, path: str, **words: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(url, timeout=200) as reply:
            return json.load(reply)["data"]

    def ready(self) -> bool:
        try:
            return bool(self.ask("targets")["activeTargets"]) and all(t["health"] == "up" for t in self.ask("targets")["activeTargets"])
        except OSError:
            return False

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}


@pytest.fixture(scope="module")
def shards_port() -> int:
    program("prometheus")
    return ports_side_by_side(2)


@pytest.fixture(scope="module")
def cluster(shards_port: int) -> Iterator[LocalCluster]:
    with LocalCluster("valkey", 2, shards=2, metrics_port=shards_port) as running:
        yield running


@pytest.mark.timeout(300)
def test_every_panel_has_data_under_load_and_what_is_broken_fires(cluster: LocalCluster, shards_port: int, tmp_path: Path) -> None:
    own = ports_side_by_side(1)
    with kvemb.connect(cluster.url, metrics_port=own) as client:
        table = client.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))

        def train() -> None:
            ids = np.random.default_rng().integers(0, 10_000, 500)
            _, versions = table.pull(ids, return_versions=True)
            table.push(ids, np.ones((500, 4)), versions=versions).wait_applied()

        train()
        client.save(str(tmp_path / "saved"))
        with Prometheus(tmp_path, [shards_port, shards_port + 1], own) as prometheus:
            until(prometheus.ready)
            name = client.config.cluster
            queries = [(title, expr.replace("$cluster", name).replace("$__rate_interval", "10s")) for title, expr in QUERIES]
            end = time.monotonic() + 60
            empty = queries
            while empty:
                assert time.monotonic() < end, empty
                for _ in range(20):
                    train()
                empty = [(title, expr) for title, expr in empty if not with_values(prometheus.ask("query", query=expr)["result"])]
            assert not prometheus.firing() - {"KvembJournalDiskNearlyFull"}  # the disk that the test happens to run on
            cluster.shards[1].kill()
            until(lambda: "KvembShardDown" in prometheus.firing())
            cluster.start_shard(1)
            until(lambda: "KvembShardDown" not in prometheus.firing())
            cluster.servers[0].process.kill()
            until(lambda: {"KvembNodeDown"} <= prometheus.firing())


def with_values(result: list[dict[str, Any]]) -> bool:
    return any(series["value"][1] != "NaN" for series in result)


def test_every_metric_that_a_rule_or_panel_names_is_served(cluster: LocalCluster, shards_port: int) -> None:
    served = set(re.findall(r"^# TYPE (\w+)", text(shards_port), re.MULTILINE)) | {"kvemb_pull_seconds"}
    named = re.findall(r"\bkvemb_\w+", " ".join([rule["expr"] for rule in RULES] + [expr for _, expr in QUERIES]))
    assert {name.removesuffix("_bucket") for name in named} <= served
