"""HTTP/2 connections as lists of frames, and what chance makes of them. Pure."""

import random
import struct
from dataclasses import dataclass, replace

from tests.fuzz.mutation import mutated

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_HEAD = struct.Struct(">BHBBI")


@dataclass(frozen=True)
class Frame:
    """One frame.

    Args:
        kind, flags, stream, payload: as on the wire.
        length: that its head says; None: the payload's.
    """

    kind: int
    flags: int
    stream: int
    payload: bytes
    length: int | None = None

    def encode(self) -> bytes:
        """Return its bytes."""
        length = (len(self.payload) if self.length is None else self.length) & 0xFFFFFF
        return _HEAD.pack(length >> 16, length & 0xFFFF, self.kind & 0xFF, self.flags & 0xFF, self.stream & 0xFFFFFFFF) + self.payload


def frames_of(data: bytes) -> tuple[bytes, list[Frame]]:
    """Split one side of a connection into what stands before its frames, and these."""
    start = PREFACE if data.startswith(PREFACE) else b""
    rest, frames = data[len(start) :], list[Frame]()
    while len(rest) >= _HEAD.size:
        high, low, kind, flags, stream = _HEAD.unpack_from(rest)
        size = (high << 16) + low
        frames.append(Frame(kind, flags, stream, rest[_HEAD.size : _HEAD.size + size]))
        rest = rest[_HEAD.size + size :]
    return start, frames


def odd_connection(chance: random.Random, data: bytes) -> bytes:
    """The same connection with frames changed, lost, doubled, moved, or many put in."""
    start, frames = frames_of(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(frames) + 1)
        match chance.randrange(5):
            case 0:
                del frames[at : at + 1]
            case 1:
                frames[at:at] = frames[at : at + chance.choice((1, 3))] * chance.choice((1, 2, 200))
            case 2 if len(frames) > 1:
                frames.insert(at - 1, frames.pop(chance.randrange(len(frames))))
            case 3:
                frames[at:at] = _flood(chance)
            case _ if at < len(frames):
                frames[at] = _odd_frame(chance, frames[at])
    return start + b"".join(frame.encode() for frame in frames)


def _odd_frame(chance: random.Random, frame: Frame) -> Frame:
    match chance.randrange(6):
        case 0:
            return replace(frame, kind=chance.choice((chance.randrange(10), chance.randrange(256))))
        case 1:
            return replace(frame, flags=chance.randrange(256))
        case 2:
            return replace(frame, stream=chance.choice((0, 1, 2, 3, 5, 2**31 - 1, 2**32 - 1, frame.stream + 2)))
        case 3:
            return replace(frame, length=chance.choice((0, 1, len(frame.payload) + 1, 16_385, 2**24 - 1)))
        case 4 if frame.kind == DATA and len(frame.payload) >= 5:  # gRPC's own head: compressed, length
            head = struct.pack(">BI", chance.choice((0, 1, 255)), chance.choice((0, 1, 2**31, 2**32 - 1, len(frame.payload))))
            return replace(frame, payload=head + frame.payload[5:])
    return replace(frame, payload=mutated(chance, frame.payload)[:65_536])


def _flood(chance: random.Random) -> list[Frame]:
    """Many frames that cost their sender little."""
    n = chance.choice((10, 300, 3000))
    named = b"\x40\x01a\x04" + b"x" * 4 + b"\xbe" * 4000  # a header that is remembered, and 4,000 bytes that each repeat it
    some_headers = chance.choice((b"\x82\x86\x84", b"\x40\x01a\x7f\x80\x7f", b"\x3f\xe1\xff\xff\x7f", named))
    kinds: tuple[list[Frame], ...] = (
        [Frame(SETTINGS, 0, 0, struct.pack(">HI", chance.randrange(1, 8), chance.choice((0, 1, 2**31 - 1, 2**32 - 1))))],
        [Frame(PING, 0, 0, chance.randbytes(8))],
        [Frame(WINDOW_UPDATE, 0, chance.choice((0, 1)), struct.pack(">I", chance.choice((0, 1, 2**31 - 1))))],
        [Frame(HEADERS, 4, 1, some_headers), Frame(RST_STREAM, 0, 1, bytes(4))],
        [Frame(CONTINUATION, 0, 1, some_headers)],
        [Frame(PRIORITY, 0, 3, bytes(5))],
        [Frame(DATA, 0, 1, bytes(chance.choice((0, 1, 16_384))))],
        [Frame(GOAWAY, 0, 0, bytes(8))],
    )
    chosen = chance.choice(kinds) * n
    numbered = chance.random() < 0.5  # streams of their own: HEADERS and a reset, again and again
    return [replace(frame, stream=1 + 2 * index) if numbered and frame.stream else frame for index, frame in enumerate(chosen)]
