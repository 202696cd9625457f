"""Rows in buckets over RESP: golden requests, and a small server that executes them, whose replies come in pieces of any size."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import coalesce_keys
from kvemb.stores.node_batch import NodeSteps, group_by_node, raise_row_errors, unexpected_value
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.replies import RowsStep, UnexpectedValueError
from kvemb.wire.resp.bucket_values import BucketRuns, BucketValuesReply
from kvemb.wire.resp.resp_codec import RespCodec
from tests.unit.resp_words import first_command

ASK = b"*1\r\n$6\r\nASKING\r\n"
FILLER = b"kvemb: no row; it makes this hash a hash table, which a server searches faster."
TRAILING = b"*2\r\n$-1\r\n$76\r\n"


class HashServer:
    """What Redis does with these commands."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, dict[bytes, bytes]] = {}
        self.strings: set[bytes] = set()
        self.n_commands = 0

    def answer(self, request: bytes) -> bytes:
        out = b""
        while request:
            words, request = first_command(request)
            self.n_commands += 1
            wrong = len(words) > 1 and words[1] in self.strings
            out += b"-WRONGTYPE Operation\r\n" if wrong else getattr(self, words[0].decode().lower())(*words[1:])
        return out

    def asking(self) -> bytes:
        return b"+OK\r\n"

    def hmget(self, key: bytes, *fields: bytes) -> bytes:
        values = [self.hashes.get(key, {}).get(field) for field in fields]
        return b"*%d\r\n" % len(values) + b"".join(b"$-1\r\n" if v is None else b"$%d\r\n%s\r\n" % (len(v), v) for v in values)

    def hset(self, key: bytes, *pairs: bytes) -> bytes:
        fields = self.hashes.setdefault(key, {})
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return b":%d\r\n" % (len(fields) - before)

    def hdel(self, key: bytes, *fields: bytes) -> bytes:
        return b":%d\r\n" % sum(self.hashes.get(key, {}).pop(field, None) is not None for field in fields)


def feed(steps: list[RowsStep], server: HashServer, cuts: list[int]) -> None:
    """Hand a server's answers to the replies in pieces of these sizes, again and again, with something of another reply behind them."""
    for step in steps:
        stream = server.answer(bytes(step.request))
        assert not step.reply_bytes or step.reply_bytes >= len(stream) or isinstance(step.reply, BucketValuesReply | FixedSizeValuesReply)
        stream += TRAILING
        left, at, turn = b"", 0, 0
        while not step.reply.done:
            assert at < len(stream)
            size = cuts[turn % len(cuts)]
            left, at, turn = left + stream[at : at + size], at + size, turn + 1
            left = left[step.reply.feed(np.frombuffer(left, dtype=np.uint8)) :]
        assert (left + stream[at:]) == TRAILING


def grouped(ids: NDArray[np.uint64], n_buckets: int) -> BucketKeys:
    keys = group_by_node(BucketKeys(b"tab", ids, n_buckets, name="user"), None).keys
    assert isinstance(keys, BucketKeys)
    return keys


Values = tuple[NDArray[np.uint8], NDArray[np.bool_], list[RowsStep]]


def read(
    server: HashServer,
    codec: RespCodec,
    keys: BucketKeys,
    size: int,
    wanted: int,
    cuts: list[int],
    foreign: Any = None,
) -> Values:
    out, found = np.zeros((len(keys), wanted), np.uint8), np.zeros(len(keys), dtype=bool)
    steps = codec.read_steps(keys, size, out, found, None, foreign)
    feed(steps, server, cuts)
    return out, found, steps


def write(server: HashServer, codec: RespCodec, keys: BucketKeys, records: NDArray[np.uint8], cuts: list[int]) -> list[RowsStep]:
    steps = codec.write_steps(keys, RecordsToWrite(records), None, np.ones(len(keys), np.uint8))
    feed(steps, server, cuts)
    return steps


def test_golden_requests() -> None:
    keys = BucketKeys(b"tab", np.array([1, 2], dtype=np.uint64), 1)
    records = np.frombuffer(b"0123456789" * 14, dtype=np.uint8).reshape(2, 70)
    fields = [bytes(field) for field in keys.fields()]
    out, found = np.zeros((2, 70), np.uint8), np.zeros(2, dtype=bool)
    asked = {
        "read": RespCodec().read_steps(keys, 70, out, found, None),
        "write": RespCodec().write_steps(keys, RecordsToWrite(records), None, np.zeros(2, np.uint8)),
        "erase": RespCodec(asking=True).erase_steps(keys, np.zeros(2, np.uint8)),
    }
    sent = {what: b"".join(bytes(step.request) for step in steps) for what, steps in asked.items()}
    assert sent["read"] == b"*4\r\n$5\r\nHMGET\r\n$8\r\ntab{DLH}\r\n" + b"".join(b"$8\r\n%s\r\n" % field for field in fields)
    rows = b"".join(b"$8\r\n%s\r\n$70\r\n%s\r\n" % (field, bytes(record)) for field, record in zip(fields, records, strict=True))
    assert sent["write"] == b"*6\r\n$4\r\nHSET\r\n$8\r\ntab{DLH}\r\n" + rows
    assert sent["erase"] == ASK + b"*4\r\n$4\r\nHDEL\r\n$8\r\ntab{DLH}\r\n" + b"".join(b"$8\r\n%s\r\n" % field for field in fields)


def command_by_command(name: bytes, keys: BucketKeys, values: list[bytes], filler: bytes, ask: bytes, most: int = 1024) -> bytes:
    """The same requests, written one word after another, of so many rows of a bucket at most."""
    names, fields, at, out = [bytes(key) for key in keys.encode()], [bytes(field) for field in keys.fields()], 0, b""
    while at < len(names):
        end = at + 1
        while end < len(names) and names[end] == names[at] and end - at < most:
            end += 1
        words = [name, names[at], *([b"-", filler] if filler else [])]
        for row in range(at, end):
            words += [fields[row], *values[row : row + 1]]
        out += ask + b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        at = end
    return out


@pytest.mark.parametrize("ask", [b"", ASK])
@pytest.mark.parametrize("n_tables", [1, 3])
@pytest.mark.parametrize("n_buckets", [1, 4, 256, 1 << 13, 1 << 15])  # the heads of few are kept, those of many made each time
def test_requests_are_those_that_are_written_word_by_word(n_buckets: int, n_tables: int, ask: bytes) -> None:
    ids = np.random.default_rng(n_buckets).integers(0, 1 << 63, 1020, dtype=np.uint64)  # runs of 1 to 1,020 rows, one request
    tables = [BucketKeys(b"t%02d" % number, ids[number::n_tables], n_buckets) for number in range(n_tables)]
    keys = group_by_node(coalesce_keys(tables), None).keys
    assert isinstance(keys, BucketKeys)
    codec = RespCodec(asking=bool(ask))
    done, short = np.zeros(len(keys), np.uint8), np.random.default_rng(0).integers(0, 255, (len(keys), 20), dtype=np.uint8)
    for name, steps, values, filler in (
        (b"HMGET", codec.read_steps(keys, 20, np.empty_like(short), done.view(bool), None), [], b""),
        (b"HSET", codec.write_steps(keys, RecordsToWrite(short), None, done), [bytes(row) for row in short], FILLER),
        (b"HDEL", codec.erase_steps(keys, done), [], b""),
    ):
        most = 1 if name == b"HMGET" and n_buckets * n_tables >= 8 * len(keys) else 1024  # rows that lie far apart are read one by one
        assert b"".join(bytes(step.request) for step in steps) == command_by_command(name, keys, values, filler, ask, most)


def test_a_bucket_of_short_records_gets_a_long_field_that_is_no_row() -> None:
    keys, server = grouped(np.arange(9, dtype=np.uint64), 2), HashServer()
    write(server, RespCodec(), keys, np.full((9, 64), 7, np.uint8), [1 << 20])
    assert all(len(fields[b"-"]) > 64 for fields in server.hashes.values())
    write(server, RespCodec(), keys, np.full((9, 65), 7, np.uint8), [1 << 20])
    longer = HashServer()
    write(longer, RespCodec(), keys, np.full((9, 65), 7, np.uint8), [1 << 20])
    assert all(b"-" not in fields for fields in longer.hashes.values())


def test_a_bucket_of_a_compact_table_holds_rows_only() -> None:
    fast, server = grouped(np.arange(9, dtype=np.uint64), 2), HashServer()
    compact = BucketKeys(fast.tag, fast.ids, 2, compact=True)
    assert compact[2:].compact
    assert compact[np.arange(3)].compact
    assert coalesce_keys([compact, compact]).coalesce_key == (2, True) != fast.coalesce_key
    write(server, RespCodec(), compact, np.full((9, 64), 7, np.uint8), [1 << 20])
    assert sorted(field for fields in server.hashes.values() for field in fields) == sorted(bytes(field) for field in fast.fields())


def test_a_command_asks_for_one_bucket_and_for_no_more_rows_than_a_server_answers_at_once() -> None:
    keys, server = grouped(np.arange(5000, dtype=np.uint64), 2), HashServer()
    _, found, _ = read(server, RespCodec(), keys, 76, 76, [1 << 20])
    assert not found.any()
    assert 6 <= server.n_commands <= 9
    few, server = grouped(np.arange(5000, dtype=np.uint64), 64), HashServer()
    read(server, RespCodec(), few, 76, 76, [1 << 20])
    assert 64 <= server.n_commands <= 68


# Bytes that look like the framing of replies, over and over.
TRICKY = st.sampled_from([b"$-1\r\n", b"$20\r\n", b"*3\r\n", b"\r\n$-1\r\n$20", b"\0", b"-ERR\r\n", b":1\r\n"])


@given(
    ids=st.lists(st.integers(0, 400), unique=True, max_size=120),
    there=st.sets(st.integers(0, 400)),
    n_buckets=st.sampled_from([1, 4, 64, 1 << 15]),
    filling=TRICKY,
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    asking=st.booleans(),
    wanted=st.sampled_from([20, 13, 8]),
)
def test_every_row_comes_however_the_replies_are_cut(
    ids: list[int], there: set[int], n_buckets: int, filling: bytes, cuts: list[int], asking: bool, wanted: int
) -> None:
    server, codec = HashServer(), RespCodec(asking=asking, rows_per_step=16)
    stored = grouped(np.array(sorted(there), dtype=np.uint64), n_buckets)
    body = np.frombuffer((filling * 20)[:12], dtype=np.uint8)
    records = np.concatenate([stored.ids.view(np.uint8).reshape(-1, 8), np.tile(body, (len(stored), 1))], axis=1)
    write(server, codec, stored, records, cuts)
    keys = grouped(np.array(ids, dtype=np.uint64), n_buckets)
    out, found, _ = read(server, codec, keys, 20, wanted, cuts)
    assert found.tolist() == [int(one) in there for one in keys.ids]
    assert (out[found, :8].reshape(-1, 8).copy().view("<u8")[:, 0] == keys.ids[found]).all()
    assert (out[found, 8:] == body[: wanted - 8]).all()
    gone = codec.erase_steps(keys, np.ones(len(keys), np.uint8))
    feed(gone, server, cuts)
    assert not read(server, codec, keys, 20, 20, cuts)[1].any()


@given(
    sizes=st.lists(st.sampled_from([None, 0, 5, 20, 20, 20, 300]), min_size=1, max_size=60),
    wrong=st.sets(st.integers(0, 3)),
    n_buckets=st.sampled_from([1, 4]),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    asking=st.booleans(),
)
def test_values_of_another_size_and_buckets_that_are_none_are_told_row_by_row(
    sizes: list[int | None], wrong: set[int], n_buckets: int, cuts: list[int], asking: bool
) -> None:
    server, keys = HashServer(), grouped(np.arange(len(sizes), dtype=np.uint64), n_buckets)
    names = [bytes(key) for key in keys.encode()]
    server.strings = {name for name, bucket in zip(names, keys.buckets, strict=True) if int(bucket) in wrong}
    for name, one, field in zip(names, keys.ids, keys.fields(), strict=True):
        if (size := sizes[int(one)]) is not None:
            server.hashes.setdefault(name, {})[bytes(field)] = b"\n" * size
    codec, foreign = RespCodec(asking=asking), np.zeros(len(keys), dtype=bool)
    _, found, _ = read(server, codec, keys, 20, 20, cuts, foreign)
    expected = [
        "foreign" if name in server.strings or sizes[int(one)] not in (None, 20) else "found" if sizes[int(one)] == 20 else "missing"
        for name, one in zip(names, keys.ids, strict=True)
    ]
    said = np.where(found, "found", np.where(foreign, "foreign", "missing")).tolist()
    assert said == expected


def test_a_refused_command_is_an_error_of_each_of_its_rows_and_of_no_other() -> None:
    server, keys = HashServer(), grouped(np.arange(40, dtype=np.uint64), 4)
    codec = RespCodec()
    records = np.zeros((40, 20), np.uint8)
    write(server, codec, keys, records, [7])
    first = bytes(keys.encode()[0])
    server.strings = {first}
    refused = {row for row in range(40) if bytes(keys.encode()[row]) == first}
    for steps in (read(server, codec, keys, 20, 20, [11])[2], write(server, codec, keys, records, [3])):
        share = NodeSteps("host:1", keys, steps)
        assert {row for row, _ in share.row_errors()} == refused
        with pytest.raises(Exception, match="value of another type in the place of this row's bucket"):
            raise_row_errors([share])


def test_a_value_of_another_size_is_an_error_that_names_its_row() -> None:
    server, keys = HashServer(), grouped(np.arange(9, dtype=np.uint64), 1)
    server.hashes[b"tab{DLH}"] = {bytes(field): b"x" * (20 if row != 5 else 21) for row, field in enumerate(keys.fields())}
    steps = RespCodec().read_steps(keys, 20, np.zeros((9, 20), np.uint8), np.zeros(9, dtype=bool), None)
    with pytest.raises(UnexpectedValueError) as caught:
        feed(steps, server, [1 << 20])
    assert "id 5 " in str(unexpected_value([NodeSteps("host:1", keys, steps)], caught.value))


def feed_all(reply: BucketValuesReply, stream: bytes, size: int) -> None:
    left = b""
    for at in range(0, len(stream), size):
        left += stream[at : at + size]
        left = left[reply.feed(np.frombuffer(left, dtype=np.uint8)) :]


@pytest.mark.parametrize(
    "stream",
    [
        b"*3\r\n$4\r\nabcd\r\n",  # another number of rows
        b":2\r\n",
        b"$4\r\nabcd\r\n",
        b"*2\r\n$4\r\nabcdXX$4\r\nabcd\r\n",
        b"*2\r\n$4\r\nabcd\r\n+OK\r\n",
        b"*2\r\n$-1\r\n$-1XX\r\n",
        b"*2\r\n$04\r\nabcd\r\n",
        b"*2\r\n" + b"x" * 5000,
    ],
)
def test_what_no_server_sends_is_refused(stream: bytes) -> None:
    for size in (1, 3, len(stream)):
        reply = BucketValuesReply(BucketRuns.of(np.array([0]), 2), 4, np.zeros((2, 4), np.uint8), np.zeros(2, dtype=bool))
        with pytest.raises(ProtocolError):
            feed_all(reply, stream, size)


def test_commands_are_short_where_records_are_large() -> None:
    keys, server = grouped(np.arange(40, dtype=np.uint64), 1), HashServer()
    steps = write(server, RespCodec(), keys, np.zeros((40, 300_000), np.uint8), [1 << 20])
    assert server.n_commands == 14  # three rows each
    assert not any(list(NodeSteps("host:1", keys, steps).row_errors()))
