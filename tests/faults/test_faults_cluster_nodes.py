"""Nodes of a Redis Cluster and of a Valkey Cluster come, go and die while trainers of the ledger push: nothing lost, nothing doubled."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from chaos.storage import snapshot
from jobs import PATIENCE_S
from matrix import one_of
from training import Training

from kvemb.config import load
from kvemb.local_cluster import storage_servers
from kvemb.net.deadline import Deadline
from kvemb.schema.slot_dealing import SlotPlan
from kvemb.stores.redis_cluster.node_change import NodeChange
from kvemb.stores.redis_cluster.scaling.node_scaling import NodeScaling
from kvemb.stores.redis_cluster.scaling.scaling_plans import ScalingPlanner

Plan = Callable[[ScalingPlanner], SlotPlan[NodeChange]]


class Stopped(BaseException):
    """The command was stopped."""


@pytest.fixture(scope="module", params=one_of("redis", "valkey"))
def ledger(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[Training]:
    program = require_server("redis-server") if request.param == "redis" else storage_servers.find_server("valkey")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_servers, "find_server", lambda kind: program)
        cluster = FaultyCluster("redis-cluster", 3, shards=2, storage={"timeout_s": 2})
        with cluster, LedgerRun(cluster, n_trainers=2, seed=4, grace_s=25) as run:
            yield Training(run, Path())


def scaling(ledger: Training) -> NodeScaling:
    return NodeScaling(load(ledger.cluster.config_path, os.environ).storage, max_mb_per_s=20)


def change(ledger: Training, plan: Plan, *, stop_after: int | None = None) -> list[str]:
    """Carry a change out; or stop it after so many groups of slots, and have another command resume it."""
    told = 0

    def progress(*_: object) -> None:
        nonlocal told
        told += 1
        if told == stop_after:
            raise Stopped

    with scaling(ledger) as nodes:
        try:
            return nodes.carry_out(plan(nodes.plans), progress)
        except Stopped:
            pass
    ledger.goes_on()
    with scaling(ledger) as nodes:
        return nodes.resume()


@pytest.mark.timeout(600)
def test_nodes_join_leave_and_are_replaced_when_dead_and_every_acknowledged_push_counts_once(ledger: Training) -> None:
    cluster = ledger.cluster
    first, second, third = cluster.named
    ledger.goes_on()
    fourth, fifth = (cluster.add_node() for _ in range(2))
    assert change(ledger, lambda plans: plans.add(fourth), stop_after=20) == []
    ledger.goes_on()
    assert change(ledger, lambda plans: plans.remove(first)) == []
    cluster.drop_node(first)
    ledger.goes_on()

    processes.kill(cluster.servers[cluster.node_at(second)].process)
    deadline = Deadline.after(PATIENCE_S)
    with scaling(ledger) as nodes:
        while not any(node.failed for node in nodes.plans.view().primaries):
            assert not deadline.expired, "the cluster does not call its dead node failed"
            time.sleep(0.2)
    (told,) = change(ledger, lambda plans: plans.replace(second, fifth))
    assert "shards are bringing the rows" in told
    ledger.goes_on()
    with scaling(ledger) as nodes:
        view = nodes.plans.view()
        assert {node.address for node in view.primaries} == {third, fourth, fifth}
        assert nodes.plans.under_way() is None
        assert view.open_slots == ()
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
