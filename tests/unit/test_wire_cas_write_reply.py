"""memcached's answers to conditional writes: whole, in pieces, with refusals and errors among them, and garbage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import ProtocolError
from kvemb.wire.memcached.memcached_replies import CasWriteReply

TRAILING = b"VA 3\r\n"


def feed_in_pieces(reply: CasWriteReply, data: bytes, sizes: list[int]) -> int:
    """Let bytes arrive piece by piece; return how many were consumed."""
    waiting, consumed, at = b"", 0, 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        waiting += data[at : at + size]
        at += size
        taken = reply.feed(np.frombuffer(waiting, np.uint8))
        waiting, consumed = waiting[taken:], consumed + taken
    return consumed


LOOKED_AT = st.sampled_from([b"HD c1\r\n", b"HD c12345\r\n", b"EN\r\n"])


@given(st.lists(LOOKED_AT, min_size=1, max_size=40), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_tokens_that_were_asked_for_alone_come_with_misses_between_them(lines: list[bytes], sizes: list[int]) -> None:
    n = len(lines)
    reply = CasWriteReply(np.empty(n, np.uint8), np.zeros(n, np.uint64), np.zeros(n, bool))
    data = b"".join(lines)
    assert feed_in_pieces(reply, data + TRAILING, sizes) == len(data)
    assert reply.done
    assert reply.found is not None
    assert reply.found.tolist() == [text != b"EN\r\n" for text in lines]
    assert reply.tokens[reply.found].tolist() == [int(text[4:]) for text in lines if text != b"EN\r\n"]


ERROR = b"SERVER_ERROR out of memory storing object\r\n"
OUTCOME = st.sampled_from([b"STORED\r\n", b"STORED\r\n", b"STORED\r\n", b"EXISTS\r\n", b"NOT_FOUND\r\n", b"NOT_STORED\r\n", ERROR])
PAIRS = st.lists(
    st.tuples(OUTCOME, st.one_of(LOOKED_AT, st.integers(0, 2**64 - 1).map(lambda token: b"HD c%d\r\n" % token))), min_size=1, max_size=30
)


@given(PAIRS, st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_any_mix_of_writes_and_tokens_in_any_pieces_with_trailing_bytes(pairs: list[tuple[bytes, bytes]], sizes: list[int]) -> None:
    n = len(pairs)
    reply = CasWriteReply(np.full(n, 9, np.uint8), np.full(n, 77, np.uint64), written=True)
    data = b"".join(outcome + token for outcome, token in pairs)
    assert feed_in_pieces(reply, data + TRAILING, sizes) == len(data)
    assert reply.done
    assert [row for row, _ in reply.errors] == [row for row, (outcome, _) in enumerate(pairs) if outcome == ERROR]
    for row, (outcome, token) in enumerate(pairs):
        if outcome != ERROR:
            assert reply.out[row] == (outcome != b"STORED\r\n")
        if outcome == b"STORED\r\n":
            assert reply.tokens[row] == (0 if token == b"EN\r\n" else int(token[4:]))


@pytest.mark.parametrize(
    "data", [b"HD c1\r\n", b"STORED\r\nSTORED\r\n", b"STORED \r\nHD c1\r\n", b"STORED\r\nHD cx\r\n", b"OK\r\nHD c1\r\n"]
)
def test_garbage_behind_a_cas_is_refused(data: bytes) -> None:
    reply = CasWriteReply(np.zeros(2, np.uint8), np.zeros(2, np.uint64), written=True)
    with pytest.raises(ProtocolError):
        reply.feed(np.frombuffer(b"STORED\r\nHD c1\r\n" + data + data, np.uint8))


def test_an_error_in_the_place_of_the_token_behind_a_cas_is_told() -> None:
    reply = CasWriteReply(np.zeros(2, np.uint8), np.zeros(2, np.uint64), written=True)
    data = b"STORED\r\n" + ERROR + b"STORED\r\nHD c7\r\n"
    assert reply.feed(np.frombuffer(data, np.uint8)) == len(data)
    assert (reply.done, reply.errors) == (True, [(0, ERROR[:-2])])


@pytest.mark.parametrize("data", [b"HD\r\n", b"HD cx1\r\n", b"OK c12\r\n", b"\r\n\r\n", b"HD x12\r\n", b"STORED\r\n", b"EX c0\r\n"])
def test_garbage_is_refused(data: bytes) -> None:
    reply = CasWriteReply(np.zeros(2, np.uint8), np.zeros(2, np.uint64), np.zeros(2, bool))
    with pytest.raises(ProtocolError):
        reply.feed(np.frombuffer(b"HD c1\r\n" + data, np.uint8))


@pytest.mark.parametrize("piece", [7, 1000, 70_000])
@pytest.mark.parametrize("refused", [None, 0, 1999, 3999])
def test_many_tokens_that_count_up_through_several_widths(piece: int, refused: int | None) -> None:
    tokens = np.arange(8_000, 12_000, dtype=np.uint64)
    lines = [b"STORED\r\nHD c%d\r\n" % token for token in tokens.tolist()]
    if refused is not None:
        lines[refused] = b"EXISTS\r\nHD c5\r\n"
    reply = CasWriteReply(np.full(4000, 9, np.uint8), np.zeros(4000, np.uint64), written=True)
    data = b"".join(lines)
    assert feed_in_pieces(reply, data, [piece]) == len(data)
    assert reply.done
    stored = np.arange(4000) != (-1 if refused is None else refused)
    np.testing.assert_array_equal(reply.out, ~stored)
    np.testing.assert_array_equal(reply.tokens[stored], tokens[stored])


@pytest.mark.parametrize("error", [b"ERROR\r\n", b"CLIENT_ERROR bad data chunk\r\n", ERROR])
def test_an_error_is_told_although_more_answers_are_due(error: bytes) -> None:
    reply = CasWriteReply(np.zeros(5000, np.uint8), np.zeros(5000, np.uint64), written=True)
    data = b"STORED\r\nHD c1\r\n" + error
    assert reply.feed(np.frombuffer(data, np.uint8)) == len(data)
    assert reply.errors == [(1, error[:-2])]
