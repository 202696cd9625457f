"""What strangers cost a shard whose port they reach, and what bytes of any kind do to it, and to a trainer: nothing that lasts.

`KVEMB_FUZZ_S=3600` makes each of the fuzz tests run for that long; the seed of a run is in its failure.
"""

import json
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

import kvemb
from kvemb.errors import KvembError
from kvemb.local_cluster.launcher import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import SERVICE
from kvemb.protocol.roles import MAY_CALL
from paramserver.rpc.stream_limits import HANDSHAKE_S
from tests.integration.shard_processes import PATIENCE_S
from tests.integration.tls_clusters import TlsCluster, running

FUZZ_S = float(os.environ.get("KVEMB_FUZZ_S", "4"))
N_STRANGERS = 2000
SHARDS_FILES = 1024  # a shell's usual limit
MEMORY_MB = 256  # more than this may not be left behind
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


def memory_mb(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10


def n_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def files_allowed(n: int | None) -> Iterator[None]:
    """Let this process, and those that it starts, have so many files and connections; None: as many as may be."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] if n is None else n, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def test_thousands_of_strangers_that_say_little_take_no_more_than_their_share_and_are_gone_soon(
    tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    with ExitStack() as strangers:
        with files_allowed(SHARDS_FILES):
            made = strangers.enter_context(running(TlsCluster(tmp_path)))
        address, pid = made.tree["parameter_servers"]["shards"][0], made.shards[0].child.pid
        strangers.enter_context(files_allowed(None))
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < N_STRANGERS + 100:
            pytest.skip(f"needs {N_STRANGERS} connections; ulimit -n allows fewer")
        with kvemb.connect(made.as_seen_by(made.issue("trainer/t", name="t")), trainer="t") as cluster:
            table = cluster.create_table("user", dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
            table.push([1], np.ones((1, 4), np.float32)).wait_applied()
            files, megabytes = n_files(pid), memory_mb(pid)
            for index in range(N_STRANGERS):
                one = strangers.enter_context(connected(address))
                with suppress(OSError):  # refused at once
                    one.send(CLIENT_HELLO[: index % len(CLIENT_HELLO)])
                if index % 500 == 0:
                    table.push([1], np.ones((1, 4), np.float32)).wait_applied()
            assert n_files(pid) < SHARDS_FILES // 2 + files + 50
            assert memory_mb(pid) < megabytes + MEMORY_MB
            table.push([1], np.ones((1, 4), np.float32)).wait_applied()
            over = Deadline.after(HANDSHAKE_S + PATIENCE_S)
            while n_files(pid) > files + 20:
                assert not over.expired, f"{n_files(pid)} files are open, {files} were before"
                time.sleep(0.2)
            table.push([1], np.ones((1, 4), np.float32)).wait_applied()
            assert table.pull([1])[0, 0] == -(4 + (N_STRANGERS - 1) // 500)
        with kvemb.connect(made.as_seen_by(made.issue("trainer/u", name="u")), trainer="u") as cluster:
            cluster.table("user").push([2], np.ones((1, 4), np.float32)).wait_applied()


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The same with bytes changed, cut, doubled or put in."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(4):
            case 0:
                made[at : at + 1] = chance.randbytes(1)
            case 1:
                del made[at : at + chance.randint(1, 16)]
            case 2:
                made[at:at] = made[at : at + chance.randint(1, 64)]
            case _:
                made[at:at] = chance.randbytes(chance.randint(1, 32))
    return bytes(made)


def any_bytes(chance: random.Random, like: bytes) -> bytes:
    """Bytes by chance, or some that are nearly right."""
    return chance.choice([chance.randbytes(chance.randint(1, 4096)), mutated(chance, like)])


def test_bytes_of_any_kind_at_a_shards_port_end_no_shard_and_harm_no_trainer(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    golden = json.loads((Path(__file__).resolve().parents[1] / "unit/golden/messages_v1.json").read_text())
    messages = [bytes.fromhex(text) for text in golden.values()]
    with LocalCluster("redis", 1, shards=1) as local, kvemb.connect(local.url) as cluster:
        address = cluster.config.servers.shards[0]
        table = cluster.create_table("fuzzed", dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
        table.push([1], np.ones((1, 4), np.float32)).wait_applied()
        pid = local.shards[0].pid
        megabytes, n = memory_mb(pid), 1
        with grpc.insecure_channel(address) as channel:
            over = Deadline.after(FUZZ_S)
            while not over.expired:
                with suppress(OSError), connected(address) as sock:
                    sock.settimeout(0.02)
                    start = chance.choice([b"", PREFACE, PREFACE + SETTINGS, CLIENT_HELLO])
                    sock.sendall(start + any_bytes(chance, PREFACE + SETTINGS * 20))
                    sock.recv(4096)
                data = mutated(chance, chance.choice(messages))
                with suppress(grpc.RpcError):
                    verb = chance.choice(sorted(set(MAY_CALL) - {"Push", "Load", "DropTable", "EraseTable", "Erase", "Save", "Assign"}))
                    channel.unary_unary(f"/{SERVICE}/{verb}")(data, timeout=0.2)
                with suppress(grpc.RpcError):
                    list(channel.stream_stream(f"/{SERVICE}/Push")(iter([data]), timeout=0.2))
                table.push([1], np.ones((1, 4), np.float32)).wait_applied()
                n += 1
        assert table.pull([1])[0, 0] == -n, f"seed {seed}"
        assert local.shards[0].poll() is None, f"seed {seed}"
        assert memory_mb(pid) < megabytes + MEMORY_MB, f"seed {seed}"


def test_a_server_that_answers_anything_in_a_shards_place_is_a_typed_error(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with LocalCluster("redis", 1, shards=1) as local, socket.create_server(("127.0.0.1", 0)) as fake:
        fake.settimeout(0.1)
        ended = threading.Event()

        def answer() -> None:
            while not ended.is_set():
                with suppress(OSError):
                    sock, _ = fake.accept()
                    with sock:
                        sock.settimeout(0.2)
                        for _ in range(4):
                            sock.recv(4096)
                            sock.sendall(any_bytes(chance, SETTINGS * 10))

        thread = threading.Thread(target=answer, name="fake-shard")
        thread.start()
        try:
            megabytes, over = memory_mb(os.getpid()), Deadline.after(FUZZ_S)
            tree = {
                "cluster": "local",
                "storage": {"kind": "redis", "nodes": list(kvemb.config.load(local.config_path, {}).storage.nodes)},
                "parameter_servers": {"shards": [f"127.0.0.1:{fake.getsockname()[1]}"]},
            }
            while not over.expired:
                with pytest.raises(KvembError, match="shard 0"):
                    kvemb.connect(tree, timeout_s=0.5)
            assert memory_mb(os.getpid()) < megabytes + MEMORY_MB, f"seed {seed}"
        finally:
            ended.set()
            thread.join(PATIENCE_S)
