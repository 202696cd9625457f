"""Nodes of a Redis Cluster and of a Valkey Cluster come, go and die while trainers of the ledger push: nothing lost, nothing doubled.

They are changed by stock redis-cli, with the commands that `kvemb nodes` prints.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.cluster_node_moves import name_of, require_failed, slot_map_of, typed
from chaos.run import LedgerRun
from chaos.storage import snapshot
from matrix import one_of
from training import Training

from kvemb.cli import main
from kvemb.local_cluster import storage_servers

pytestmark = pytest.mark.full  # faults at further points of a way; tests/models searches the steps

_CHANGE_S = 600.0
_FEW = 0.02  # the share of nodes that come and go


@pytest.fixture(scope="module", params=one_of("redis", "valkey"))
def ledger(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[Training]:
    require_server("redis-cli")
    program = require_server("redis-server") if request.param == "redis" else storage_servers.find_server("valkey")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_servers, "find_server", lambda kind: program)
        cluster = FaultyCluster("redis-cluster", 3, shards=2, storage={"timeout_s": 2})
        with cluster, LedgerRun(cluster, n_trainers=2, seed=4, grace_s=25) as run:
            yield Training(run, Path())


@pytest.mark.timeout(2000)
def test_nodes_join_leave_and_are_replaced_when_dead_by_redis_cli_and_every_acknowledged_push_counts_once(
    ledger: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, path = ledger.cluster, str(ledger.cluster.config_path)

    def change(*words: str) -> None:
        capsys.readouterr()
        assert main(["nodes", words[0], path, *words[1:]]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        few.extend([name_of(words[-1])] if words[0] != "remove" else [])
        shares = " ".join(f"{name}={_FEW}" for name in few)
        lines = [
            f"{line}{'' if '--cluster-weight' in line else ' --cluster-weight'} {shares}" if " rebalance " in line else line
            for line in lines
        ]
        script = typed(lines, cluster.named[0])
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=_CHANGE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        ledger.goes_on()

    few: list[str] = []  # names of nodes with few slots: redis-cli moves slot after slot, and servers sync their file of nodes for each
    ledger.goes_on()
    fourth, fifth, sixth = (cluster.add_node() for _ in range(3))
    change("add", fourth)
    change("add", fifth)
    del few[0]
    change("remove", fourth)
    cluster.drop_node(fourth)
    assert set(slot_map_of(path).addresses) == {*cluster.named, fifth}

    processes.kill(cluster.servers[cluster.node_at(fifth)].process)
    require_failed(fifth, cluster.named[0])
    few.clear()
    change("replace", fifth, sixth)
    assert set(slot_map_of(path).addresses) == {*cluster.named, sixth}
    check = subprocess.run(["redis-cli", "--cluster", "check", sixth], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    ledger.is_kept()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("comes_back", ["empty", "with what it held before"])
def test_all_nodes_killed_at_once_get_every_row_back(comes_back: str, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    cluster = FaultyCluster("redis-cluster", 3, shards=2, storage={"timeout_s": 2})
    with cluster, LedgerRun(cluster, n_trainers=2, seed=5, grace_s=25) as run:
        ledger = Training(run, Path())
        ledger.goes_on()
        for server in cluster.servers:
            snapshot(server)
        ledger.goes_on()
        cluster.restart_nodes(0, 1, 2, snapshot=comes_back != "empty")
        ledger.goes_on()
        ledger.is_kept()
