"""Reply readers on streams cut anywhere: whole, byte by byte, in two at every point, with trailing bytes; and on streams that are wrong."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pytest

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import UNREAD, find
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.memcached.memcached_replies import CasValuesReply, CasWriteReply
from kvemb.wire.replies import (
    FOREIGN,
    MAX_BLOB_BYTES,
    BlobReply,
    CodeReply,
    LineReply,
    RepliesInOrder,
    ReplyReader,
    RowsReader,
    UnexpectedValueError,
)
from kvemb.wire.resp.integer_replies import IntegerReplies

TRAILING = b"+OK\r\n$-1\r\nEN\r\nHD\r\nVA 4 c1\r\nabcd\r\n"


def feed(reply: ReplyReader, pieces: Iterable[bytes]) -> bytes:
    """Feed pieces as a link does; return the bytes that remain."""
    left = b""
    for piece in pieces:
        left += piece
        if not reply.done:
            left = left[reply.feed(np.frombuffer(left, dtype=np.uint8)) :]
    return left


def stride(n: int, *, size: int = 4, prefix: int | None = None, asking: bool = False) -> FixedSizeValuesReply:
    asked = b"+OK\r\n" if asking else b""
    out = np.zeros((n, size if prefix is None else prefix), dtype=np.uint8)
    return FixedSizeValuesReply(asked + b"$%d\r\n" % size, size, asked + b"$-1\r\n", out, np.zeros(n, dtype=bool), asked)


def meta(n: int, size: int = 4) -> FixedSizeValuesReply:
    return FixedSizeValuesReply(b"VA %d\r\n" % size, size, b"EN\r\n", np.zeros((n, size), dtype=np.uint8), np.zeros(n, dtype=bool))


def token(n: int, size: int = 4) -> CasValuesReply:
    return CasValuesReply(size, np.zeros((n, size), dtype=np.uint8), np.zeros(n, dtype=bool), np.zeros(n, dtype=np.uint64))


def codes(n: int, *accepted: bytes, asking: bool = False) -> CodeReply:
    asked = b"+OK\r\n" if asking else b""
    return CodeReply(tuple(asked + code for code in accepted), np.zeros(n, dtype=np.uint8), asked)


def stored(n: int) -> CasWriteReply:
    return CasWriteReply(np.zeros(n, dtype=np.uint8), np.zeros(n, dtype=np.uint64))


def lengths(n: int) -> IntegerReplies:
    return IntegerReplies(b":", 4029, np.zeros(n, dtype=np.uint8))


def rows_of(reply: FixedSizeValuesReply | CasValuesReply) -> list[bytes | None]:
    return [bytes(row) if found else None for row, found in zip(reply.out, reply.found, strict=True)]


def values(reply: ReplyReader) -> object:
    """Everything that a reply has learnt."""
    if isinstance(reply, CasValuesReply):
        return rows_of(reply), reply.tokens[reply.found].tolist(), reply.errors
    if isinstance(reply, FixedSizeValuesReply):
        return rows_of(reply), reply.errors
    if isinstance(reply, CodeReply):
        failed = {row for row, _ in reply.errors}
        return [int(code) for row, code in enumerate(reply.out) if row not in failed], reply.errors
    if isinstance(reply, RepliesInOrder):
        return [values(inner) for inner in reply.replies]
    return (reply.value, reply.error) if isinstance(reply, BlobReply) else reply.line  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    make: Callable[[], ReplyReader]
    stream: bytes
    expected: object


MOVED = b"-MOVED 3999 127.0.0.1:6381"
OOM = b"SERVER_ERROR out of memory storing object"
LONG = b"x" * 40
CASES = {
    "hits": Case(lambda: stride(3), b"$4\r\nabcd\r\n$4\r\nefgh\r\n$4\r\n\r\n$-\r\n", ([b"abcd", b"efgh", b"\r\n$-"], [])),
    "misses": Case(lambda: stride(3), b"$-1\r\n" * 3, ([None] * 3, [])),
    "hits and misses": Case(
        lambda: stride(5), b"$-1\r\n$4\r\nabcd\r\n$-1\r\n$-1\r\n$4\r\nefgh\r\n", ([None, b"abcd", None, None, b"efgh"], [])
    ),
    **{
        f"{n} misses between hits": Case(
            lambda n=n: stride(2 * n + 2), (b"$-1\r\n" * n + b"$4\r\n-1\r\n\r\n") * 2, (([None] * n + [b"-1\r\n"]) * 2, [])
        )
        for n in (15, 16, 17, 40)
    },
    "many misses, an error, many misses": Case(
        lambda: stride(61), b"$-1\r\n" * 30 + MOVED + b"\r\n" + b"$-1\r\n" * 30, ([None] * 61, [(30, MOVED)])
    ),
    "many misses, ASKING": Case(lambda: stride(20, asking=True), b"+OK\r\n$-1\r\n" * 20, ([None] * 20, [])),
    "a prefix only": Case(lambda: stride(2, prefix=2), b"$4\r\nabcd\r\n$4\r\nefgh\r\n", ([b"ab", b"ef"], [])),
    "an error between rows": Case(
        lambda: stride(4), b"$4\r\nabcd\r\n" + MOVED + b"\r\n$-1\r\n$4\r\nefgh\r\n", ([b"abcd", None, None, b"efgh"], [(1, MOVED)])
    ),
    "errors only": Case(lambda: stride(2), MOVED + b"\r\n-ERR\r\n", ([None, None], [(0, MOVED), (1, b"-ERR")])),
    "ASKING": Case(
        lambda: stride(3, asking=True),
        b"+OK\r\n$-1\r\n+OK\r\n$4\r\n+OK\r\r\n+OK\r\n" + MOVED + b"\r\n",
        ([None, b"+OK\r", None], [(2, MOVED)]),
    ),
    "no rows": Case(lambda: stride(0), b"", ([], [])),
    "a miss pattern inside a value": Case(
        lambda: stride(3, size=9), b"$-1\r\n$9\r\n$-1\r\n$-1\r\r\n$9\r\n$9\r\n$-1\r\n\r\n",
        ([None, b"$-1\r\n$-1\r", b"$9\r\n$-1\r\n"], []),
    ),
    "a miss pattern over a value's end": Case(lambda: stride(3), b"$4\r\nx$-1\r\n$-1\r\n$4\r\n\n$-1\r\n", ([b"x$-1", None, b"\n$-1"], [])),
    "meta": Case(lambda: meta(3), b"VA 4\r\nEN\r\n\r\nEN\r\nVA 4\r\nabEN\r\n", ([b"EN\r\n", None, b"abEN"], [])),
    "tokens": Case(
        lambda: token(4),
        b"VA 4 c1\r\nabcd\r\nEN\r\nVA 4 c18446744073709551615\r\nEN\r\n\r\nVA 4 c20\r\nxxEN\r\n",
        ([b"abcd", None, b"EN\r\n", b"xxEN"], [1, 18446744073709551615, 20], []),
    ),
    "tokens with an error": Case(
        lambda: token(3), b"VA 4 c7\r\nabcd\r\n" + OOM + b"\r\nEN\r\n", ([b"abcd", None, None], [7], [(1, OOM)])
    ),
    "a row with a token inside a value": Case(
        lambda: token(3, 15), b"VA 15 c5\r\nVA 15 c9\r\nEN\r\nz\r\nEN\r\nVA 15 c6\r\n0123VA 15 c9\r\n4\r\n",
        ([b"VA 15 c9\r\nEN\r\nz", None, b"0123VA 15 c9\r\n4"], [5, 6], []),
    ),
    "values that were not read from flash": Case(
        lambda: meta(6, 40), (b"VA 40\r\n" * 2 + b"EN\r\n" + b"VA 40\r\n" + LONG + b"\r\nEN\r\n") * 2,
        ([None, LONG, None] * 2, [(0, UNREAD), (3, UNREAD)]),
    ),
    "the last value was not read from flash": Case(
        lambda: meta(2, 40), b"VA 40\r\n" + LONG + b"\r\n" + b"VA 40\r\n" * 2 + b"EN\r\n", ([LONG, None], [(1, UNREAD)])
    ),
    "values with tokens that were not read from flash": Case(
        lambda: token(3, 40), b"VA 40 c7\r\n" * 2 + b"EN\r\nVA 40 c8\r\n" + LONG + b"\r\n" + b"VA 40 c9\r\n" * 2 + b"EN\r\n",
        ([None, LONG, None], [8], [(0, UNREAD), (2, UNREAD)]),
    ),
    "a small value that was not read from flash": Case(lambda: BlobReply(miss=b"EN"), b"VA 18\r\nVA 18\r\nEN\r\n", (None, UNREAD)),
    "stored": Case(lambda: codes(3, b"+OK\r\n"), b"+OK\r\n" * 3, ([0, 0, 0], [])),
    "stored and full": Case(
        lambda: codes(4, b"HD\r\n", b"NS\r\n", b"EX\r\n", b"NF\r\n"),
        b"EX\r\nHD\r\n" + OOM + b"\r\nNF\r\n", ([2, 0, 3], [(2, OOM)]),
    ),
    "an error last": Case(lambda: codes(2, b"+OK\r\n"), b"+OK\r\n-ERR no\r\n", ([0], [(1, b"-ERR no")])),
    "deleted while ASKING": Case(
        lambda: codes(3, b":1\r\n", b":0\r\n", asking=True),
        b"+OK\r\n:0\r\n+OK\r\n" + MOVED + b"\r\n+OK\r\n:1\r\n", ([1, 0], [(1, MOVED)]),
    ),
    "a small value": Case(lambda: BlobReply(miss=b"$-1"), b"$6\r\nab\r\ncd\r\n", (b"ab\r\ncd", None)),
    "an empty value": Case(lambda: BlobReply(miss=b"$-1"), b"$0\r\n\r\n", (b"", None)),
    "a meta value": Case(lambda: BlobReply(miss=b"EN"), b"VA 4\r\nEN\r\n\r\n", (b"EN\r\n", None)),
    "a small miss": Case(lambda: BlobReply(miss=b"EN"), b"EN\r\n", (None, None)),
    "a small error": Case(lambda: BlobReply(miss=b"$-1"), b"-LOADING\r\n", (None, b"-LOADING")),
    "several in order": Case(
        lambda: RepliesInOrder([BlobReply(miss=b"$-1"), BlobReply(miss=b"$-1"), LineReply()]),
        b"$4\r\n$-1\r\r\n$-1\r\n+OK\r\n",
        [(b"$-1\r", None), (None, None), b"+OK"],
    ),
    "a line": Case(LineReply, b"+PONG\r\n", b"+PONG"),
}  # fmt: skip


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def test_a_stream_is_read_alike_whole_cut_in_two_anywhere_and_byte_by_byte(case: Case) -> None:
    one_by_one = [case.stream[i : i + 1] for i in range(len(case.stream))]
    for pieces in (one_by_one, *([case.stream[:cut], case.stream[cut:]] for cut in range(len(case.stream) + 1))):
        reply = case.make()
        assert feed(reply, pieces) == b""
        assert reply.done, pieces
        assert values(reply) == case.expected, pieces


def test_a_value_too_large_to_be_ours_is_passed_over_among_others_however_it_is_cut() -> None:
    stream = b"$%d\r\n" % (MAX_BLOB_BYTES + 1) + b"x" * (MAX_BLOB_BYTES + 1) + b"\r\n$2\r\nab\r\n"
    for cuts in ([len(stream)], [11], [12], [500_000, 1_000_000], [len(stream) - 10]):
        reply = RepliesInOrder([BlobReply(miss=b"$-1"), BlobReply(miss=b"$-1")])
        assert feed(reply, [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]) == b""
        assert reply.done
        assert values(reply) == [(FOREIGN, None), (b"ab", None)]


def test_a_reply_ends_with_its_last_byte_and_leaves_what_follows(case: Case) -> None:
    for size in range(1, len(TRAILING) + 1):
        reply = case.make()
        assert feed(reply, [b"", case.stream + TRAILING[:size]]) == TRAILING[:size]
        assert values(reply) == case.expected
    reply = case.make()
    feed(reply, [case.stream[:-1]])
    assert reply.done == (not case.stream)


@pytest.mark.parametrize(
    ("make", "stream"),
    [
        (lambda: stride(2), b"+OK\r\n"),
        (lambda: stride(2), b"$x\r\n"),
        (lambda: stride(2), b"$-2\r\n"),
        (lambda: stride(2), b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        (lambda: stride(2), b"\r\n"),
        (lambda: stride(2), b"$4\r\nabcdXX$4\r\n"),
        (lambda: stride(2), b"$4\r\nabcd\r\n$4\r\nabcd\rX"),
        (lambda: stride(3, asking=True), b"$4\r\nabcd\r\n"),
        (lambda: stride(3, asking=True), b"+OK\r\n+OK\r\n"),
        (lambda: meta(2), b"VA 4 c1\r\nabcd\r\n"),
        (lambda: meta(2), b"END\r\n"),
        (lambda: token(2), b"VA 4\r\nabcd\r\n"),
        (lambda: token(2), b"VA 4 cxyz\r\nabcd\r\n"),
        (lambda: token(2), b"VA 4 c\r\nabcd\r\n"),
        (lambda: token(2), b"VA 4 c123456789012345678901\r\nabcd\r\n"),
        (lambda: token(2), b"VA 4 c1\r\nabcdXXEN\r\n"),
        (lambda: token(1), b"VA 4 c1\r\nabcdXX"),
        (lambda: token(2), b"EN\r\nHD\r\n"),
        (lambda: codes(2, b"+OK\r\n"), b"$-1\r\n$-1\r\n"),
        (lambda: codes(2, b"+OK\r\n"), b"+OK\r\n:1\r\n"),
        (lambda: codes(2, b"HD\r\n"), b"HD\r\nXX\r\n"),
        (lambda: BlobReply(miss=b"$-1"), b"EN\r\n"),
        (lambda: BlobReply(miss=b"$-1"), b"$99999999999\r\n"),
        (lambda: BlobReply(miss=b"$-1"), b"$4\r\nabcdXX"),
    ],
)
def test_garbage_is_refused_when_it_has_arrived(make: Callable[[], ReplyReader], stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(make(), [stream])
    with pytest.raises(ProtocolError):
        feed(make(), [stream[i : i + 1] for i in range(len(stream))])


@pytest.mark.parametrize("make", [lambda: stride(2), lambda: token(2),
                                  lambda: codes(2, b"+OK\r\n"), lambda: BlobReply(miss=b"EN"), LineReply])  # fmt: skip
def test_a_line_without_an_end_is_refused_at_a_bounded_length(make: Callable[[], ReplyReader]) -> None:
    for opening in (b"-", b"SERVER_ERROR ", b"x"):
        reply = make()
        feed(reply, [opening + b"a" * 3000])
        with pytest.raises(ProtocolError, match="longer than"):
            feed(make(), [opening + b"a" * 5000])


@pytest.mark.parametrize(
    ("make", "stream", "row", "size"),
    [
        (lambda: stride(3), b"$4\r\nabcd\r\n$-1\r\n$5\r\nabcde\r\n", 2, 5),
        (lambda: stride(3), b"$0\r\n\r\n", 0, 0),
        (lambda: stride(2, asking=True), b"+OK\r\n$-1\r\n+OK\r\n$400\r\n", 1, 400),
        (lambda: meta(2), b"VA 4\r\nabcd\r\nVA 44\r\n", 1, 44),
        (lambda: token(3), b"EN\r\nVA 4 c1\r\nabcd\r\nVA 40 c1\r\n", 2, 40),
    ],
)
def test_a_value_of_another_size_is_named_by_row(make: Callable[[], ReplyReader], stream: bytes, row: int, size: int) -> None:
    reply = make()
    with pytest.raises(UnexpectedValueError) as failure:
        feed(reply, [stream[i : i + 1] for i in range(len(stream))])
    error = failure.value
    assert (error.reply, error.row, error.size_bytes, error.expected_bytes) == (reply, row, size, 4)


def test_values_of_other_rows_stay_untouched_by_a_row_that_is_missing() -> None:
    reply = stride(3)
    reply.out[:] = 7
    feed(reply, [b"$4\r\nabcd\r\n$-1\r\n$4\r\nefgh\r\n"])
    assert reply.out[1].tolist() == [7] * 4


def test_a_batch_full_of_miss_patterns_is_read_in_one_go() -> None:
    # One at a time, the false candidates of such a batch took minutes.
    n, size = 1024, 4096
    for make, miss, head in (
        (lambda: stride(n, size=size), b"$-1\r\n", b"$4096\r\n"),
        (lambda: token(n, size), b"EN\r\n", b"VA 4096 c12\r\n"),
    ):
        record = (miss * size)[1 : size + 1]
        reply = make()
        feed(reply, [b"".join(miss if row == 500 else head + record + b"\r\n" for row in range(n))])
        assert reply.done
        assert np.flatnonzero(~reply.found).tolist() == [500]
        assert (reply.out[reply.found] == np.frombuffer(record, dtype=np.uint8)).all()


@pytest.mark.parametrize("make", [stride, token, lambda n: codes(n, b"+OK\r\n"), stored, lengths])
def test_a_reader_of_rows_answers_as_many_as_it_says_and_keeps_errors_by_row(make: Callable[[int], RowsReader]) -> None:
    reply = make(3)
    assert (reply.n_rows, reply.done) == (3, False)
    assert feed(reply, [b"-ERR no\r\n"] * 3) == b""
    assert reply.done
    assert reply.errors == [(row, b"-ERR no") for row in range(3)]


@pytest.mark.parametrize("n_bytes", [0, 4, 5, (1 << 15) - 1, (1 << 15) + 4, (1 << 16) + 5, 100_001])
def test_a_pattern_is_found_wherever_it_lies_in_a_large_buffer(n_bytes: int) -> None:
    pattern = b"$-1\r\n"
    data = np.random.default_rng(0).choice(np.frombuffer(pattern, np.uint8), n_bytes)
    for edge in (1 << 15, 1 << 16, n_bytes):
        for start in range(max(0, edge - 12), min(edge, n_bytes - 5), 5):
            data[start : start + 5] = np.frombuffer(pattern, np.uint8)
    whole = data.tobytes()
    assert find(data, pattern).tolist() == [at for at in range(n_bytes) if whole.startswith(pattern, at)]
