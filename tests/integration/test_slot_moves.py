"""Slots that are moved by our commands, which die, and whose servers lose keys, at each step: done, or as before, or told."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvemb.arrays.hashing import mix64
from kvemb.errors import ConfigError, InvalidInputError, NodeFullError, NodeLostError, NodeUnavailableError, UnsafeNodeError, WrongNodeError
from kvemb.local_cluster import storage_servers
from kvemb.local_cluster.processes import accepts, free_ports
from kvemb.local_cluster.storage_servers import START_TIMEOUT_S, StorageServer
from kvemb.net.deadline import Deadline
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.slot_dealing import SlotPlan, SlotSizes
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.redis_cluster.node_change import NodeChange
from kvemb.stores.redis_cluster.scaling.admin_links import AdminLinks
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterNode
from kvemb.stores.redis_cluster.scaling.key_migration import KeyMigration
from kvemb.stores.redis_cluster.scaling.node_scaling import NodeScaling
from kvemb.stores.redis_cluster.scaling.redis_slot_mover import RedisSlotMover
from kvemb.stores.redis_cluster.scaling.scaling_plans import new_holder, owners_among
from kvemb.stores.redis_cluster.slot_map import marker_keys
from kvemb.stores.redis_server.redis_commands import Word
from kvemb.stores.store import Store
from kvemb.testing.real_servers import ServerNodes, redis_client
from kvemb.testing.repair_contract import begun, eventually_reads, rows_of, write_back
from kvemb.testing.store_contract import CLUSTER, GENERATION, TAG, records_of, require_rows, within, write
from kvemb.wire.resp.resp_value import Value

IDS = mix64(np.arange(1, 200_000, dtype=np.uint64))
ALL = BucketKeys(TAG, IDS, 4 * N_SLOTS)
SLOTS = (1234, 1235)
ROWS = ALL[np.flatnonzero(np.isin(ALL.slots(), [*SLOTS, 5000, 9000, 16000]))]


class Killed(BaseException):
    """The command was killed."""


class FailingLinks(AdminLinks):
    """Links of a command that is killed after so many round trips: just before the next one, or when that has been sent."""

    left = 1 << 30

    def run(self, address: str, commands: Sequence[Sequence[Word]], timeout_s: float) -> list[Value]:
        """See `AdminLinks.run`."""
        FailingLinks.left -= 1
        if FailingLinks.left < 0:
            raise Killed
        return super().run(address, commands, timeout_s)


_FORGOTTEN_S = 65.0  # so long Valkey's nodes take one that they have forgotten for a stranger


@pytest.fixture(scope="module", params=["redis", "valkey"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]
) -> Iterator[ServerNodes]:
    """Three nodes of a Redis Cluster, and of a Valkey Cluster."""
    program = require_server("redis-server") if request.param == "redis" else storage_servers.find_server("valkey")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_servers, "find_server", lambda kind: program)
        nodes = ServerNodes("redis-cluster", 3, tmp_path_factory.mktemp("moves"))
        yield nodes
        nodes.close()


@pytest.fixture
def store(running: ServerNodes) -> Iterator[Store]:
    running.reset()
    with running.store() as store:
        store.provision(CLUSTER, GENERATION, within())
        store.open(within())
        write(store, ROWS, records_of(ROWS))
        yield store
    running.reset()
    with NodeScaling(running.config) as nodes:
        nodes.resume()  # closes what stands open


def plan_of(nodes: NodeScaling) -> SlotPlan[NodeChange]:
    """Two slots go from their node to the next, and a third from there to the first."""
    view = nodes.plans.view()
    names = tuple(node.name for node in view.primaries)
    before = owners_among(view, names)
    after = before.copy()
    after[list(SLOTS)] = (before[list(SLOTS)] + 1) % 3
    change = NodeChange("rebalance", "", "", names, before, after, aborting=False, holder=new_holder())
    even = np.ones(N_SLOTS, np.uint64)
    return SlotPlan("nodes", change, before.astype(np.uint16), after.astype(np.uint16), SlotSizes(even, even))


def carry_out_until(nodes: NodeScaling, n: int) -> SlotPlan[NodeChange] | None:
    """Carry out such a plan, killed after n round trips; None if it ended before."""
    plan = plan_of(nodes)
    FailingLinks.left = n
    try:
        nodes.carry_out(plan)
    except Killed:
        return plan
    finally:
        FailingLinks.left = 1 << 30
    return None


def require_settled(
    running: ServerNodes, nodes: NodeScaling, names: tuple[str, ...], goal: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> None:
    view = nodes.plans.view()
    assert view.open_slots == ()
    np.testing.assert_array_equal(owners_among(view, names), goal)
    assert nodes.plans.under_way() is None
    for server in running.servers:
        with redis_client(server) as client:
            assert list(client.scan_iter("kvemb:moving:*", count=20_000)) == []


@pytest.fixture
def killed_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvemb.stores.redis_cluster.scaling.node_scaling.AdminLinks", FailingLinks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("then", ["resume", "abort"])
def test_a_change_whose_command_was_killed_at_any_round_trip_is_finished_or_taken_back(
    store: Store, running: ServerNodes, killed_links: None, then: str
) -> None:
    n, salt, finished = 3, 0, False
    while not finished:
        n += 1
        with NodeScaling(running.config) as nodes:
            plan = carry_out_until(nodes, n)
        finished = plan is None
        salt += 1
        write(store, ROWS, records_of(ROWS, salt=salt))  # both nodes take part, wherever the slots stand
        require_rows(store, ROWS, records_of(ROWS, salt=salt))
        with NodeScaling(running.config) as nodes:
            there = nodes.plans.under_way()
            nodes.resume() if then == "resume" else nodes.abort()
            if plan is not None:
                owners = owners_among(nodes.plans.view(), plan.basis.names)
                wanted = plan.basis.after if then == "resume" else plan.basis.before
                require_settled(running, nodes, plan.basis.names, owners if there is None else wanted)
                whole = [(owners == end).all() for end in (plan.basis.before, plan.basis.after)]
                assert any(whole), "neither done nor as before"
        require_rows(store, ROWS, records_of(ROWS, salt=salt))
    assert n > 12
    assert store.repair.lost_nodes(within()) == []


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("then", ["resume", "abort"])
def test_rows_that_a_server_loses_while_its_slot_stands_open_are_told_never_new(
    store: Store, running: ServerNodes, monkeypatch: pytest.MonkeyPatch, who: str, then: str
) -> None:
    with NodeScaling(running.config) as nodes:
        plan = plan_of(nodes)
        ports = [node.port for node in nodes.plans.view().primaries]
        source, target = (ports[int(owners[SLOTS[0]])] for owners in (plan.basis.before, plan.basis.after))

        def fails(*_: object) -> None:
            raise Killed

        migrate = KeyMigration._migrate_pieces

        def first_only(self: KeyMigration, pieces: Sequence[tuple[list[bytes], int]], *args: object, **more: object) -> None:
            keys, size = pieces[0]
            migrate(self, [(keys[:2], size)], *args, **more)  # type: ignore[arg-type]
            raise Killed

        monkeypatch.setattr(KeyMigration, "_migrate_pieces", first_only)
        with pytest.raises(Killed):
            nodes.carry_out(plan)
        monkeypatch.undo()
        for server in running.servers:
            if server.port == (source if who == "source" else target):
                with redis_client(server) as client:
                    open_markers = [marker_keys()[slot] for slot in SLOTS]
                    names = [name for name in client.scan_iter("kvemb:*", count=20_000) if not name.startswith(b"kvemb:moving")]
                    kept = {name: client.get(name) for name in names if name not in open_markers}
                    client.flushall()
                    for name, value in kept.items():  # rows in the open slots are gone; by its other markers the server is whole
                        client.set(name, value)
        with suppress(NodeLostError):  # nothing is sent back from a node that lost it
            nodes.resume() if then == "resume" else nodes.abort()
    found = store.repair.lost_nodes(within())
    assert found
    assert all(node.why == "empty" for node in found)


def repair_all(store: Store) -> None:
    """Bring the rows of every lost node back, as the only shard."""
    while found := store.repair.lost_nodes(within()):
        address = found[0].address
        nonce = begun(store, address)
        write_back(store, address, nonce, rows_of(store, address, ROWS))
        store.repair.report(address, nonce, 0, within())
        assert store.repair.finish(address, nonce, range(1), within())


def test_slots_that_stand_open_go_back_together_when_their_source_has_lost_its_rows(
    store: Store, running: ServerNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry = RedisSlotMover._carry

    def markers_only(mover: RedisSlotMover, slots: Sequence[int], source: ClusterNode, target: ClusterNode) -> None:
        mover._migration.run([[marker_keys()[slot]] for slot in slots], source, target)
        raise Killed

    with NodeScaling(running.config) as nodes:
        plan = plan_of(nodes)
        monkeypatch.setattr(RedisSlotMover, "_carry", markers_only)
        with pytest.raises(Killed):
            nodes.carry_out(plan)
        monkeypatch.setattr(RedisSlotMover, "_carry", carry)
        view = nodes.plans.view()
        assert len(view.open_slots) > 1
        source = view.nodes[view.open_slots[0].source]
        (server,) = [server for server in running.servers if server.port == source.port]
        with redis_client(server) as client:
            client.flushall()
        repair_all(store)
        require_rows(store, ROWS, records_of(ROWS))
        with pytest.raises(NodeLostError):  # what it has of them may not be all
            nodes.abort()
        repair_all(store)
        nodes.resume()
        require_settled(running, nodes, plan.basis.names, plan.basis.before)
    eventually_reads(store, keys=ROWS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["redis", "valkey"])
def test_a_dead_nodes_slots_go_to_a_newcomer_however_slowly_it_takes_them(
    server: str, tmp_path: Path, require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = require_server("redis-server") if server == "redis" else storage_servers.find_server("valkey")
    monkeypatch.setattr(storage_servers, "find_server", lambda kind: program)
    nodes = ServerNodes("redis-cluster", 3, tmp_path)
    new = StorageServer("redis-cluster", free_ports(1)[0], tmp_path, 64)
    run = AdminLinks.run

    def slowly(self: AdminLinks, address: str, commands: Sequence[Sequence[Word]], timeout_s: float) -> list[Value]:
        if address != new.address or len(commands) < 1000 or "SETSLOT" not in commands[0]:
            return run(self, address, commands, timeout_s)
        first = run(self, address, commands[:10], timeout_s)
        time.sleep(3)  # others tell the newcomer meanwhile whose slots they take these to be
        return first + run(self, address, commands[10:], timeout_s)

    monkeypatch.setattr(AdminLinks, "run", slowly)
    try:
        new.process.wait_until(lambda: accepts(new.port), Deadline.after(START_TIMEOUT_S))
        with nodes.store() as store:
            store.provision(CLUSTER, GENERATION, within())
            store.open(within())
            for one in nodes.servers:
                with redis_client(one) as client:
                    client.config_set("cluster-node-timeout", 2000)
            dead = nodes.servers[2]
            dead.process.kill()
            with NodeScaling(nodes.config) as scaling:
                deadline = Deadline.after(60)
                while not any(node.failed for node in scaling.plans.view().primaries):
                    assert not deadline.expired, "the cluster does not call its dead node failed"
                    time.sleep(0.1)
                (told,) = scaling.carry_out(scaling.plans.replace(dead.address, new.address))
                assert "shards are bringing the rows" in told
                view = scaling.plans.view()
                assert {node.address for node in view.primaries} == {new.address, *(one.address for one in nodes.servers[:2])}
                assert "" not in view.owners
            lost = within()
            while not (found := store.repair.lost_nodes(lost)):
                assert not lost.expired
            assert [(node.address, node.why) for node in found] == [(new.address, "empty")]
    finally:
        new.process.kill()
        nodes.close()


def test_a_full_target_leaves_every_slot_as_it_was_and_the_change_can_go_on_when_it_has_room(store: Store, running: ServerNodes) -> None:
    with NodeScaling(running.config) as nodes:
        plan = plan_of(nodes)
        target = nodes.plans.view().primaries[int(plan.basis.after[SLOTS[0]])]
        (server,) = [server for server in running.servers if server.port == target.port]
        with redis_client(server) as client:
            limit = client.config_get("maxmemory")["maxmemory"]
            client.config_set("maxmemory", 1)
            try:
                # The record of the change may lie on this server, too; shards try such a small write again, so its error is the other one.
                with pytest.raises((NodeFullError, NodeUnavailableError), match=f"{target.address}.*out of memory"):
                    nodes.carry_out(plan)
            finally:
                client.config_set("maxmemory", limit)
        assert nodes.plans.view().open_slots == ()
        require_rows(store, ROWS, records_of(ROWS))
        if nodes.plans.under_way() is None:  # nothing was begun
            nodes.carry_out(plan)
        else:
            nodes.resume()
        require_settled(running, nodes, plan.basis.names, plan.basis.after)
        require_rows(store, ROWS, records_of(ROWS))


def test_a_second_change_is_refused_and_a_command_that_was_replaced_stops(store: Store, running: ServerNodes) -> None:
    with NodeScaling(running.config) as nodes, NodeScaling(running.config) as other:
        plan = plan_of(nodes)

        def taken_over(*_: object) -> None:
            with pytest.raises(ConfigError, match="under way"):
                other.plans.rebalance()
            other.abort()

        replaced = nodes._require_ours

        def first(change: NodeChange) -> None:
            taken_over()
            replaced(change)

        nodes._require_ours = first  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="taken this change"):
            nodes.carry_out(plan)
        require_settled(running, other, plan.basis.names, plan.basis.before)


def test_a_server_that_cannot_join_is_refused_by_name_and_nothing_is_changed(running: ServerNodes, store: Store, tmp_path: Path) -> None:
    alone, member = (StorageServer(kind, free_ports(1)[0], tmp_path, 64) for kind in ("redis", "redis-cluster"))
    try:
        for server in (alone, member):
            server.process.wait_until(lambda port=server.port: accepts(port), Deadline.after(START_TIMEOUT_S))  # type: ignore[misc]
        with NodeScaling(running.config) as nodes, redis_client(member) as client:
            with pytest.raises(ConfigError, match="cluster-enabled"):
                nodes.plans.add(alone.address)
            client.config_set("maxmemory-policy", "allkeys-lru")
            with pytest.raises(UnsafeNodeError, match=member.address):
                nodes.plans.add(member.address)
            client.config_set("maxmemory-policy", "noeviction")
            client.execute_command("CLUSTER ADDSLOTS", 0)
            with pytest.raises(WrongNodeError, match="is in a Redis Cluster with itself alone, with 1 slot "):
                nodes.plans.add(member.address)
            client.execute_command("CLUSTER RESET")
            client.config_set("maxmemory", 1)
            with pytest.raises(NodeFullError, match=member.address):
                nodes.plans.add(member.address)
            with pytest.raises(InvalidInputError, match="no primary"):
                nodes.plans.remove("127.0.0.1:1")
            with pytest.raises(InvalidInputError, match="is none of the cluster's"):
                nodes.plans.rebalance({"127.0.0.1:1": 2.0})
            assert len(nodes.plans.view().nodes) == 3
    finally:
        for server in (alone, member):
            server.process.kill()


@pytest.mark.timeout(600)
def test_a_node_leaves_with_all_rows_elsewhere_and_joins_again_as_a_whole_one(
    store: Store, running: ServerNodes, request: pytest.FixtureRequest
) -> None:
    address = running.servers[1].address
    with NodeScaling(running.config) as nodes:
        assert nodes.carry_out(nodes.plans.remove(address)) == []
        assert address not in [figures.address for figures in nodes.plans.show()]
        require_rows(store, ROWS, records_of(ROWS))
        others = [server.address for server in running.servers if server.address != address]
        with NodeScaling(replace(running.config, nodes=(address, *others))) as late:  # kvemb.yaml names the one that left, too
            assert [figures.address for figures in late.plans.show()] == sorted(others)
        if "valkey" in request.node.name:
            time.sleep(_FORGOTTEN_S)
        told: list[tuple[str, int, int]] = []
        plan = nodes.plans.add(address)
        assert nodes.carry_out(plan, lambda *seen: told.append(seen)) == []
        assert told[-1][1] == told[-1][2]
        assert {figures.address: figures.n_slots for figures in nodes.plans.show()}[address] == plan.n_slots > 5000
    require_rows(store, ROWS, records_of(ROWS))
    assert store.repair.lost_nodes(within()) == []
