"""What a primary answers when it is asked for the markers of many slots: read as one piece where they are alike, and else one by one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvemb.stores.redis_cluster.slot_markers import _Markers, slot_marker
from kvemb.wire.resp.resp_value import ErrorLine

SLOTS = [0, 7, 127, 128, 255, 256, 16383]
ALIKE = [slot_marker(b"c" * 16, slot, b"g" * 8).encode() for slot in SLOTS]
REPAIRED = [replace(slot_marker(b"c" * 16, slot, b"g" * 8), repair="0123456789abcdef").encode() for slot in SLOTS]
MOVED = ErrorLine(b"-MOVED 7 127.0.0.1:7001")
ANSWERS: dict[str, Sequence[bytes | ErrorLine | None]] = {
    "all alike": ALIKE,
    "all of a node that was repaired": REPAIRED,
    "one that was repaired": [*ALIKE[:3], REPAIRED[3], *ALIKE[4:]],
    "the first of another slot": [ALIKE[1], *ALIKE[1:]],
    "none": [None] * len(SLOTS),
    "the first missing": [None, *ALIKE[1:]],
    "the last missing": [*ALIKE[:-1], None],
    "the first no marker": [b"something else", *ALIKE[1:]],
    "one elsewhere": [ALIKE[0], MOVED, *ALIKE[2:]],
    "all elsewhere": [MOVED] * len(SLOTS),
    "the first far too large": [b"-FOREIGN", *ALIKE[1:]],
}


def sent(value: bytes | ErrorLine | None) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, ErrorLine):
        return value.line + b"\r\n"
    value = bytes((1 << 20) + 1) if value == b"-FOREIGN" else value
    return b"$%d\r\n%b\r\n" % (len(value), value)


@pytest.mark.parametrize("piece", [1, 50, 1 << 21])
@pytest.mark.parametrize("name", ANSWERS)
def test_what_stands_there_is_found_however_the_answer_comes(name: str, piece: int) -> None:
    answers = ANSWERS[name]
    data = np.frombuffer(b"".join(map(sent, answers)) + b"+OK\r\n", np.uint8)
    reply, at, end = _Markers(SLOTS), 0, 0
    while not reply.done:
        end = min(end + (piece if len(data) < 10_000 else max(piece, 10_000)), len(data))
        at += reply.feed(data[at:end])
        assert end < len(data) or reply.done, "it wants more than there is"
    assert at == len(data) - len(b"+OK\r\n")
    assert [one.line if isinstance(one, ErrorLine) else one for one in reply.found] == [
        one.line if isinstance(one, ErrorLine) else one for one in answers
    ]
