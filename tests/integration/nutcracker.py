"""A server that speaks RESP as nutcracker (twemproxy) does: a few commands of one key. At any other it ends the connection."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COMMANDS = {b"PING", b"GET", b"SET", b"DEL", b"STRLEN", b"HSET", b"HMGET", b"HLEN", b"HKEYS", b"HDEL", b"SETRANGE", b"GETRANGE", b"TYPE"}


class Nutcracker(socketserver.ThreadingTCPServer):
    """Counts the keys that clients left, in `values`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.values: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}"


class _Client(socketserver.StreamRequestHandler):
    server: Nutcracker

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            self.server.asked.append(words[0].upper())
            if self.server.asked[-1] not in COMMANDS:
                return
            self.wfile.write(self.answer(*words))

    def answer(self, name: bytes, *words: bytes) -> bytes:
        values = self.server.values
        if name == b"SET":
            values[words[0]] = words[1]
            return b"+OK\r\n"
        if name == b"GET":
            value = values.get(words[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        if name == b"DEL":
            return b":%d\r\n" % sum(values.pop(word, None) is not None for word in words)
        return b"+PONG\r\n" if name == b"PING" else b":0\r\n"


@contextmanager
def running_nutcracker() -> Iterator[Nutcracker]:
    with Nutcracker() as server:
        thread = threading.Thread(target=server.serve_forever, name="nutcracker", daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)
