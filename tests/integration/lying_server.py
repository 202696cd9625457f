"""A server that tells the truth but for one answer, the answers that are tried there, and everything that is asked of storage."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvemb.config import StorageConfig
from kvemb.coordination.shard_owners import Owner, owner_name
from kvemb.errors import NodeLostError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.pages import page_layout, paged_keys
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.storage_kinds import open_store
from kvemb.testing.store_contract import SIZE, keys_for, records_of

DEADLINE_S = 0.4
Lie = Callable[[socket.socket, bytes], bool | None]
"""Is given the client's socket and the true answer; true: the truth goes on behind it."""
ANSWERS: dict[str, bytes] = {
    "a number": b":5\r\n",
    "a huge number": b":99999999999999999999999999\r\n",
    "no number": b":x\r\n",
    "a status": b"+OK\r\n",
    "an empty value": b"$0\r\n\r\n",
    "a value of nothing": b"$-1\r\n",
    "a value of less than nothing": b"$-5\r\n",
    "a value of gigabytes": b"$99999999999\r\nxx",
    "a value without its end": b"$3\r\nabcdefg\r\n",
    "an array of nothing": b"*-1\r\n",
    "an empty array": b"*0\r\n",
    "an array of billions": b"*2147483647\r\n:1\r\n:2\r\n",
    "arrays in arrays": b"*1\r\n" * 100_000,
    "an array of all kinds": b"*4\r\n:1\r\n$-1\r\n*1\r\n+x\r\n-ERR no\r\n",
    "slots of nobody": b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$-1\r\n$4\r\nport\r\n",
    "a map (RESP3)": b"%1\r\n+a\r\n:1\r\n",
    "nothing (RESP3)": b"_\r\n",
    "a push (RESP3)": b">2\r\n+a\r\n+b\r\n",
    "text that is no text": b"$4\r\n\xff\xfe\xfd\xfc\r\n",
    "an INFO of nonsense": b"$26\r\nrun_id\r\nused_memory:lots\r\n\r\n\r\n",
    "a redirection to nowhere": b"-MOVED\r\n",
    "a redirection to no port": b"-ASK 3 host:port\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "a value of a number": b"VALUE x 0 -1\r\n",
    "an odd token": b"VA 76 c99999999999999999999\r\n",
    "a stored row without a token": b"HD\r\n",
    "a stat of nothing": b"STAT\r\nEND\r\n",
    "an empty answer": b"END\r\n",
    **{line.partition(b" ")[0].decode(): line + b"\r\n" for line in (
        b"-LOADING Redis is loading the dataset in memory", b"-MASTERDOWN Link with MASTER is down", b"-NOAUTH Authentication required.",
        b"-NOPERM this user has no permissions", b"-OOM command not allowed", b"-READONLY You can't write", b"-MISCONF cannot persist",
        b"-BUSY a script is running", b"-CLUSTERDOWN Hash slot not served", b"-TRYAGAIN Multiple keys", b"-WRONGTYPE Operation against",
        b"-NOREPLICAS Not enough good replicas", b"-NOSCRIPT No matching script", b"-ERR unknown command", b"-",
        b"SERVER_ERROR out of memory storing object", b"CLIENT_ERROR bad data chunk", b"ERROR",
    )},
}  # fmt: skip


class Liar:
    """Stands before a real server and passes everything on, but for one answer.

    Args:
        target: port of the server.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lie: Lie | None = None
        self._after = self.n_answers = 0
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="liar", daemon=True).start()

    def tell(self, lie: Lie | None, after: int = 0) -> None:
        """Put this in the place of the answer behind so many true ones, and nothing more there unless it says so; None: tell the truth."""
        self.n_answers, self._after, self._lie = 0, after, lie

    def close(self) -> None:
        for sock in [self._listener, *list(self._open)]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            self._open |= {client, server}
            back = threading.Thread(target=self._answer, args=(server, client), daemon=True)
            back.start()
            self._pass_on(client, server)
            back.join()
        self._open -= {client, server}

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 20):
                number, self.n_answers = self.n_answers, self.n_answers + 1
                lie = self._lie
                if lie is not None and number == self._after:
                    if not lie(client, data):
                        return
                else:
                    client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def everything(config: StorageConfig) -> None:
    """What trainers, shards and operators ask of storage."""
    nothing = np.empty((0, 0), np.uint8)
    zeros = np.zeros(20, np.uint64)

    def soon() -> Deadline:
        return Deadline.after(DEADLINE_S)

    with open_store(config, role="shard:0") as store:
        rows = keys_for(store, 20)
        with suppress(StorageError):  # provisioned before
            store.provision(b"c" * 16, b"g" * 8, soon())
        store.open(soon())
        store.values.put(owner_name(0), Owner(1, 1).encode(), soon())
        store.fence(0, 1, soon())
        store.kill_other_writers(soon())
        store.rows.write([WritePart(rows, records_of(rows), zeros)], soon())
        store.rows.read([ReadPart(rows, SIZE, SIZE, tokens=True)], soon())
        store.rows.erase([WritePart(rows, nothing)], soon())
        if store.capabilities.pages:
            paged = paged_keys(b"pag", np.arange(20, dtype=np.uint64), page_layout(SIZE))
            store.rows.write([WritePart(paged, records_of(paged))], soon())
            store.rows.read([ReadPart(paged, SIZE, SIZE)], soon())
            store.repair.make_way(paged, soon())
        store.nodes.stats(soon())
        (address,) = store.nodes.addresses
        nonce = store.repair.begin(address, soon(), even_if_whole=True)
        assert nonce is not None
        list(store.repair.keys_on(address, np.ones(N_SLOTS, bool), soon()) or ())
        store.repair.read(address, nonce, [ReadPart(rows, SIZE, SIZE, foreign=True)], soon())
        store.repair.report(address, nonce, 0, soon())
        over = Deadline.after(5 * DEADLINE_S)
        while not store.repair.finish(address, nonce, range(1), soon()):  # to be asked again: a lie may have hidden what was reported
            if over.expired:
                raise NodeLostError(f"node {address}: its repair has not come to an end")
        store.repair.lost_nodes(soon())
