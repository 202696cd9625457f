"""What a trainer does in the tests of faults: one table of whole numbers, pushes that add, pulls that check."""

import queue
import time
from collections.abc import Callable

import grpc
import numpy as np

import kvemb
from kvemb.client.ack import Ack
from kvemb.errors import KvembError, from_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import Message, TableRows
from kvemb.protocol.messages import (
    SERVICE,
    DescribeReply,
    Empty,
    HelloReply,
    HelloRequest,
    PushPart,
    PushReply,
    Reply,
    StatusReply,
    digest_tables,
)
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from tests.owners import shard_of

PATIENCE_S = 100.0
DIM = 4


def counting_table(cluster: kvemb.Cluster, name: str) -> kvemb.Table:
    """Rows of zeros to which pushes of -1 add one."""
    return cluster.create_table(
        name,
        dim=DIM,
        optimizer=kvemb.optim.sgd(lr=1.0),
        initializer=kvemb.init.zeros(),
        exist_ok=True,
    )


def add(table: kvemb.Table, ids: np.ndarray, much: float = 1.0) -> Ack:
    """Push so that every row grows."""
    return table.push(ids, np.full((len(ids), DIM), -much, np.float32), timeout_s=PATIENCE_S)


def require(table: kvemb.Table, ids: np.ndarray, much: float) -> None:
    """Every weight of every row has that value."""
    rows = table.pull(ids, timeout_s=PATIENCE_S)
    assert np.unique(rows).tolist() == [much]


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds; errors of a cluster that is still recovering count as "not yet"."""
    deadline, last = Deadline.after(PATIENCE_S), ""
    while not deadline.expired:
        try:
            if holds():
                return
        except KvembError as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {PATIENCE_S} s; last: {last}")


def nodes_of(table: kvemb.Table, n_nodes: int, ids: np.ndarray) -> np.ndarray:
    """The number of the node that holds each id: of our cluster map, or of a Redis Cluster whose slots were dealt out evenly, in order."""
    config = table.cluster.config.storage
    slots = table.definition.keys(ids.astype(np.uint64), pages=config.kind != "memcached").slots()
    if config.kind != "redis-cluster":
        return np.asarray(ClusterMap.first(len(config.nodes), 1).slot_nodes[slots])
    bounds = np.array([N_SLOTS * node // n_nodes for node in range(1, n_nodes)])
    return np.searchsorted(bounds, slots, side="right")


class RawShard:
    """A shard spoken to message by message, as no client of ours would."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)

    def call(self, method: str, request: Message, reply_type: "type[Message]") -> Message:
        """One call; raises what the shard answers."""
        reply = self.raw(method, request.encode())
        if reply.error:
            raise from_wire(reply.error)
        return reply_type.decode(reply.body)

    def raw(self, method: str, data: bytes) -> Reply:
        """Any bytes as a request."""
        return Reply.decode(self.channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=PATIENCE_S, wait_for_ready=True))

    def hello(self, trainer: str, incarnation: int = 0) -> HelloReply:
        """Introduce a trainer."""
        about = self.call("Describe", Empty(), DescribeReply)
        assert isinstance(about, DescribeReply)
        reply = self.call("Hello", HelloRequest(trainer, incarnation, about.cluster_id, 1), HelloReply)
        assert isinstance(reply, HelloReply)
        return reply

    def status(self) -> StatusReply:
        """What operators see."""
        reply = self.call("Status", Empty(), StatusReply)
        assert isinstance(reply, StatusReply)
        return reply

    def close(self) -> None:
        """End the channel."""
        self.channel.close()

    def __enter__(self) -> "RawShard":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawStream:
    """A push stream, part by part; replies are taken in order."""

    def __init__(self, shard: RawShard) -> None:
        self._parts: queue.Queue[bytes | None] = queue.Queue()
        self._call = shard.channel.stream_stream(f"/{SERVICE}/Push")(iter(self._parts.get, None), timeout=PATIENCE_S)

    def send(self, part: PushPart | bytes) -> None:
        """Send a part, or any bytes."""
        self._parts.put(part if isinstance(part, bytes) else part.encode())

    def next(self) -> PushReply:
        """The next reply."""
        return PushReply.decode(next(self._call))

    def outcome(self) -> PushReply:
        """The next reply that is no mere acceptance."""
        while True:
            reply = self.next()
            if reply.state != "accepted":
                return reply

    def error(self) -> KvembError:
        """The next reply, which must be a refusal."""
        reply = self.outcome()
        assert reply.state == "failed", reply
        return from_wire(reply.error)

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it."""
        return bool(self._call.is_active())

    def end(self) -> None:
        """Send nothing more."""
        self._parts.put(None)

    def close(self) -> None:
        """End the stream."""
        self._parts.put(None)
        self._call.cancel()

    def __enter__(self) -> "RawStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def raw_part(
    definition: TableDef, ids: np.ndarray, trainer: str, incarnation: int, sequence: int, *, much: float = 1.0, more: bool = False
) -> PushPart:
    """A part that adds to rows, with whatever identity."""
    ids = np.sort(ids.astype(np.uint64))
    grads = np.full((len(ids), definition.dim), -much, np.float32)
    rows = TableRows(definition.name, definition.schema, ids, grads)
    return PushPart(trainer, incarnation, sequence, sequence, more, [rows], digest_tables([rows]))


def ids_of_shard(shard: int, n_shards: int, n: int) -> np.ndarray:
    """The first n ids that belong to a shard: int64."""
    ids = np.arange(40 * n, dtype=np.uint64)
    return ids[shard_of(ids, n_shards) == shard][:n].astype(np.int64)
