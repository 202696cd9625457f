"""Reply readers against a plain sequential parser: any mix of hits, misses and errors, records full of protocol text, cut anywhere."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import is_error, value_size
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.memcached.memcached_replies import CasValuesReply
from kvemb.wire.replies import CodeReply, ReplyReader, UnexpectedValueError

ERRORS = (b"-MOVED 1 h:1", b"-ERR $-1", b"SERVER_ERROR out of memory", b"-ASK 2 h:2", b"CLIENT_ERROR EN", b"ERROR")
TEXTS = (
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"EN\r\n",
    b"+OK\r\n",
    b"-ERR\r\n",
    b"\r\n",
    b"$",
    b"VA ",
    b" c1\r\n",
    b"c",
    b"\r",
    b"\n",
    b"HD\r\n",
    b"\0",
    b"\xff",
    b"1",
)


@dataclass(frozen=True)
class Dialect:
    """What rows look like; `tokens` where each hit carries one; `tail` follows a missing row's line, `announced` comes before no error."""

    head: bytes
    miss: bytes
    prefix: bytes = b""
    tokens: bool = False
    tail: bytes = b""
    announced: bytes = b""


def dialects(size: int) -> list[Dialect]:
    return [
        Dialect(b"$%d" % size, b"$-1"),
        Dialect(b"$%d" % size, b"$-1", prefix=b"+OK\r\n"),
        Dialect(b"VA %d" % size, b"EN"),
        Dialect(b"VA %d c" % size, b"EN", tokens=True),
        Dialect(b"$%d" % size, b"$0", tail=b"\r\n"),
        Dialect(b"$%d" % size, b"$0", prefix=b"+OK\r\n", tail=b"\r\n"),
        Dialect(b"$%d" % size, b"$-1", announced=b"*1\r\n"),
        Dialect(b"$%d" % size, b"$-1", prefix=b"+OK\r\n", announced=b"*1\r\n"),
    ]


def parse(stream: bytes, n: int, dialect: Dialect) -> tuple[list[tuple[object, ...]], bytes]:
    """Read n rows one after another, the slow and simple way; return them and the rest of the stream."""
    rows: list[tuple[object, ...]] = []
    for _ in range(n):
        assert stream.startswith(dialect.prefix)
        line, _, stream = stream[len(dialect.prefix) :].removeprefix(dialect.announced).partition(b"\r\n")
        if line == dialect.miss:
            rows.append(("miss",))
            assert stream.startswith(dialect.tail)
            stream = stream[len(dialect.tail) :]
        elif is_error(line):
            rows.append(("error", line))
        else:
            size = value_size(line)
            assert size is not None
            rows.append(("hit", stream[:size], int(line.split(b" c")[1]) if dialect.tokens else 0))
            assert stream[size : size + 2] == b"\r\n"
            stream = stream[size + 2 :]
    return rows, stream


def reply_of(dialect: Dialect, n: int, size: int) -> FixedSizeValuesReply | CasValuesReply:
    out, found = np.zeros((n, size), dtype=np.uint8), np.zeros(n, dtype=bool)
    if dialect.tokens:
        return CasValuesReply(size, out, found, np.zeros(n, dtype=np.uint64))
    before = dialect.prefix + dialect.announced
    head, miss = before + dialect.head + b"\r\n", before + dialect.miss + b"\r\n" + dialect.tail
    return FixedSizeValuesReply(head, size, miss, out, found, dialect.prefix, dialect.announced)


def rows_of(reply: FixedSizeValuesReply | CasValuesReply) -> list[tuple[object, ...]]:
    errors = dict(reply.errors)
    tokens = reply.tokens if isinstance(reply, CasValuesReply) else np.zeros(len(reply.found), dtype=np.uint64)
    rows: list[tuple[object, ...]] = []
    for row in range(len(reply.found)):
        if row in errors:
            assert not reply.found[row]
            rows.append(("error", errors[row]))
        else:
            rows.append(("hit", reply.out[row].tobytes(), int(tokens[row])) if reply.found[row] else ("miss",))
    return rows


def feed(reply: ReplyReader, stream: bytes, cuts: list[int]) -> bytes:
    left = b""
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for first, last in pairwise(bounds):
        left += stream[first:last]
        if not reply.done:
            left = left[reply.feed(np.frombuffer(left, dtype=np.uint8)) :]
    return left


@st.composite
def record(draw: st.DrawFn, size: int) -> bytes:
    """Bytes of a record: mostly protocol text at any offset, heads of this very size included."""
    texts = [*TEXTS, *(dialect.head for dialect in dialects(size)), *(dialect.head + b"\r\n" for dialect in dialects(size))]
    body = b"".join(draw(st.lists(st.sampled_from(texts), min_size=1, max_size=12)))
    shift = draw(st.integers(0, size - 1))
    return (body * (2 * size // len(body) + 2))[shift : shift + size]


@st.composite
def conversation(draw: st.DrawFn) -> tuple[Dialect, int, int, bytes]:
    size = draw(st.integers(1, 40))
    dialect = draw(st.sampled_from(dialects(size)))
    kinds = draw(st.lists(st.sampled_from(["hit", "hit", "hit", "miss", "miss", "error"]), min_size=1, max_size=25))
    rows = []
    for kind in kinds:
        token = b"%d" % draw(st.sampled_from([1, 9, 10, 77, 2**64 - 1])) if dialect.tokens else b""
        hit = dialect.head + token + b"\r\n" + draw(record(size)) if kind == "hit" else b""
        line = {"hit": hit, "miss": dialect.miss + dialect.tail, "error": draw(st.sampled_from(ERRORS))}[kind]
        rows.append(dialect.prefix + (b"" if kind == "error" else dialect.announced) + line + b"\r\n")
    return dialect, len(kinds), size, b"".join(rows)


@given(conversation(), st.lists(st.integers(0, 5000), max_size=6), st.sampled_from([b"", *TEXTS, b"$-1\r\n$4\r\n", b"EN\r\nEN\r\nVA 4"]))
def test_any_mix_reads_as_the_sequential_parser_reads_it(talk: tuple[Dialect, int, int, bytes], cuts: list[int], trailing: bytes) -> None:
    dialect, n, size, stream = talk
    reply = reply_of(dialect, n, size)
    left = feed(reply, stream + trailing, cuts)
    assert reply.done
    expected, rest = parse(stream + trailing, n, dialect)
    assert rows_of(reply) == expected
    assert left == rest == trailing


@st.composite
def conversation_with_foreign_values(draw: st.DrawFn) -> tuple[Dialect, int, bytes, list[tuple[object, ...]]]:
    size = draw(st.integers(1, 40))
    dialect = draw(st.sampled_from(dialects(size)))
    stream, expected = b"", list[tuple[object, ...]]()
    for kind in draw(st.lists(st.sampled_from(["hit", "miss", "error", "foreign", "list"]), min_size=1, max_size=25)):
        token = draw(st.sampled_from([1, 10, 2**64 - 1])) if dialect.tokens else 0
        digits = b"%d" % token if dialect.tokens else b""
        other = draw(st.integers(1, 5000).filter(lambda n: n != size))
        value = draw(record(other if kind == "foreign" else size))
        error = draw(st.sampled_from(ERRORS))
        line, row = {
            "hit": (dialect.head + digits + b"\r\n" + value, ("hit", value, token)),
            "miss": (dialect.miss + dialect.tail, ("miss",)),
            "error": (error, ("error", error)),
            "foreign": (dialect.head.replace(b"%d" % size, b"%d" % other) + digits + b"\r\n" + value, ("foreign", token)),
            "list": (b"-WRONGTYPE Operation against a key", ("foreign", 0)),
        }["miss" if kind == "list" and dialect.tokens else kind]
        stream += dialect.prefix + (b"" if line.startswith(b"-") else dialect.announced) + line + b"\r\n"
        expected.append(row)
    return dialect, size, stream, expected


@given(conversation_with_foreign_values(), st.lists(st.integers(0, 5000), max_size=6), st.sampled_from([b"", *TEXTS, b"$-1\r\n$4\r\n"]))
def test_values_of_other_sizes_are_passed_over_where_that_is_asked_for(
    talk: tuple[Dialect, int, bytes, list[tuple[object, ...]]], cuts: list[int], trailing: bytes
) -> None:
    dialect, size, stream, expected = talk
    reply = reply_of(dialect, len(expected), size)
    reply.foreign = np.zeros(len(expected), dtype=bool)
    assert feed(reply, stream + trailing, cuts) == trailing
    assert reply.done
    tokens = reply.tokens if isinstance(reply, CasValuesReply) else np.zeros(len(expected), np.uint64)
    got = [("foreign", int(tokens[i])) if reply.foreign[i] else row for i, row in enumerate(rows_of(reply))]
    assert got == expected
    assert not (reply.foreign & reply.found).any()


@given(st.integers(6, 60), st.integers(0, 100), st.sampled_from(range(len(dialects(1)))), st.integers(2, 9))
def test_a_miss_pattern_at_every_offset_of_every_record(size: int, seed: int, kind: int, n: int) -> None:
    dialect = dialects(size)[kind]
    rng = np.random.default_rng(seed)
    before = dialect.prefix + dialect.announced
    pattern = before + dialect.miss + b"\r\n" + dialect.tail
    for offset in range(max(1, size - len(pattern) + 1)):
        rows = []
        for _ in range(n):
            body = bytearray(rng.integers(0, 256, size, dtype=np.uint8).tobytes())
            body[offset : offset + len(pattern)] = pattern
            token = b"5" if dialect.tokens else b""
            rows.append(dialect.miss + dialect.tail if rng.random() < 0.3 else dialect.head + token + b"\r\n" + bytes(body[:size]))
        stream = b"".join(before + row + b"\r\n" for row in rows)
        reply = reply_of(dialect, n, size)
        assert feed(reply, stream, [offset * 7]) == b""
        assert rows_of(reply) == parse(stream, n, dialect)[0]


@given(conversation(), st.data())
def test_a_damaged_stream_is_refused_or_waits_but_never_does_anything_else(
    talk: tuple[Dialect, int, int, bytes], data: st.DataObject
) -> None:
    dialect, n, size, stream = talk
    damaged = bytearray(stream)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not damaged:
            return
    reply = reply_of(dialect, n, size)
    try:
        feed(reply, bytes(damaged), data.draw(st.lists(st.integers(0, 5000), max_size=3)))
    except (ProtocolError, UnexpectedValueError):
        return
    assert all(row[0] != "hit" or len(row[1]) == size for row in rows_of(reply))  # type: ignore[arg-type]


@given(
    st.lists(st.sampled_from([b"HD", b"NS", b"EX", b"NF", *ERRORS]), min_size=1, max_size=40), st.lists(st.integers(0, 2000), max_size=6)
)
def test_status_codes_read_as_a_line_by_line_parser_reads_them(lines: list[bytes], cuts: list[int]) -> None:
    codes = (b"HD\r\n", b"NS\r\n", b"EX\r\n", b"NF\r\n")
    reply = CodeReply(codes, np.zeros(len(lines), dtype=np.uint8))
    assert feed(reply, b"".join(line + b"\r\n" for line in lines) + b"HD", cuts) == b"HD"
    assert reply.done
    assert reply.errors == [(row, line) for row, line in enumerate(lines) if is_error(line)]
    for row, line in enumerate(lines):
        if not is_error(line):
            assert codes[reply.out[row]] == line + b"\r\n"
