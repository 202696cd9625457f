"""What `helm upgrade` with another `shards.replicas` runs, against a real cluster of processes under the names of pods."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvemb
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from tests.chart.rendered import container, kvemb_yaml, named, pod_template, resources

IDS = np.arange(3000)
PATIENCE_S = 200.0


class Upgrades:
    """The hooks of upgrades; `kvemb` in their pods is the real one, which reads the names of pods as the addresses of local shards.

    Args:
        folder: for the program and what the pods mount.
        config: of the local cluster.
        addresses: of the shards, by number.
    """

    def __init__(self, folder: Path, config: Path, addresses: list[str]) -> None:
        self.folder, self.file, self.calls = folder, folder / "kvemb.yaml", folder / "calls"
        pods = kvemb_yaml(resources("memcached", f"shards.replicas={len(addresses)}"))["parameter_servers"]["shards"]
        here = [f"s#{pod}#{address}#g" for pod, address in zip(pods, addresses, strict=True)]
        there = [f"s#{address}#{pod}#g" for pod, address in zip(pods, addresses, strict=True)]
        real = f"{sys.executable} -P -m kvemb.cli"
        (folder / "kvemb").write_text(
            f'#!/bin/sh\necho "$@" >>{self.calls}\n'
            f'words=$(echo "$@" | sed "{";".join([*here, f"s#{self.file}#{config}#"])}")\n'
            f'{real} $words >{folder}/said; code=$?\nsed "{";".join(there)}" {folder}/said; exit $code\n'
        )
        (folder / "kvemb").chmod(0o755)

    def run(self, hook: str, before: int, after: int) -> tuple[int, list[str]]:
        """Run a hook of an upgrade from so many replicas to others; return its exit code and what it asked of kvemb."""
        mounted = before if hook == "shrink" else after  # Kubernetes has the file of the release that is there
        self.file.write_text(yaml.safe_dump(kvemb_yaml(resources("memcached", f"shards.replicas={mounted}"))))
        self.calls.write_text("")
        job = named(resources("memcached", f"shards.replicas={after}"), "Job", f"prod-kvemb-{hook}")
        command = [word.replace("/etc/kvemb/kvemb.yaml", str(self.file)) for word in container(pod_template(job))["command"]]
        env = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        verbs = [" ".join(call.split()[:2]) for call in self.calls.read_text().splitlines()]
        return done.returncode, verbs


def numbers(cluster: kvemb.Cluster) -> tuple[int, ...]:
    return cluster.shards.state().map.shard_numbers


def test_helm_waits_for_shards_to_leave_before_their_pods_go_and_for_pods_before_they_join() -> None:
    found = resources("memcached")
    for hook, when in (("shrink", "pre-upgrade,pre-rollback"), ("grow", "post-upgrade,post-rollback")):
        job = named(found, "Job", f"prod-kvemb-{hook}")
        assert job["metadata"]["annotations"]["helm.sh/hook"] == when
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.timeout(400)
def test_an_upgrade_with_other_replicas_lets_shards_join_and_leave_and_rows_stay(
    tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))
        table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
        rows, address = table.pull(IDS), f"127.0.0.1:{free_ports(1)[0]}"
        upgrades = Upgrades(tmp_path, local.config_path, [*cluster.config.servers.shards, address])

        code, verbs = upgrades.run("grow", 2, 3)  # before the pod is there: the Job is tried again
        assert (code != 0, verbs, numbers(cluster)) == (True, ["config show", "shards add"], (0, 1))
        local.start_shard(2, "--listen", address)
        assert upgrades.run("grow", 2, 3) == (0, ["config show", "shards add"])
        assert numbers(cluster) == (0, 1, 2)
        assert upgrades.run("grow", 3, 3) == (0, ["config show"])
        assert upgrades.run("shrink", 3, 3) == (0, ["config show"])
        assert numbers(cluster) == (0, 1, 2)
        np.testing.assert_array_equal(table.pull(IDS), rows)

        assert upgrades.run("shrink", 3, 2) == (0, ["config show", "shards remove"])
        assert numbers(cluster) == (0, 1)
        local.shards[2].stop(PATIENCE_S)
        np.testing.assert_array_equal(table.pull(IDS), rows)
        table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
        assert upgrades.run("shrink", 3, 2) == (0, ["config show"])  # of an upgrade that is made once more
        assert upgrades.run("grow", 3, 2) == (0, ["config show"])


def test_where_no_shard_answers_an_upgrade_that_takes_none_away_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    upgrades = Upgrades(tmp_path, tmp_path / "none.yaml", [f"127.0.0.1:{n}" for n in range(3)])
    for before, after in ((2, 2), (2, 3)):
        assert upgrades.run("shrink", before, after) == (0, ["config show"])
    code, verbs = upgrades.run("shrink", 3, 2)
    assert code != 0
    assert verbs == ["config show"]
