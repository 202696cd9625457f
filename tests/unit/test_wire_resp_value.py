"""The reader of any RESP2 reply: whole, in pieces, with bytes behind it, and lengths that are refused as soon as they are announced."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import ProtocolError
from kvemb.wire.resp.resp_value import MAX_BULK_BYTES, MAX_ITEMS, ErrorLine, Value, ValueReply

VALUES: st.SearchStrategy[Value] = st.recursive(
    st.none()
    | st.integers(-(10**18), 10**18)
    | st.binary(max_size=90)
    | st.sampled_from([b"abc", b"\r\n", b"$3\r\nabc\r\n", b"x" * 64])
    | st.sampled_from([b"-ERR no", b"-MOVED 1 h:1"]).map(ErrorLine),
    lambda inner: st.lists(inner, max_size=6) | st.lists(st.sampled_from([b"abc", b"def", b"gh"]), max_size=9),
    max_leaves=20,
)


def encoded(value: Value) -> bytes:
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(value), value)
        case ErrorLine():
            return value.line + b"\r\n"
        case list():
            return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


def feed(reply: ValueReply, stream: bytes, step: int) -> bytes:
    left = b""
    for at in range(0, len(stream), step):
        left += stream[at : at + step]
        if not reply.done:
            left = left[reply.feed(np.frombuffer(left, np.uint8)) :]
    return left


@given(VALUES, st.integers(1, 40), st.sampled_from([b"", b"$3\r\nabc\r\n", b"+OK\r\n", b"junk"]))
def test_any_value_is_read_in_any_pieces_and_nothing_behind_it(value: Value, step: int, trailing: bytes) -> None:
    for size in (1, step, 1 << 20):
        reply = ValueReply()
        assert feed(reply, encoded(value) + trailing, size) == trailing
        assert reply.done
        assert reply.value == value


@given(st.lists(st.binary(min_size=14, max_size=14), max_size=2000), st.integers(1, 5000))
def test_a_listing_of_keys_is_read_at_once(keys: list[bytes], step: int) -> None:
    reply = ValueReply()
    assert feed(reply, encoded([b"0", list(keys)]), step) == b""
    assert reply.value == [b"0", keys]


@pytest.mark.parametrize(
    "stream",
    [
        b"*%d\r\n" % (MAX_ITEMS + 1),
        b"*2147483647\r\n",
        b"*1000000\r\n" * 2,
        b"*1\r\n" * 9,
        b"$%d\r\n" % (MAX_BULK_BYTES + 1),
        b"$-2\r\n",
        b"$x\r\n",
        b"$3\r\nabcXX",
        b"*x\r\n",
        b":\r\n",
        b":--1\r\n",
        b":99999999999999999999\r\n",
        b"%1\r\n",
        b"_\r\n",
        b"\r\n",
        b"HTTP/1.1 400\r\n",
        b"+" + b"x" * 5000,
        b"-" + b"x" * 5000,
        b"*" + b"1" * 5000,
    ],
)
def test_what_no_server_of_ours_sends_is_refused(stream: bytes) -> None:
    for step in (1, 1 << 20):
        with pytest.raises(ProtocolError):
            feed(ValueReply(), stream, step)
