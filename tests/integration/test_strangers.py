"""Strangers that reach a shard's port cost it nothing that lasts. Their bytes are in tests/fuzz."""

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.net.deadline import Deadline
from paramserver.rpc.push_streams import HANDSHAKE_S
from tests.fuzz.run import memory_mb
from tests.integration.shard_processes import PATIENCE_S
from tests.integration.tls_clusters import TlsCluster, running

N_STRANGERS = 2000
SHARDS_FILES = 1024  # a shell's usual limit
MEMORY_MB = 256  # more than this may not be left behind
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


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
