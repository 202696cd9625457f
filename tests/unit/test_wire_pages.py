"""Rows in pages over RESP: golden requests, a small server that executes them, and integer replies against a line-by-line parser."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PagedKeys, PageLayout, page_layout, paged_keys
from kvemb.stores.node_batch import group_by_node
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.memcached.meta_codec import MetaCodec
from kvemb.wire.replies import Step
from kvemb.wire.resp.integer_replies import IntegerReplies
from kvemb.wire.resp.resp_codec import RespCodec
from tests.unit.resp_words import first_command

A, B = b"tab{DLH}AAAAAAAAAAA", b"tab{EnY}AAAAAAAAAAB"
ASK = b"*1\r\n$6\r\nASKING\r\n"
SMALL = PageLayout(20, 60)


def keys_of(ids: list[int], new: list[bool] | None = None, layout: PageLayout = SMALL) -> PagedKeys:
    return paged_keys(b"tab", np.array(ids, dtype=np.uint64), layout, None if new is None else np.array(new))


def getrange(key: bytes, start: int, end: int) -> bytes:
    first, last = b"%d" % start, b"%d" % end
    return b"*4\r\n$8\r\nGETRANGE\r\n$19\r\n%s\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (key, len(first), first, len(last), last)


def setrange(key: bytes, start: int, value: bytes) -> bytes:
    first = b"%d" % start
    return b"*4\r\n$8\r\nSETRANGE\r\n$19\r\n%s\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (key, len(first), first, len(value), value)


def sent(steps: list[Step]) -> bytes:
    return b"".join(bytes(step.request) for step in steps)


class PageServer:
    """What Redis does with these commands."""

    def __init__(self) -> None:
        self.strings: dict[bytes, bytearray] = {}
        self.n_commands = 0

    def answer(self, request: bytes) -> bytes:
        out = b""
        while request:
            words, request = first_command(request)
            self.n_commands += 1
            out += getattr(self, words[0].decode().lower())(*words[1:])
        return out

    def asking(self) -> bytes:
        return b"+OK\r\n"

    def getrange(self, key: bytes, start: bytes, end: bytes) -> bytes:
        value = bytes(self.strings.get(key, b"")[self._integer(start) : self._integer(end) + 1])
        return b"$%d\r\n%s\r\n" % (len(value), value)

    def setrange(self, key: bytes, start: bytes, value: bytes) -> bytes:
        string, at = self.strings.setdefault(key, bytearray()), self._integer(start)
        string.extend(bytes(max(0, at + len(value) - len(string))))
        string[at : at + len(value)] = value
        return b":%d\r\n" % len(string)

    @staticmethod
    def _integer(text: bytes) -> int:
        assert text == b"%d" % int(text), "Redis refuses leading zeros"
        return int(text)


def exchange(server: PageServer, steps: list[Step]) -> None:
    for step in steps:
        data = np.frombuffer(server.answer(bytes(step.request)), dtype=np.uint8)
        assert step.reply.feed(data) == len(data)
        assert step.reply.done
        assert not step.reply_bytes or step.reply_bytes >= len(data)


def read(server: PageServer, codec: RespCodec, keys: PagedKeys, size: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    out, found = np.zeros((len(keys), size), np.uint8), np.zeros(len(keys), dtype=bool)
    exchange(server, codec.read_steps(keys, keys.layout.record_bytes, out, found, None))
    return out, found


def write(server: PageServer, codec: RespCodec, keys: PagedKeys, records: NDArray[np.uint8]) -> None:
    exchange(server, codec.write_steps(keys, RecordsToWrite(records), None, np.ones(len(keys), np.uint8)))


def test_getrange_of_whole_records_and_of_their_beginnings() -> None:
    keys, codec = keys_of([0, 3, 59, 60]), RespCodec()
    for size in (20, 13):
        steps = codec.read_steps(keys, 20, np.zeros((4, size), np.uint8), np.zeros(4, dtype=bool), None)
        assert sent(steps) == b"".join(getrange(key, at, at + size - 1) for key, at in ((A, 0), (A, 60), (A, 1180), (B, 0)))


def test_setrange_makes_the_pages_of_new_rows_first() -> None:
    records = np.frombuffer(b"0123456789abcdefghij" * 3, dtype=np.uint8).reshape(3, 20)
    value, pad = bytes(records[0]), (setrange(A, 1200, b"\0"), setrange(B, 1200, b"\0"))
    rows = setrange(A, 20, value), setrange(A, 40, value), setrange(B, 20, value)
    for new, expected in (
        (None, (pad[0], rows[0], pad[0], rows[1], pad[1], rows[2])),
        ([False] * 3, rows),
        ([True] * 3, (pad[0], rows[0], rows[1], pad[1], rows[2])),
    ):
        steps = RespCodec().write_steps(keys_of([1, 2, 61], new), RecordsToWrite(records), None, np.zeros(3, np.uint8))
        assert sent(steps) == b"".join(expected)


def test_erasing_writes_the_header_of_no_row() -> None:
    steps = RespCodec().erase_steps(keys_of([5], [False]), np.zeros(1, np.uint8))
    assert sent(steps) == setrange(A, 100, bytes(12))


def test_asking_goes_before_every_command() -> None:
    record = np.ones((1, 20), np.uint8)
    asking = RespCodec(asking=True)
    assert sent(asking.read_steps(keys_of([0]), 20, record.copy(), np.zeros(1, dtype=bool), None)) == ASK + getrange(A, 0, 19)
    steps = asking.write_steps(keys_of([0]), RecordsToWrite(record), None, np.zeros(1, np.uint8))
    assert sent(steps) == ASK + setrange(A, 1200, b"\0") + ASK + setrange(A, 0, bytes(record[0]))
    assert steps[0].reply.feed(np.frombuffer(b"+OK\r\n:1201\r\n+OK\r\n:1201\r\n", dtype=np.uint8)) == 24
    assert steps[0].reply.done


@pytest.mark.parametrize("asking", [False, True])
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.booleans(), st.booleans()), unique_by=lambda row: row[0], min_size=1, max_size=60),
    st.sampled_from([12, 20, 76, 204, 780, 3000]),
    st.integers(1, 50),
)
def test_what_was_written_is_read_whatever_the_order_of_the_rows(
    asking: bool, rows: list[tuple[int, bool, bool]], size: int, rows_per_step: int
) -> None:
    server, codec = PageServer(), RespCodec(asking=asking, rows_per_step=rows_per_step)
    ids = [row for row, _, _ in rows]
    records = np.random.default_rng(len(rows)).integers(1, 256, (len(rows), size)).astype(np.uint8)
    written = np.array([there for _, there, _ in rows])
    said = keys_of(ids, [new for _, _, new in rows], page_layout(size))[np.flatnonzero(written)]
    write(server, codec, said, records[written])
    keys = keys_of(ids, None, page_layout(size))
    for wanted in {12, size}:
        out, found = read(server, codec, keys, wanted)
        np.testing.assert_array_equal(found, written)
        np.testing.assert_array_equal(out[written], records[written][:, :wanted])
    exchange(server, codec.erase_steps(said[::2], np.zeros(len(said[::2]), np.uint8)))
    left = written.copy()
    left[np.flatnonzero(written)[::2]] = False
    out, found = read(server, codec, keys, size)
    np.testing.assert_array_equal(found, left)
    np.testing.assert_array_equal(out[left], records[left])


@given(st.lists(st.integers(0, 20_000), unique=True, min_size=1, max_size=300), st.sampled_from([20, 76, 780]))
def test_in_the_order_of_kinds_new_pages_are_whole_at_once_and_steps_are_few(ids: list[int], size: int) -> None:
    server, codec, layout = PageServer(), RespCodec(), page_layout(size)
    keys = keys_of(ids, [True] * len(ids), layout)
    grouped = group_by_node(keys, None, codec.write_kinds(keys, None))
    steps = codec.write_steps(grouped.keys, RecordsToWrite(np.ones((len(ids), size), np.uint8)), None, np.zeros(len(ids), np.uint8))
    for step in steps:
        assert set(server.answer(bytes(step.request)).split(b"\r\n")) == {b":%d" % layout.page_bytes, b""}
    assert {len(string) for string in server.strings.values()} == {layout.page_bytes}
    assert server.n_commands == len(ids) + len(server.strings)
    n_kinds = len(set(codec.write_kinds(keys, None).tolist()))  # type: ignore[union-attr]
    assert len(steps) <= n_kinds + len(ids) // 1024
    reads = group_by_node(keys, None, codec.read_kinds(keys, 12))
    n_read = len(codec.read_steps(reads.keys, size, np.zeros((len(ids), 12), np.uint8), np.zeros(len(ids), dtype=bool), None))
    assert n_read <= 8


def test_rows_in_buckets_have_no_kinds_and_memcacheds_are_new_or_not() -> None:
    ids, resp, meta = np.arange(3, dtype=np.uint64), RespCodec(), MetaCodec()
    plain, bucketed = RowKeys(b"tab", ids), BucketKeys(b"tab", ids, 64)
    assert resp.read_kinds(bucketed, 12) is None
    assert resp.write_kinds(bucketed, None) is None
    assert meta.read_kinds(plain, 12) is None
    assert meta.write_kinds(plain, None) is None
    kinds = meta.write_kinds(plain, np.array([0, 7, 0], dtype=np.uint64))
    assert kinds is not None
    assert kinds.tolist() == [0, 1, 0]


def test_a_read_without_a_header_or_of_other_records_is_a_bug() -> None:
    codec = RespCodec()
    with pytest.raises(ValueError, match="read 11 of 20"):
        codec.read_steps(keys_of([1]), 20, np.zeros((1, 11), np.uint8), np.zeros(1, dtype=bool), None)
    with pytest.raises(ValueError, match="records of 20"):
        codec.read_steps(keys_of([1]), 76, np.zeros((1, 76), np.uint8), np.zeros(1, dtype=bool), None)


def test_a_value_whose_header_is_zeros_counts_as_missing() -> None:
    values = np.zeros((4, 16), np.uint8)
    values[0, 11], values[1, 12], values[3, 0] = 1, 1, 1  # the second one's first byte that is not 0 lies behind the header
    reply = FixedSizeValuesReply(b"$16\r\n", 16, b"$0\r\n\r\n", np.zeros((4, 16), np.uint8), np.zeros(4, dtype=bool), blank_bytes=12)
    for value in values:
        reply.feed(np.frombuffer(b"$16\r\n" + bytes(value) + b"\r\n", dtype=np.uint8))
    assert reply.found.tolist() == [True, False, False, True]


def test_a_missing_page_cut_anywhere_is_waited_for_and_a_wrong_end_refused() -> None:
    for cut in range(1, 6):
        reply = FixedSizeValuesReply(b"$16\r\n", 16, b"$0\r\n\r\n", np.zeros((1, 16), np.uint8), np.zeros(1, dtype=bool), blank_bytes=12)
        data = np.frombuffer(b"$0\r\n\r\n", dtype=np.uint8)
        assert reply.feed(data[:cut]) == 0
        assert reply.feed(data) == 6
        assert reply.done
        assert not reply.found[0]
    reply = FixedSizeValuesReply(b"$16\r\n", 16, b"$0\r\n\r\n", np.zeros((1, 16), np.uint8), np.zeros(1, dtype=bool), blank_bytes=12)
    with pytest.raises(ProtocolError, match="0 bytes"):
        reply.feed(np.frombuffer(b"$0\r\nxx", dtype=np.uint8))


LINES = (b":1", b":4029", b":0", b":4030", b":123456789012345678", b"-MOVED 1 h:1", b"-ERR :5", b"-ASK 7 h:2")


@given(
    st.sampled_from([b":", b"::", b"+:", b"+:+:"]),
    st.lists(st.lists(st.sampled_from(LINES), min_size=4, max_size=4), min_size=1, max_size=30),
    st.lists(st.integers(0, 2000), max_size=6),
)
def test_integers_read_as_a_line_by_line_parser_reads_them(lines: bytes, rows: list[list[bytes]], cuts: list[int]) -> None:
    answers = []
    for row in rows:
        answers.append([line if line[:1] in (b"-", kind) else b"+OK" for kind, line in zip([b"%c" % k for k in lines], row, strict=False)])
    stream = b"".join(line + b"\r\n" for row in answers for line in row)
    reply, left = IntegerReplies(lines, 4029, np.full(len(rows), 9, np.uint8)), b""
    for first, last in pairwise([0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]):
        left += stream[first:last]
        left = left[reply.feed(np.frombuffer(left, dtype=np.uint8)) :]
    left += b":77\r\n"
    assert reply.feed(np.frombuffer(left, dtype=np.uint8)) == 0
    assert (reply.done, left) == (True, b":77\r\n")
    wrong = [[line for line in row if line[:1] == b"-" or (line[:1] == b":" and int(line[1:]) > 4029)] for row in answers]
    assert reply.errors == [(row, found[0]) for row, found in enumerate(wrong) if found]
    assert not reply.out.any()


@pytest.mark.parametrize("line", [b"", b":", b":-1", b":1x", b": 1", b"+OK", b"$1", b"+QUEUED", b":1234567890123456789", b"4029"])
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected an integer"):
        IntegerReplies(b":", 4029, np.zeros(2, np.uint8)).feed(np.frombuffer(b":1\r\n" + line + b"\r\n", dtype=np.uint8))
    for wrong in (b"+NO\r\n:1\r\n", b":1\r\n:1\r\n", b"+OKx\r\n:1\r\n"):
        with pytest.raises(ProtocolError, match="expected \\+OK"):
            IntegerReplies(b"+:", 4029, np.zeros(1, np.uint8)).feed(np.frombuffer(wrong, dtype=np.uint8))
    with pytest.raises(ProtocolError):
        IntegerReplies(b":", 4029, np.zeros(1, np.uint8)).feed(np.frombuffer(b":1\n", dtype=np.uint8))
    with pytest.raises(ProtocolError, match="longer than"):
        IntegerReplies(b":", 4029, np.zeros(1, np.uint8)).feed(np.frombuffer(b":1" * 4000, dtype=np.uint8))
