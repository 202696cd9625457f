"""Servers that answer anything at any moment: whatever asked them ends in time, with an error of ours."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvemb.config import StorageConfig
from kvemb.errors import KvembError
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from tests.integration.lying_server import ANSWERS, DEADLINE_S, Liar, everything

pytestmark = pytest.mark.full  # bytes of any kind; test_wire_fuzz.py says it of the parsers, and CI fuzzes for five minutes

PATIENCE_S = 30.0  # of a machine that does much else; less than an endless answer would take
ENDLESS = 64 << 20
SLOW: dict[str, Callable[[socket.socket], None]] = {
    "a line without an end": lambda sock: sock.sendall(b"+" + b"x" * ENDLESS),
    "a line byte by byte": lambda sock: byte_by_byte(sock, b"+" + b"x" * ENDLESS),
    "a value byte by byte": lambda sock: byte_by_byte(sock, b"$9000000\r\n" + b"x" * 9_000_000),
    "an endless array": lambda sock: sock.sendall(b"*1000000\r\n" + b"$1\r\nx\r\n" * 900_000),
    "an endless listing": lambda sock: sock.sendall(b"STAT a 1\r\n" * (ENDLESS // 10)),
    "silence": lambda sock: None,
}


def byte_by_byte(sock: socket.socket, data: bytes) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(len(data)):
        sock.sendall(data[at : at + 1])


@pytest.fixture(scope="module", params=["redis", "memcached"])
def server(
    request: pytest.FixtureRequest, require_server: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StorageServer]:
    require_server("memcached" if request.param == "memcached" else "redis-server")
    folder: Path = tmp_path_factory.mktemp("hostile")
    os.chmod(folder, 0o755)
    (made,) = start_servers(request.param, 1, folder, 64)
    yield made
    made.process.kill()


@pytest.fixture
def liar(server: StorageServer) -> Iterator[Liar]:
    made = Liar(server.port)
    yield made
    made.close()


def reset(server: StorageServer, liar: Liar) -> StorageConfig:
    liar.tell(None)
    server.restart()
    return StorageConfig(server.kind, (liar.address,), on_lost_node="fail")


def require_named(error: KvembError) -> None:
    assert not type(error).__name__.startswith("_")
    assert len(str(error)) > 20


def test_any_answer_at_any_moment_ends_in_time_with_an_error_of_ours(server: StorageServer, liar: Liar) -> None:
    config = reset(server, liar)
    everything(config)
    n_answers = liar.n_answers
    assert n_answers > 20
    for number, (_, answer) in enumerate(ANSWERS.items()):
        for after in range(number % 3, n_answers, 3):
            liar.tell(lambda sock, _, answer=answer: sock.sendall(answer), after)  # type: ignore[misc]
            begun_s = time.monotonic()
            try:
                everything(config)
            except KvembError as error:
                require_named(error)
            assert time.monotonic() - begun_s < PATIENCE_S + 20 * DEADLINE_S
    liar.tell(None)
    config = reset(server, liar)
    everything(config)


@pytest.mark.parametrize("what", SLOW)
def test_an_answer_without_an_end_costs_one_deadline(what: str, server: StorageServer, liar: Liar) -> None:
    config = reset(server, liar)
    everything(config)
    for after in range(0, liar.n_answers, 4):
        liar.tell(lambda sock, _: SLOW[what](sock), after)
        begun_s = time.monotonic()
        with suppress(KvembError):
            everything(config)
        assert time.monotonic() - begun_s < PATIENCE_S
