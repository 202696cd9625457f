"""A move of slots and everything that dies in its middle: it is done or as before, by name, and no row is lost or counted twice."""

import signal
import time
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import redis
from matrix import one_of
from moving_load import PATIENCE_S, MovingLoad, further_node

import kvemb
from kvemb.errors import KvembError, MoveRefusedError, WrongNodeError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.scaling.slot_moves import MoveState, NodeMoves

KINDS = {"redis": "redis-server", "memcached": "memcached"}
SLOW_MB_PER_S = 0.05  # so that a move of some 0.2 MB takes seconds


@pytest.fixture(params=one_of("memcached", "redis"))
def local(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server(KINDS[request.param])
    with LocalCluster(request.param, 2, shards=2, memory_mb=64) as started:
        yield started


def until(nodes: NodeMoves, phases: tuple[str, ...]) -> MoveState:
    """Look on until a phase is reached, or a later one."""
    deadline = Deadline.after(PATIENCE_S)
    while (state := nodes.state()).phase not in phases:
        assert not deadline.expired, f"still {state.phase or 'nothing'}: {state.troubles}"
        time.sleep(0.005)
    return state


def kill_shard(local: LocalCluster, shard: int) -> None:
    local.shards[shard].kill()
    local.launch_shard(shard)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_shard_that_is_killed_in_any_phase_goes_on_with_it(local: LocalCluster) -> None:
    with further_node(local) as third, MovingLoad(local) as load:
        nodes = load.cluster.nodes
        for number, (shard, phases) in enumerate(product((0, 1), (("moving",), ("flipped", "cleaning", ""), ("cleaning", "")))):
            joins = number % 2 == 0  # and leaves with the next move
            nodes.begin(nodes.add(third.address) if joins else nodes.remove(third.address), max_mb_per_s=SLOW_MB_PER_S * 4)
            until(nodes, phases)
            kill_shard(local, shard)
            state = nodes.wait(timeout_s=PATIENCE_S)
            assert (third.address in state.nodes.values()) == joins
            if not joins:
                third.restart()


def test_a_node_that_dies_while_it_is_to_join_is_given_up_and_training_goes_on(local: LocalCluster) -> None:
    with further_node(local) as third, MovingLoad(local) as load:
        nodes = load.cluster.nodes
        before = nodes.state()
        nodes.begin(nodes.add(third.address), max_mb_per_s=SLOW_MB_PER_S)
        until(nodes, ("moving",))
        third.process.kill()
        with pytest.raises(MoveRefusedError, match=third.address):
            nodes.wait(timeout_s=PATIENCE_S)
        after = nodes.state()
        assert after.nodes == before.nodes
        np.testing.assert_array_equal(after.map.slot_nodes, before.map.slot_nodes)
        steps = load.n_steps
        deadline = Deadline.after(PATIENCE_S)
        while load.n_steps < steps + 3:
            assert not deadline.expired, load.errors
            time.sleep(0.02)


@pytest.mark.full
@pytest.mark.parametrize("who", ["source", "target"])
def test_a_node_that_loses_its_rows_in_the_middle_is_repaired_and_the_move_goes_on(local: LocalCluster, who: str) -> None:
    with further_node(local) as third, MovingLoad(local) as load:
        nodes = load.cluster.nodes
        nodes.begin(nodes.add(third.address), max_mb_per_s=SLOW_MB_PER_S * 2)
        until(nodes, ("moving",))
        (third if who == "target" else local.servers[0]).restart()
        state = nodes.wait(timeout_s=PATIENCE_S)
        assert third.address in state.nodes.values()


@pytest.mark.full
def test_a_dead_node_is_replaced_from_python_without_connecting_to_storage(local: LocalCluster) -> None:
    with further_node(local) as third, MovingLoad(local):
        dead = local.servers[0]
        dead.process.kill()
        with kvemb.nodes(local.url) as nodes:
            state = nodes.replace_dead(dead.address, third.address)
        assert set(state.nodes.values()) == {third.address, local.servers[1].address}


def test_a_move_is_taken_back_on_request_and_another_refused_meanwhile(local: LocalCluster) -> None:
    with further_node(local) as third, MovingLoad(local) as load:
        nodes = load.cluster.nodes
        before = nodes.state()
        plan = nodes.add(third.address)
        nodes.begin(plan, max_mb_per_s=SLOW_MB_PER_S / 10)  # on a busy machine it was over before it was taken back
        with pytest.raises(KvembError, match="under way"):
            nodes.begin(nodes.rebalance())
        nodes.abort("the operator thought again")
        with pytest.raises(MoveRefusedError, match="thought again"):
            nodes.wait(timeout_s=PATIENCE_S)
        assert nodes.state().nodes == before.nodes
        with pytest.raises(WrongNodeError, match="empty"):
            nodes.begin(nodes.add(third.address))
        third.restart()
        nodes.begin(nodes.add(third.address))
        assert third.address in nodes.wait(timeout_s=PATIENCE_S).nodes.values()


@pytest.mark.full
def test_a_node_without_room_is_not_moved_to(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2, memory_mb=64) as local, further_node(local) as third:
        with redis.Redis(port=third.port, protocol=2) as client:
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 400_000)
        with MovingLoad(local) as load:
            nodes = load.cluster.nodes
            nodes.begin(nodes.add(third.address))
            with pytest.raises(MoveRefusedError, match="NodeFullError"):
                nodes.wait(timeout_s=PATIENCE_S)
            assert third.address not in nodes.state().nodes.values()


@pytest.mark.full
def test_who_slept_through_all_of_it_goes_on_by_the_new_map(local: LocalCluster) -> None:
    with kvemb.connect(local.url, timeout_s=PATIENCE_S) as sleeper, further_node(local) as third, MovingLoad(local) as load:
        try:
            table = sleeper.table("t")
            first = local.servers[0]
            before = table.pull(np.arange(100), timeout_s=PATIENCE_S)
            nodes = load.cluster.nodes
            nodes.begin(nodes.exchange(first.address, third.address))
            nodes.wait(timeout_s=PATIENCE_S)
            time.sleep(2.5)
            first.process.signal(signal.SIGSTOP)  # worse than dead: it accepts, and says nothing
            assert table.pull(np.arange(100), timeout_s=PATIENCE_S).shape == before.shape
            table.push(np.arange(100), np.zeros((100, before.shape[1]), np.float32)).wait_applied(PATIENCE_S)
        finally:
            first.process.signal(signal.SIGCONT)
