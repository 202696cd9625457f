"""Storage nodes that come and go while a trainer pushes and another pulls: nothing is lost, and no client is told to connect again."""

import signal
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import redis
from matrix import one_of
from moving_load import IDS, N_IDS, PATIENCE_S, MovingLoad, further_node
from pymemcache.client.base import Client

import kvemb
import kvemb.optim
from kvemb.errors import ShardUnavailableError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from tests.real_servers import memcached_client

KINDS = {"redis": "redis-server", "memcached": "memcached"}


@pytest.fixture(params=one_of("memcached", "redis"))
def kind(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> str:
    require_server(KINDS[request.param])
    return str(request.param)


@pytest.mark.parametrize("pages", one_of(False, True))
def test_a_node_joins_and_another_leaves_while_rows_are_pushed_and_pulled(kind: str, pages: bool) -> None:
    with LocalCluster(kind, 2, shards=2, memory_mb=64) as local, further_node(local) as third:
        phases: list[str] = []
        with MovingLoad(local, pages=pages) as load:
            nodes, n_keys = load.cluster.nodes, sum(node.n_keys for node in load.cluster.status().nodes)
            plan = nodes.add(third.address)
            assert 0.3 < plan.n_rows / N_IDS < 0.36
            nodes.begin(plan)
            state = nodes.wait(timeout_s=PATIENCE_S, progress=lambda state: phases.append(state.phase))
            assert (np.bincount(state.map.slot_nodes, minlength=3) > 3000).all()
            assert sum(node.n_keys for node in load.cluster.status().nodes) < n_keys + 20, "what moved away was left there"
            assert third.address in load.reader.store.nodes.addresses or load.reader.table("t").pull(IDS[:100]) is not None
            first = local.servers[0].address
            steps = load.n_steps
            nodes.begin(nodes.remove(first))
            state = nodes.wait(timeout_s=PATIENCE_S)
            assert first not in state.nodes.values()
            assert load.n_steps > steps
            local.servers[0].process.kill()  # it is not needed any more
        with kvemb.connect(local.url, read_only=True) as late:  # kvemb.yaml still names the two first nodes
            np.testing.assert_array_equal(-late.table("t").pull(IDS)[:, 0], load.counts)


def test_on_memcached_rows_are_judged_at_each_node_that_they_are_written_to(require_server: Callable[[str], str]) -> None:
    require_server("memcached")
    with (
        LocalCluster("memcached", 2, shards=2, memory_mb=64) as local,
        further_node(local) as third,
        kvemb.connect(local.url) as cluster,
        closing(memcached_client(third)) as client,
    ):
        table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, np.ones((N_IDS, 4), np.float32)).wait_applied(PATIENCE_S)
        nodes, definition, cluster_map = cluster.nodes, table.definition, cluster.store.nodes.cluster_map
        ids = IDS[cluster_map.shards_of(definition.placement.slots(IDS.astype(np.uint64))) == 0][:2000]
        plan = nodes.add(third.address)
        n_moving = int((plan.after[definition.placement.slots(ids.astype(np.uint64))] == 2).sum())
        assert n_moving > 400
        keys = [bytes(key) for key in definition.keys(ids.astype(np.uint64), pages=False).encode()]

        def push(n: int) -> dict[str, int]:
            """What the third node has counted while these rows were pushed so often."""
            before = stats_of(client)
            for _ in range(n):
                table.push(ids, np.ones((len(ids), 4), np.float32)).wait_applied(PATIENCE_S)
            return {name: value - before[name] for name, value in stats_of(client).items()}

        local.shards[1].signal(signal.SIGSTOP)  # it does not acknowledge, so the move stays where it is
        try:
            nodes.begin(plan)
            deadline = Deadline.after(PATIENCE_S)
            while len(client.get_many(keys)) < n_moving:  # the other shard copies its rows
                assert not deadline.expired
                time.sleep(0.02)
            assert push(3)["cas_hits"] >= 3 * n_moving
            for key, value in client.get_many(keys).items():
                client.set(key, value, noreply=False)  # another program has been there
            assert push(2)["cas_hits"] >= 2 * n_moving
        finally:
            local.shards[1].signal(signal.SIGCONT)
        nodes.wait(timeout_s=PATIENCE_S)
        found = push(2)
        assert found["cas_hits"] >= n_moving
        assert found["cas_badval"] < n_moving / 10, "cached rows had the tokens of the node that was"
        np.testing.assert_array_equal(table.pull(ids), np.full((len(ids), 4), -8, np.float32))


def test_a_move_whose_shard_0_does_not_answer_says_that_it_may_have_begun(
    require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=1, memory_mb=64) as local, further_node(local) as third, kvemb.connect(local.url) as cluster:
        nodes = cluster.nodes
        plan = nodes.add(third.address)
        local.shards[0].kill()
        monkeypatch.setattr(nodes, "_timeout_s", 1.0)
        with pytest.raises(ShardUnavailableError, match=r"Whether it has begun that is not known.*`kvemb moves`"):
            nodes.begin(plan)


def stats_of(client: Client) -> dict[str, int]:
    """What memcached has counted."""
    names = ("cas_hits", "cas_badval", "curr_items")
    told = client.stats()
    return {name: int(told[name.encode()]) for name in names}


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
