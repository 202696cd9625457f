"""The policies of a table on real servers: kept with it, heard of by every shard, changed at one step of a sync job."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from matrix import one_of

import kvemb
from kvemb import admit, evict
from kvemb.errors import InvalidInputError, UnknownTableError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import SET_POLICIES, SetPoliciesRequest
from kvemb.schema.policies import Policies
from tests.integration.counting_trainers import KINDS, N_IDS, PATIENCE_S, Trainer, wait_for
from tests.integration.table_clusters import new_table
from tests.owners import shard_of
from tests.warm_clusters import warm

IDS = np.arange(200)


@pytest.fixture(scope="module")
def local(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    with warm("valkey", 1, shards=2) as running:
        yield running


def test_policies_are_the_tables_own_and_every_client_sees_them(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, kvemb.connect(local.url) as other:
        table, plain = new_table(cluster, admission=admit.after(3)), new_table(cluster)
        assert other.table(table.name).policies() == Policies(admit.after(3), evict.never())
        assert other.table(plain.name).policies() == Policies()
        assert other.table(table.name).definition == table.definition
        other.table(table.name).set_policies(eviction=evict.keep(10) | evict.older_than(days=1))
        assert table.policies() == Policies(admit.after(3), evict.keep(10) | evict.older_than(days=1))
        again = cluster.create_table(table.name, dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros(), exist_ok=True)
        assert again.policies() == table.policies()
        cluster.create_table(
            table.name, dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros(), exist_ok=True, admission=admit.any()
        )
        assert table.policies().admission == admit.any()
        assert table.policies().eviction == evict.keep(10) | evict.older_than(days=1)


def test_wrong_policies_are_refused_before_anything_is_created(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        n_tables = len(cluster.tables())
        with pytest.raises(InvalidInputError, match=r"kvemb\.admit"):
            new_table(cluster, admission=evict.keep(3))
        assert len(cluster.tables()) == n_tables
        table = new_table(cluster)
        cluster.drop_table(table.name)
        with pytest.raises(UnknownTableError):
            table.set_policies(admission=admit.after(2))


def test_policies_outlive_the_shards_and_go_with_their_table(require_server: Callable[[str], str]) -> None:
    with warm("valkey", 1, shards=2) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster, admission=admit.after(3))
        table.set_policies(eviction=evict.keep(5))
        for shard in (0, 1):
            local.shards[shard].kill()
            local.start_shard(shard)
        assert table.policies() == Policies(admit.after(3), evict.keep(5))
        cluster.drop_table(table.name)
        again = cluster.create_table(table.name, dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
        assert again.policies() == Policies()


def test_an_id_gets_its_row_with_its_third_gradient_and_the_ack_says_what_was_held_back(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = new_table(cluster, admission=admit.after(3), initializer=kvemb.init.constant(5.0))
        for expected in (200, 200, 0):
            assert len(table) == 0
            ack = table.push(IDS, np.ones((200, 4)))
            ack.wait_applied()
            assert ack.held_back == expected
        assert (table.pull(IDS) == 4.0).all()
        table.push(IDS[:7], np.ones((7, 4))).wait_applied()
        assert len(table) == 200
        assert (table.pull(IDS[:7]) == 3.0).all()
        table.assign([1000], np.ones((1, 4)))
        assert table.pull([1000]).tolist() == [[1.0] * 4]
        table.erase([1000])
        ack = table.push([1000], np.ones((1, 4)))
        ack.wait_applied()
        assert ack.held_back == 1
        assert (table.pull([1000]) == 5.0).all()


def test_a_policy_holds_for_the_next_push_of_the_client_that_has_set_it(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        table.push(IDS[:50], np.ones((50, 4)))
        table.flush()
        for number, (policy, held) in enumerate([(admit.after(2), 50), (admit.any(), 0), (admit.probability(1e-9), 50)], start=1):
            table.set_policies(admission=policy)
            ack = table.push(number * 1000 + IDS[:50], np.ones((50, 4)))
            ack.wait_applied()
            assert ack.held_back == held
        assert len(table) == 100


def test_a_shard_that_was_not_told_of_a_change_reads_it_when_a_push_names_it(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table, servers = new_table(cluster), cluster._connection.require_shards("test").servers
        request = SetPoliciesRequest(table.name, {"admission": {"kind": "after", "n": 2}})
        servers.heard(servers.call(0, SET_POLICIES, request, Deadline.after(30)).tables_serial)  # and no other shard is told
        ack = table.push(IDS, np.ones((200, 4)))
        ack.wait_applied()
        assert ack.held_back == 200


@pytest.mark.parametrize("kind", one_of("redis", "memcached"))
def test_admitted_ids_are_trained_exactly_once_while_shards_are_killed(kind: str, require_server: Callable[[str], str]) -> None:
    require_server(KINDS[kind])
    with warm(kind, nodes=2, shards=2) as local, kvemb.connect(local.url) as cluster:
        options = {"optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros()}
        table = cluster.create_table("ledger", dim=4, admission=admit.after(2), **options)  # type: ignore[arg-type]
        for _ in range(2):
            table.push(np.arange(N_IDS), np.zeros((N_IDS, 4)))
        table.flush()
        assert len(table) == N_IDS
        stop = threading.Event()
        trainers = [Trainer(local.url, number, stop) for number in range(2)]
        for trainer in trainers:
            trainer.start()
        n_before, once, first = 0, [], 1000
        for victim in (0, 1):
            wait_for(lambda n=n_before: all(t.n_pushes > n + 20 or t.error for t in trainers))  # type: ignore[misc]
            once.append(table.push(np.arange(first, first + 100), np.ones((100, 4)), timeout_s=PATIENCE_S))
            local.shards[victim].kill()
            once.append(table.push(np.arange(first + 100, first + 200), np.ones((100, 4)), timeout_s=PATIENCE_S))
            local.start_shard(victim)
            n_before, first = max(trainer.n_pushes for trainer in trainers), first + 200
        wait_for(lambda: all(t.n_pushes > n_before + 20 or t.error for t in trainers))
        stop.set()
        for trainer in trainers:
            trainer.join(PATIENCE_S)
        assert [trainer.error for trainer in trainers] == [None, None]
        for ack in once:
            ack.wait_applied(PATIENCE_S)
        np.testing.assert_array_equal(table.pull(np.arange(N_IDS)), sum(trainer.counts for trainer in trainers))
        assert len(table) == N_IDS  # ids that came once have no row, whichever process of the shard was told of them


def test_the_shards_of_a_sync_job_change_their_policies_at_the_same_step(require_server: Callable[[str], str]) -> None:
    of_shard = [np.flatnonzero(shard_of(np.arange(100_000, dtype=np.uint64), 2) == shard)[:2000] for shard in (0, 1)]
    n_steps = 400
    with warm("valkey", 1, shards=2, mode="sync", trainers=2) as local, kvemb.connect(local.url, trainer="operator") as operator:
        table = new_table(operator)
        done = [0, 0]

        def train(number: int) -> None:
            with kvemb.connect(local.url, trainer=f"t{number}") as cluster:
                mine = cluster.table(table.name)
                for step in range(n_steps):  # each trainer names two ids of its own in a step, one of either shard, and never again
                    ids = [of_shard[shard][2 * step + number] for shard in (0, 1)]
                    mine.push(ids, np.ones((2, 4)), timeout_s=PATIENCE_S)
                    done[number] = step
                mine.flush(PATIENCE_S)

        threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for at, policy in ((50, admit.after(2)), (150, admit.any()), (250, admit.after(2))):
            wait_for(lambda at=at: min(done) >= at or not any(thread.is_alive() for thread in threads))  # type: ignore[misc]
            table.set_policies(admission=policy)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert done == [n_steps - 1] * 2
        exists = np.array([table.pull(of_shard[shard][: 2 * n_steps], return_versions=True)[1] != 0 for shard in (0, 1)])
        assert (exists[0] == exists[1]).all()
        assert (exists[:, 0::2] == exists[:, 1::2]).all()  # and for both trainers
        changes = np.flatnonzero(np.diff(exists[0, 0::2].astype(int)))
        assert len(changes) == 3, "no, yes, no: each change took effect, once"
