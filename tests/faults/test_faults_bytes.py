"""Bytes that no program of ours wrote, to live servers and from them: a typed error, bounded memory, and nothing changed."""

import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import msgpack
import numpy as np
import pytest
import redis
from chaos.cluster import FaultyCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import PATIENCE_S, add, counting_table, eventually, nodes_of, raw_part, require

import kvemb
from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.verify import verify
from kvemb.commands.status_command import repair
from kvemb.errors import KvembError, MessageError, RecordError, from_wire
from kvemb.protocol.messages import Empty
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PagedKeys
from tests.matrix import examples, one_of
from tests.raw_shard import RawShard, RawStream
from tests.real_servers import memcached_client, redis_client

IDS = np.arange(200)
METHODS = ("Describe", "Hello", "CreateTable", "GetTable", "Assign", "Erase", "Flush", "Count", "Ids", "Status", "Bye")
MANY = b"\xdd" + struct.pack(">I", 2**32 - 1)  # five bytes that claim 2**32 - 1 items
BOMBS = {
    "five bytes that claim 2**32 items": MANY,
    "the same inside a message": b"\x94\xa5kvemb\x01\xa8PushPart" + MANY,
    "five bytes that claim a text of 4 GB": b"\xdb" + struct.pack(">I", 2**32 - 1),
    "five bytes that claim 4 GB of data": b"\xc6" + struct.pack(">I", 2**32 - 1),
    "4 MiB of empty maps": b"\xdd" + struct.pack(">I", 4 << 20) + b"\x80" * (4 << 20),
    "4 MiB of empty maps in small lists": b"\xdc\x0f\xff" + (b"\xdc\x03\xff" + b"\x80" * 1023) * 4095,
    "lists in lists in lists": b"\x91" * 200_000 + b"\xc0",
    "maps in maps in maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "a time": msgpack.packb(msgpack.Timestamp(1, 1)),
    "nothing": b"",
}


def resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


@pytest.fixture
def table(single: FaultyCluster) -> Iterator[kvemb.Table]:
    """Rows of ones on a cluster of one shard."""
    with kvemb.connect(single.url, timeout_s=20) as cluster:
        made = counting_table(cluster, "bytes")
        made.assign(IDS, np.ones((len(IDS), 4)), timeout_s=PATIENCE_S)
        yield made


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_message_error_and_takes_no_memory(name: str, single: FaultyCluster, table: kvemb.Table) -> None:
    before = resident_bytes(single.shards[0].pid)
    k = None
    with RawShard(single.shard_proxies[0].address) as shard:
        k = shard.status().k
        for method in METHODS:
            reply = shard.raw(method, BOMBS[name])
            assert isinstance(from_wire(reply.error), MessageError)
        with RawStream(shard) as stream:
            stream.send(BOMBS[name])
            assert isinstance(stream.error(), MessageError)
            with pytest.raises((StopIteration, grpc.RpcError)):
                stream.next()  # the stream is over
        assert shard.status().k == k
    assert resident_bytes(single.shards[0].pid) - before < 150 << 20
    require(table, IDS, 1)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_to_a_shard_are_answered_and_change_nothing(data: st.DataObject, single: FaultyCluster, table: kvemb.Table) -> None:
    with RawShard(single.shard_proxies[0].address) as shard:
        whole = raw_part(table.definition, IDS, "nobody", 2**30, 1).encode()
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, len(damaged)))
            damaged[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=6))
        sent = data.draw(st.sampled_from([bytes(damaged), data.draw(st.binary(max_size=60)), whole[: len(damaged) // 2]]))
        with RawStream(shard) as stream:
            stream.send(sent)
            assert isinstance(stream.error(), KvembError)
        if not sent.startswith(whole[:8]):  # no message at all: no method may take it
            method = data.draw(st.sampled_from(METHODS))
            assert sent == Empty().encode() or shard.raw(method, sent).error
    require(table, IDS, 1)


def test_bytes_that_are_no_grpc_end_that_connection_only(single: FaultyCluster, table: kvemb.Table) -> None:
    proxy = single.shard_proxies[0]
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100_000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000, b"\x16\x03\x01" * 50):
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as sock:
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except OSError:
                pass  # closed by the shard, which is right
    add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    require(table, IDS, 2)


def foreign_write(local: FaultyCluster, table: kvemb.Table, row: int, value: bytes | None) -> None:
    """Put a value of another program under a row's key, or nothing."""
    server = local.servers[int(nodes_of(table, 3, np.array([row]))[0])]
    if server.kind == "memcached":
        key = RowKeys(table.definition.tag, np.array([row], np.uint64)).encode().tobytes().decode()
        with closing(memcached_client(server)) as client:
            if value is None:
                client.delete(key, noreply=False)
            else:
                client.set(key, value, noreply=False)
    else:
        keys = bucket_keys(table, row)
        with redis_client(server) as client:
            if value is None:
                client.hdel(keys.encode().tobytes(), keys.fields().tobytes())
            else:
                client.hset(keys.encode().tobytes(), keys.fields().tobytes(), value)


def bucket_keys(table: kvemb.Table, row: int) -> BucketKeys:
    """Where a row lies on Redis and Valkey."""
    keys = table.definition.keys(np.array([row], np.uint64), pages=True)
    assert isinstance(keys, BucketKeys)
    return keys


def another_rows_record(table: kvemb.Table, size: int) -> bytes:
    """A record of the right size and schema that belongs to another id."""
    record = table.definition.record
    records = record.encode(np.array([9999], np.uint64), (1 << 48) + 1, np.full((1, 4), 7, np.float32), np.empty((1, 0), np.float32))
    assert records.shape[1] == size
    return bytes(records.tobytes())


FOREIGN: dict[str, Callable[[kvemb.Table, int], bytes]] = {
    "empty": lambda table, size: b"",
    "short": lambda table, size: b"x" * (size - 1),
    "long": lambda table, size: b"x" * (size + 1),
    "another schema": lambda table, size: bytes(size),
    "protocol text": lambda table, size: (b"VA 5 c1\r\n$-1\r\nEN\r\n+OK\r\n" * size)[:size],
    "another row's record": another_rows_record,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_value_under_a_rows_key_is_named_and_never_used(what: str, local: FaultyCluster, connected: kvemb.Cluster) -> None:
    table = counting_table(connected, "foreign")
    row = list(FOREIGN).index(what) + 1
    add(table, np.array([row, 500 + row])).wait_applied(timeout_s=PATIENCE_S)
    foreign_write(local, table, row, FOREIGN[what](table, table.definition.record.size_bytes))
    with pytest.raises(RecordError, match=rf"\b{row}\b"):
        table.pull([500 + row, row], timeout_s=PATIENCE_S)
    require(table, np.array([500 + row]), 1)
    add(table, np.array([row, 500 + row])).wait_applied(timeout_s=PATIENCE_S)  # its owner knows what the row was
    require(table, np.array([row, 500 + row]), 2)


@pytest.mark.parametrize("cache_mb", one_of(0, 64))
def test_rows_that_another_program_wrote_over_come_back_with_the_next_push_or_repair(kind: str, cache_mb: int) -> None:
    with (
        FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}, servers={"cache_mb": cache_mb}) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as c,
    ):
        table = counting_table(c, "foreign")
        some = np.arange(500)
        add(table, some).wait_applied(timeout_s=PATIENCE_S)
        size = table.definition.record.size_bytes

        def meddle() -> None:
            for row in range(0, 100, 2):  # rows of every kind; those above 500 do not exist at first
                value = list(FOREIGN.values())[row // 2 % len(FOREIGN)](table, size)
                foreign_write(local, table, row, value)
                foreign_write(local, table, 600 + row, value)

        meddle()
        add(table, np.arange(800)).wait_applied(timeout_s=PATIENCE_S)
        require(table, some, 2)
        require(table, np.arange(500, 800), 1)
        meddle()
        repair(c.config, all_nodes=True)
        require(table, some, 2)
        require(table, np.arange(500, 800), 1)
        meddle()
        table.erase(np.arange(50), timeout_s=PATIENCE_S)
        add(table, np.arange(800)).wait_applied(timeout_s=PATIENCE_S)
        require(table, np.arange(50), 1)
        require(table, np.arange(50, 500), 3)
        assert len(table) == 800


def saved_rows(url: str) -> dict[str, tuple[list[int], list[float]]]:
    """By table of a checkpoint: its ids, ascending, and the distinct values of its rows."""
    verify(url).require_good()
    chain = open_chain(url)
    found = {}
    for saved in chain.newest.tables:
        blocks = [block for shard in range(chain.newest.n_shards) for block in chain.rows(saved.definition, shard)]
        ids, weights = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("ids", "weights"))
        found[saved.definition.name] = np.sort(ids).tolist(), np.unique(weights).tolist()
    return found


@pytest.mark.parametrize("weights_only", one_of(False, True))
def test_a_save_has_the_rows_that_another_program_wrote_over_or_deleted_in_storage(kind: str, weights_only: bool, tmp_path: Path) -> None:
    with (
        FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}, servers={"cache_mb": 0}) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as c,
    ):
        table, ids = counting_table(c, "foreign"), np.arange(500)
        add(table, ids).wait_applied(timeout_s=PATIENCE_S)
        for row, make in enumerate(FOREIGN.values()):
            foreign_write(local, table, 70 * row, make(table, table.definition.record.size_bytes))
        foreign_write(local, table, 450, None)
        if kind != "memcached":
            key = bucket_keys(table, 451).encode().tobytes()
            with redis_client(local.servers[int(nodes_of(table, 3, np.array([451]))[0])]) as client:
                client.delete(key)
                client.rpush(key, "x")
        c.save(str(tmp_path / "a"), weights_only=weights_only)
        assert saved_rows(str(tmp_path / "a")) == {"foreign": (ids.tolist(), [1.0])}
        add(table, ids).wait_applied(timeout_s=PATIENCE_S)
        require(table, ids, 2)


def test_a_save_has_the_pages_that_another_program_replaced_in_storage(kind: str, tmp_path: Path) -> None:
    if kind == "memcached":
        pytest.skip("memcached keeps no pages and knows one type of value")
    with FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}) as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
        table, ids = paged_table(cluster), np.arange(4000)
        add(table, ids).wait_applied(timeout_s=PATIENCE_S)
        for number, what in enumerate(OTHER_TYPES):
            replace_page(local, table, 7 + 500 * number, what)
        cluster.save(str(tmp_path / "a"))
        assert saved_rows(str(tmp_path / "a")) == {"pages": (ids.tolist(), [1.0])}
        add(table, ids).wait_applied(timeout_s=PATIENCE_S)
        require(table, ids, 2)


@pytest.mark.parametrize("make", ["rpush", "sadd"])
def test_a_value_of_another_type_under_a_rows_key_is_written_over_too(
    make: str, kind: str, local: FaultyCluster, connected: kvemb.Cluster
) -> None:
    if kind == "memcached":
        pytest.skip("memcached knows one type of value")
    table, row = counting_table(connected, "foreign_types"), ["rpush", "sadd"].index(make)
    add(table, np.array([row, 9 + row])).wait_applied(timeout_s=PATIENCE_S)
    key = bucket_keys(table, row).encode().tobytes()
    with redis_client(local.servers[int(nodes_of(table, 3, np.array([row]))[0])]) as client:
        client.delete(key)
        getattr(client, make)(key, "x")
    add(table, np.array([row, 9 + row])).wait_applied(timeout_s=PATIENCE_S)
    require(table, np.array([row, 9 + row]), 2)


OTHER_TYPES: dict[str, Callable[[redis.Redis, bytes], object]] = {
    "list": lambda client, key: client.rpush(key, "a"),
    "set": lambda client, key: client.sadd(key, "a"),
    "sorted set": lambda client, key: client.zadd(key, {"a": 1.0}),
    "hash": lambda client, key: client.hset(key, "a", "b"),
    "stream": lambda client, key: client.xadd(key, {"a": "b"}),
    "short text": lambda client, key: client.set(key, b"x" * 50),
    "long text": lambda client, key: client.set(key, b"x" * (32 << 20)),
    "bytes behind the end": lambda client, key: client.append(key, b"x" * 100),
}


@pytest.mark.parametrize("cache_mb", [0, 64])
def test_a_page_that_another_program_replaced_is_named_and_every_row_of_it_comes_back(kind: str, cache_mb: int) -> None:
    if kind == "memcached":
        pytest.skip("memcached keeps no pages and knows one type of value")
    faulty = FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2, "on_lost_node": "fail"}, servers={"cache_mb": cache_mb})
    with faulty as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
        table = paged_table(cluster)
        ids, expected = np.arange(4000), 1
        add(table, ids).wait_applied(timeout_s=PATIENCE_S)
        for number, what in enumerate(OTHER_TYPES):
            row = 7 + 500 * number
            key = replace_page(local, table, row, what)
            if what not in ("bytes behind the end", "short text"):  # the former do no harm; behind the latter a row looks like none
                with pytest.raises(RecordError, match=rf"node \S+, table 'pages', id {row} \(key {key}\)"):
                    table.pull([row], timeout_s=PATIENCE_S)
            if number % 2:
                add(table, ids).wait_applied(timeout_s=PATIENCE_S)
                expected += 1
            else:
                repair(cluster.config, all_nodes=True)
            table.flush(timeout_s=PATIENCE_S)
            eventually(lambda: np.unique(table.pull(ids, timeout_s=PATIENCE_S)).tolist() == [expected], f"{what}: every row is {expected}")  # noqa: B023
        assert len(table) == 4000


def test_a_shard_that_replays_its_journal_over_a_page_of_another_type_brings_it_back(kind: str) -> None:
    if kind == "memcached":
        pytest.skip("memcached keeps no pages and knows one type of value")
    with FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}) as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
        table, ids = paged_table(cluster), np.arange(4000)
        add(table, ids).wait_applied(timeout_s=PATIENCE_S)
        for server in local.servers:
            server.process.signal(signal.SIGSTOP)
        add(table, ids).wait(timeout_s=PATIENCE_S)  # journaled by both, applied by none
        for shard in local.shards:
            shard.kill()
        for server in local.servers:
            server.process.signal(signal.SIGCONT)
        for row, what in ((7, "list"), (1900, "hash"), (3900, "long text")):
            replace_page(local, table, row, what)
        for number in range(2):
            local.launch_shard(number)
        eventually(lambda: np.unique(table.pull(ids, timeout_s=PATIENCE_S)).tolist() == [2], "every row is 2")


def paged_table(cluster: kvemb.Cluster) -> kvemb.Table:
    return cluster.create_table("pages", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), num_ids=4000)


def replace_page(local: FaultyCluster, table: kvemb.Table, row: int, what: str) -> str:
    """Let another program write under the key of a row's page; return the key."""
    keys = table.definition.keys(np.array([row], np.uint64), pages=True)
    assert isinstance(keys, PagedKeys)
    key = keys.encode().tobytes()
    with redis_client(local.servers[int(nodes_of(table, 3, np.array([row]))[0])]) as client:
        if what != "bytes behind the end":
            client.delete(key)
        OTHER_TYPES[what](client, key)
    return key.decode()
