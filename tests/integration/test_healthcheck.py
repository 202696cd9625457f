"""deploy/healthcheck.py, which asks for a shard's health in containers and pods: of real shards, plain, with certificates, with a token."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvemb.config import load
from tests.integration.counting_trainers import PATIENCE_S
from tests.integration.tls_clusters import NAME, TlsCluster, running
from tests.warm_clusters import warm

SCRIPT = Path(__file__).resolve().parents[2] / "deploy/healthcheck.py"


def check(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("service", [(), ("--service", "live"), ("--service", "")])
def test_a_shard_that_serves_is_healthy_and_one_that_is_gone_is_not(require_server: Callable[[str], str], service: tuple[str, ...]) -> None:
    require_server("redis-server")
    with warm("redis", 1, shards=1) as cluster:
        (address,) = load(cluster.config_path, {}).servers.shards
        assert check(address, *service).returncode == 0
        cluster.shards[0].kill()
        gone = check(address, *service)
    assert gone.returncode == 1
    assert f"{address}: UNAVAILABLE" in gone.stderr


def test_a_shard_asks_its_probe_for_a_certificate_which_may_be_its_own(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    cluster = TlsCluster(tmp_path)
    own = cluster.authority.issue("shard-0", f"kvemb://{NAME}/shard/0", hosts=("kvemb-shard-0.kvemb-shard",))  # for servers and clients
    with running(cluster):
        address = cluster.tree["parameter_servers"]["shards"][0]
        ca = ("--ca", cluster.authority.ca)
        certificate = ("--cert", own.cert, "--key", own.key)
        assert check(address, *ca, *certificate, "--name", "kvemb-shard-0.kvemb-shard").returncode == 0
        for words in ((), ca, (*ca, *certificate), (*ca, "--name", "kvemb-shard-0.kvemb-shard")):
            assert check(address, *words).returncode == 1, words


def test_a_shard_that_takes_a_token_asks_its_probe_for_none(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    (tmp_path / "token").write_text("a-token\n")
    with running(TlsCluster(tmp_path, tls={"token_file": "token"})) as cluster:
        assert check(cluster.tree["parameter_servers"]["shards"][0], "--ca", cluster.authority.ca).returncode == 0
