"""A Redis server that has renamed a command, or does not let its user run it: found when processes start, and not at the first fault."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from matrix import one_of

import kvemb
from kvemb.config import StorageConfig
from kvemb.errors import NodeRefusesError
from kvemb.local_cluster.launcher import LocalCluster
from kvemb.local_cluster.processes import LocalProcessError
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.deadline import Deadline
from kvemb.operate.findings import judge_node
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.store_nodes import NodeStats


@pytest.fixture
def without(require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have storage servers start without a command."""
    require_server("redis-server")
    started_as = StorageServer._command

    def leave_out(command: str) -> None:
        monkeypatch.setattr(StorageServer, "_command", lambda it: [*started_as(it), "--rename-command", command, ""])

    return leave_out


@pytest.mark.parametrize("command", ["EVAL", *one_of("HKEYS")])
@pytest.mark.parametrize("kind", ["redis", *one_of("redis-cluster")])
def test_a_shard_does_not_start_on_a_server_that_has_renamed_what_only_a_repair_needs(
    kind: str, command: str, without: Callable[[str], None]
) -> None:
    without(command)
    with pytest.raises(LocalProcessError, match=rf"NodeRefusesError: node 127.0.0.1:\d+: does not know {command}, which a shard needs"):
        LocalCluster(kind, nodes=3 if kind == "redis-cluster" else 1).__enter__()


def test_a_trainer_whose_user_may_not_read_rows_is_told_when_it_connects(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis") as local, redis.Redis(port=local.servers[0].port) as server:
        server.execute_command("ACL", "SETUSER", "default", "-eval")  # which trainers do not need
        kvemb.connect(local.url).close()
        server.execute_command("ACL", "SETUSER", "default", "-hmget")
        with pytest.raises(NodeRefusesError, match=r"does not let user default run HMGET, which a trainer needs; `kvemb acl`"):
            kvemb.connect(local.url, timeout_s=100)


def test_doctor_names_what_a_server_does_not_know(without: Callable[[str], None], tmp_path: Path) -> None:
    without("UNLINK")
    with ExitStack() as stack:
        (server,) = start_servers("redis", 1, tmp_path, 64)
        stack.callback(server.process.kill)
        access = RedisAccess(StorageConfig("redis", (server.address,)))
        settings = redis_admin.settings(server.address, access, Deadline.after(20))
        found = judge_node(NodeStats(server.address, "redis 7.0.0", 0, 0, 100, 0), settings)
        assert [(one.name, one.level) for one in found if "UNLINK" in one.what] == [("node-command", "error")]
