"""docker-compose.yml for real: the demo to its end, faults while it trains, one more node, and nothing left behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composed import ROOT, Composed, Ledger

DEMO_S = 600.0


def require_kept(ledger: Ledger) -> None:
    """Every acknowledged push stands in the rows exactly once."""
    verdict = ledger.verdict()
    assert verdict["kept"], verdict
    assert int(str(verdict["pushes_acked"])) > 0
    assert int(str(verdict["rows_verified"])) > 0


@contextmanager
def project(name: str, config: Path, profiles: tuple[str, ...] = ()) -> Iterator[Composed]:
    """A project that leaves no traceback in its logs, and nothing else behind."""
    cluster = Composed(name, config, profiles)
    with cluster:
        yield cluster
        assert "Traceback" not in cluster.logs()
    assert cluster.leftovers() == ""


def require_demo(cluster: Composed) -> None:
    """The demo has come to its end, and has learnt."""
    assert cluster.exit_code("trainer", DEMO_S) == 0
    assert "the cluster learns as well" in cluster.logs("trainer")


def test_memcached_survives_kills_and_a_node_joins_and_another_leaves_while_training_goes_on() -> None:
    with project("kvemb-test-memcached", ROOT / "deploy/kvemb.yaml", ("grow",)) as cluster:
        cluster.up("memcached-0", "memcached-1", "ps-0", "ps-1")
        with Ledger(cluster) as ledger:
            ledger.start()
            cluster.compose("up", "-d", "trainer")
            ledger.wait_for_acks(20)

            cluster.kill_process("ps-0", "kvemb")
            ledger.wait_for_acks(20)
            cluster.kill_process("memcached-1", "memcached")
            ledger.wait_for_acks(20)
            require_demo(cluster)

            cluster.up("memcached-2")
            assert "joins: memcached-2:11211" in cluster.kvemb("nodes", "add", "kvemb.yaml", "memcached-2:11211", "--yes")
            ledger.wait_for_acks(20)
            cluster.kvemb("nodes", "remove", "kvemb.yaml", "memcached-0:11211", "--yes")
            cluster.compose("stop", "memcached-0")  # no part needs it any more
            ledger.wait_for_acks(20)
            ledger.stop()
            require_kept(ledger)
            assert "memcached-0" not in cluster.kvemb("nodes", "show", "kvemb.yaml")

            cluster.up("ps-2")
            assert "joins: ps-2:7070" in cluster.kvemb("shards", "add", "kvemb.yaml", "ps-2:7070", "--yes")
            cluster.kvemb("shards", "remove", "kvemb.yaml", "ps-1:7070", "--yes")
            assert "ps-1" not in cluster.kvemb("shards", "show", "kvemb.yaml")
            cluster.kvemb("save", "/checkpoints/after")
            cluster.kvemb("verify", "/checkpoints/after", "--against-storage")


def test_redis_cluster_survives_kills_and_a_failover() -> None:
    with project("kvemb-test-cluster", ROOT / "deploy/kvemb-redis-cluster.yaml", ("redis-cluster",)) as cluster:
        cluster.up("redis-cluster-create", "ps-0", "ps-1")
        assert cluster.exit_code("redis-cluster-create", 60) == 0
        with Ledger(cluster) as ledger:
            ledger.start()
            cluster.compose("up", "-d", "trainer")
            ledger.wait_for_acks(20)

            cluster.kill_process("ps-1", "kvemb")
            ledger.wait_for_acks(20)
            cluster.kill_process("redis-cluster-0", "redis-server")
            ledger.wait_for_acks(20)
            cluster.compose("stop", "redis-cluster-1")
            ledger.wait_for_acks(20)  # from the replica that has taken over
            cluster.compose("start", "redis-cluster-1")
            require_demo(cluster)

            ledger.stop()
            require_kept(ledger)


def test_a_shard_cannot_be_scaled() -> None:
    with project("kvemb-test-scale", ROOT / "deploy/kvemb.yaml") as cluster:
        refused = cluster.compose("up", "-d", "--scale", "ps-0=2", "ps-0", check=False)
        assert refused.returncode != 0
        assert "container name" in refused.stderr
