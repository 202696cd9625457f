"""Storage nodes that come and go while a trainer pushes and another pulls: nothing is lost, and nobody is told to connect again."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import redis
from matrix import one_of
from moving_load import IDS, N_IDS, PATIENCE_S, MovingLoad, further_node

import kvemb
import kvemb.optim
from kvemb.local_cluster import LocalCluster

KINDS = {"redis": "redis-server", "memcached": "memcached"}


@pytest.fixture(params=one_of("memcached", "redis"))
def kind(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> str:
    require_server(KINDS[request.param])
    return str(request.param)


@pytest.mark.parametrize("pages", [False, True])
def test_a_node_joins_and_another_leaves_while_rows_are_pushed_and_pulled(kind: str, pages: bool) -> None:
    with LocalCluster(kind, 2, shards=2, memory_mb=64) as local, further_node(local) as third:
        load = MovingLoad(local, pages=pages)
        phases: list[str] = []
        try:
            nodes = load.cluster.nodes
            plan = nodes.add(third.address)
            assert 0.3 < plan.n_rows / N_IDS < 0.36
            nodes.begin(plan)
            state = nodes.wait(timeout_s=PATIENCE_S, progress=lambda state: phases.append(state.phase))
            assert (np.bincount(state.map.slot_nodes, minlength=3) > 3000).all()
            assert third.address in load.reader.store.addresses or load.reader.table("t").pull(IDS[:100]) is not None
            first = local.servers[0].address
            steps = load.n_steps
            nodes.begin(nodes.remove(first))
            state = nodes.wait(timeout_s=PATIENCE_S)
            assert first not in state.nodes.values()
            assert load.n_steps > steps
            local.servers[0].process.kill()  # nobody needs it any more
        finally:
            load.stop()
        with kvemb.connect(local.url, read_only=True) as late:  # kvemb.yaml still names the two first nodes
            np.testing.assert_array_equal(-late.table("t").pull(IDS)[:, 0], load.counts)


def test_a_table_that_is_dropped_while_its_slots_move_leaves_nothing_on_any_node(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2, memory_mb=64) as local, further_node(local) as third, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))
        table.push(IDS, np.ones((N_IDS, 4), np.float32)).wait_applied(PATIENCE_S)
        nodes = cluster.nodes
        nodes.begin(nodes.add(third.address), max_mb_per_s=0.05)
        with redis.Redis(port=third.port, protocol=2) as client:
            while client.dbsize() < 20:  # rows have begun to come
                time.sleep(0.02)
        cluster.drop_table("t")
        nodes.wait(timeout_s=PATIENCE_S)
        for server in (*local.servers, third):
            with redis.Redis(port=server.port, protocol=2) as client:
                assert [key for key in client.scan_iter() if not key.startswith(b"kvemb:")] == []
