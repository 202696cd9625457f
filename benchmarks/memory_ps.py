"""A classic parameter server, as a peer: one shard that keeps its rows in its own memory and serves pulls and pushes over gRPC.

    python -m benchmarks.memory_ps        prints its port; ends when its standard input does

It has our messages, update rules and row index, and none of what storage outside costs and gives: no storage, no journal, no versions, no
exactly-once. Pushes are applied when they arrive; the reply says that they are. What must not live here: clients (memory_ps_client).
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.row_index import RowIndex
from kvemb.errors import KvembError, to_wire
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES, Message, TableRows
from kvemb.protocol.messages import SERVICE as PATH
from kvemb.protocol.messages import CreateTableRequest, Empty, Reply
from kvemb.schema.table_def import TableDef
from paramserver.optim import build_optimizer

_THREADS = 4
_FIRST_ROWS = 1024


class PullRows(Message):
    """Ids of each table (dim 0)."""

    tables: list[TableRows]


class PulledRows(Message):
    """Their rows."""

    tables: list[TableRows]


class PushRows(Message):
    """Gradients of distinct ids, to be applied now."""

    tables: list[TableRows]


class MemoryRows:
    """The rows of one table on one shard, in arrays. Not thread-safe.

    Args:
        definition: of the table.
    """

    def __init__(self, definition: TableDef) -> None:
        self._definition, self._optimizer = definition, build_optimizer(definition.optimizer)
        self._index = RowIndex()  # the number of an id is its place in the arrays, from 1 on
        self._weights = np.empty((_FIRST_ROWS, definition.dim), np.float32)
        self._state = np.empty((_FIRST_ROWS, definition.record.state_size), np.float32)
        self._step = 0

    def __len__(self) -> int:
        return len(self._index)

    def pull(self, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return rows: float32 [n, dim]; those that no push created as their first push will find them."""
        places = self._index.get(ids).view(np.int64) - 1
        missing = places < 0
        if not missing.any():
            return self._weights.take(places, axis=0)
        rows = self._weights.take(np.maximum(places, 0), axis=0)
        rows[missing] = self._definition.initial_rows(ids[missing])
        return rows

    def push(self, pushed: TableRows) -> None:
        """Apply gradients."""
        places = self._places(pushed.ids)
        hyper = pushed.hyper or self._definition.optimizer.defaults()
        self._step += 1
        old_weights, old_state = self._weights.take(places, axis=0), self._state.take(places, axis=0)
        self._weights[places], self._state[places] = self._optimizer.update(old_weights, old_state, pushed.rows, hyper, self._step)

    def _places(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where these rows are, which are created if need be."""
        places = self._index.get(ids)
        new = np.flatnonzero(places == 0)
        if len(new):
            n_before = len(self._index)
            places[new] = np.arange(n_before, n_before + len(new), dtype=np.uint64) + np.uint64(1)
            self._index.put(ids[new], places[new])
            self._grow(len(self._index))
            created = slice(n_before, len(self._index))
            self._weights[created] = self._definition.initial_rows(ids[new])
            self._state[created] = self._optimizer.initial_state(len(new), self._definition.dim)
        return places.view(np.int64) - 1

    def _grow(self, n_rows: int) -> None:
        n_more = max(n_rows, 2 * len(self._weights)) - len(self._weights)
        if n_rows > len(self._weights):
            self._weights, self._state = (
                np.concatenate([old, np.empty((n_more, old.shape[1]), np.float32)]) for old in (self._weights, self._state)
            )


class MemoryPs:
    """The verbs of a shard; one at a time."""

    def __init__(self) -> None:
        self._tables: dict[str, MemoryRows] = {}
        self._lock = threading.Lock()

    def create(self, request: CreateTableRequest) -> Message:
        """Make a table, or leave it as it is."""
        definition = TableDef.from_dict(request.table)
        with self._lock:
            self._tables.setdefault(definition.name, MemoryRows(definition))
        return Empty()

    def pull(self, request: PullRows) -> Message:
        """Read rows."""
        with self._lock:
            return PulledRows([TableRows(one.table, one.schema, one.ids, self._tables[one.table].pull(one.ids)) for one in request.tables])

    def push(self, request: PushRows) -> Message:
        """Apply gradients."""
        with self._lock:
            for rows in request.tables:
                self._tables[rows.table].push(rows)
        return Empty()


def serve(verbs: MemoryPs) -> tuple["grpc.Server", int]:
    """Start a server on a free loopback port; return it and the port."""
    methods = {
        "CreateTable": _handler(CreateTableRequest, verbs.create),
        "Pull": _handler(PullRows, verbs.pull),
        "Push": _handler(PushRows, verbs.push),
    }
    limits = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=limits)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PATH, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def _handler(request_type: type[Message], verb: Callable[..., Message]) -> "grpc.RpcMethodHandler":
    def handle(data: bytes, _: object) -> bytes:
        try:
            return Reply({}, verb(request_type.decode(data)).encode()).encode()
        except (KvembError, KeyError) as error:
            return Reply(to_wire(error), b"").encode()

    return grpc.unary_unary_rpc_method_handler(handle)


def main() -> None:
    """Serve until standard input ends."""
    server, port = serve(MemoryPs())
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    main()
