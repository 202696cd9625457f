"""Nodes of a Redis Cluster and a Valkey Cluster with users of their own, with replicas, and that die while a slot stands open to them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvemb.arrays.hashing import mix64
from kvemb.commands.status_command import render
from kvemb.config import parse
from kvemb.errors import ConfigError
from kvemb.local_cluster.processes import accepts, free_ports
from kvemb.local_cluster.storage_servers import START_TIMEOUT_S, StorageServer
from kvemb.net.deadline import Deadline
from kvemb.operate.cluster_status import ClusterStatus
from kvemb.operate.examination import examine
from kvemb.process.metrics import MetricFamilies
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.redis_cluster.redis_cluster_store import RedisClusterStore
from kvemb.stores.redis_cluster.scaling.key_migration import KeyMigration
from kvemb.stores.redis_cluster.scaling.node_scaling import NodeScaling
from kvemb.stores.store import Store
from kvemb.testing.real_servers import ServerNodes, redis_client
from kvemb.testing.store_contract import CLUSTER, GENERATION, TAG, records_of, require_rows, within, write
from paramserver.repair.node_watch import NodeWatch
from paramserver.rpc.shard_metrics import add_nodes
from tests.integration.tls_storage import TlsNodes, TlsServer

ROWS = BucketKeys(TAG, mix64(np.arange(1, 20_000, dtype=np.uint64)), N_SLOTS)


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = Deadline.after(90)
    while not holds():
        assert not deadline.expired, what
        time.sleep(0.05)


class Stopped(BaseException):
    """The command was stopped."""


@dataclass(frozen=True)
class Scaled:
    """Three nodes with rows, a store on them, and a server of no cluster."""

    nodes: ServerNodes
    store: Store
    new: StorageServer


@pytest.fixture
def scaled(tmp_path: Path, require_server: Callable[[str], str]) -> Iterator[Scaled]:
    """Slots move on a Valkey Cluster in test_slot_moves.py."""
    require_server("redis-server")
    with ExitStack() as stack:
        nodes = ServerNodes("redis-cluster", 3, tmp_path)
        stack.callback(nodes.close)
        new = StorageServer("redis-cluster", free_ports(1)[0], tmp_path, 64)
        stack.callback(new.process.kill)
        new.process.wait_until(lambda: accepts(new.port), Deadline.after(START_TIMEOUT_S))
        store = stack.enter_context(nodes.store())
        store.provision(CLUSTER, GENERATION, within())
        store.open(within())
        write(store, ROWS, records_of(ROWS))
        yield Scaled(nodes, store, new)


@pytest.mark.parametrize("named", [True, False])
def test_slots_move_under_the_user_and_the_password_that_the_command_has(scaled: Scaled, named: bool) -> None:
    for server in (*scaled.nodes.servers, scaled.new):
        with redis_client(server) as client:
            client.execute_command("ACL SETUSER", "ops", "on", ">secret", "~*", "&*", "+@all")
            client.execute_command("ACL SETUSER", "default", "resetpass", ">secret", *(["off"] if named else []))
    config = replace(scaled.nodes.config, username="ops" if named else None, password="secret")
    with NodeScaling(config) as nodes:
        assert nodes.carry_out(nodes.plans.add(scaled.new.address)) == []
        assert {figures.address: figures.n_slots for figures in nodes.plans.show()}[scaled.new.address] > 3000
    with RedisClusterStore(config, role="trainer") as store:
        store.open(within())
        require_rows(store, ROWS, records_of(ROWS))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_node_joins_and_leaves_a_cluster_that_speaks_tls(tmp_path: Path, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with ExitStack() as stack:
        nodes = TlsNodes("redis-cluster", 3, tmp_path)
        stack.callback(nodes.close)
        new = TlsServer("redis-cluster", free_ports(1)[0], tmp_path, 64, authority=nodes.authority, issued=nodes.server_cert)
        stack.callback(new.process.kill)
        new.process.wait_until(lambda: accepts(new.tls_port), Deadline.after(START_TIMEOUT_S))
        store = stack.enter_context(nodes.store())
        store.provision(CLUSTER, GENERATION, within())
        store.open(within())
        write(store, ROWS, records_of(ROWS))
        with NodeScaling(nodes.config) as scaling:
            first, *others = (node.address for node in scaling.plans.show())
            assert scaling.carry_out(scaling.plans.add(new.tls_address)) == []
            require_rows(store, ROWS, records_of(ROWS))
            assert scaling.carry_out(scaling.plans.remove(first)) == []
            assert {node.address for node in scaling.plans.show()} == {*others, new.tls_address}
        write(store, ROWS, records_of(ROWS, salt=1))
        require_rows(store, ROWS, records_of(ROWS, salt=1))
        assert new.tls_address in store.nodes.addresses


def test_a_node_with_replicas_gives_slots_away_and_is_not_removed(scaled: Scaled) -> None:
    primary = scaled.nodes.servers[0]
    with NodeScaling(scaled.nodes.config) as nodes:
        nodes._membership.join(scaled.new.address, nodes.plans.view())
        with redis_client(scaled.new) as client, redis_client(primary) as other:
            client.execute_command("CLUSTER REPLICATE", other.execute_command("CLUSTER MYID"))
            eventually(lambda: client.info("replication")["master_link_status"] == "up", "the replica does not follow")
        eventually(lambda: any(one.n_replicas for one in nodes.plans.show()), "nobody knows of the replica")
        with pytest.raises(ConfigError, match=rf"{primary.address}.*followed by {scaled.new.address}"):
            nodes.plans.remove(primary.address)
        with pytest.raises(ConfigError, match="is a replica"):
            nodes.plans.add(scaled.new.address)
        assert nodes.carry_out(nodes.plans.rebalance({primary.address: 0.5})) == []
        assert nodes.plans.view().open_slots == ()
    require_rows(scaled.store, ROWS, records_of(ROWS))


def test_a_change_that_was_broken_off_is_in_what_operators_and_prometheus_see(scaled: Scaled, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = {"kind": "redis-cluster", "nodes": list(scaled.nodes.config.nodes)}
    servers = {"shards": [f"127.0.0.1:{free_ports(1)[0]}"]}
    config = parse({"cluster": "c", "storage": storage, "parameter_servers": servers}, {})
    assert scaled.store.nodes.unfinished_change(within()) is None
    migrate, n_calls = KeyMigration._migrate_pieces, 0

    def stopped_soon(self: KeyMigration, *args: object, **more: object) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 40:
            raise Stopped
        migrate(self, *args, **more)  # type: ignore[arg-type]

    with NodeScaling(scaled.nodes.config) as nodes, monkeypatch.context() as patch:
        plan = nodes.plans.add(scaled.new.address)
        patch.setattr(KeyMigration, "_migrate_pieces", stopped_soon)
        with pytest.raises(Stopped):
            nodes.carry_out(plan)
    with NodeScaling(scaled.nodes.config) as nodes:
        change = scaled.store.nodes.unfinished_change(within())
        assert change is not None
        assert (change.kind, change.n_left) == ("add", nodes.n_left(nodes.plans.under_way()))  # type: ignore[arg-type]
        assert 0 < change.n_left <= plan.n_slots
        watch = NodeWatch(scaled.store, 10.0)
        watch.look_for_evictions()
        families = MetricFamilies({"cluster": "c", "shard": "0"})
        add_nodes(families, watch.seen)
        left = {sample.name: sample.value for family in families for sample in family.samples}["kvemb_nodes_slots_left"]
        assert left == change.n_left
        assert f"{change.n_left:,} slots to go" in render(ClusterStatus((), (), change=change))
        (found,) = [one for one in examine(config, "1").findings if one.name == "nodes-change"]
        assert f"{change.n_left:,} slots to go" in found.what
        assert "kvemb moves resume" in found.mend
        nodes.abort()
    assert scaled.store.nodes.unfinished_change(within()) is None
    watch.look_for_evictions()
    assert watch.seen.slots_left == 0


@pytest.mark.timeout(300)
def test_a_target_that_dies_for_good_while_slots_stand_open_costs_the_source_its_markers(
    scaled: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in (*scaled.nodes.servers, scaled.new):
        with redis_client(server) as client:
            client.config_set("cluster-node-timeout", 2000)

    migrate = KeyMigration._migrate_pieces

    def first_only(self: KeyMigration, pieces: Sequence[tuple[list[bytes], int]], *args: object, **more: object) -> None:
        keys, size = pieces[0]
        migrate(self, [(keys[:1], size)], *args, **more)  # type: ignore[arg-type]
        raise Stopped

    with NodeScaling(scaled.nodes.config) as nodes:
        before = nodes.plans.view().owners
        plan = nodes.plans.add(scaled.new.address)
        with monkeypatch.context() as patch:
            patch.setattr(KeyMigration, "_migrate_pieces", first_only)
            with pytest.raises(Stopped):
                nodes.carry_out(plan)
        assert nodes.plans.view().open_slots
        scaled.new.process.kill()
        eventually(lambda: any(node.failed for node in nodes.plans.view().primaries), "the cluster does not call its dead node failed")
        nodes.abort()
        view = nodes.plans.view()
        assert view.open_slots == ()
        assert view.owners == before
        assert nodes.plans.under_way() is None
        assert scaled.new.address not in [node.address for node in view.primaries]
    found = scaled.store.repair.lost_nodes(within())
    assert [node.why for node in found] == ["empty"]
