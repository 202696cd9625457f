"""What the exchange needs of a reply, and the readers of small ones. Bytes in, arrays out; no sockets, any split of the stream.

A reply is fed views of the receive buffer and says how many bytes it has consumed. All of them rest on one idea: a batch of replies is an
array with a constant stride, so its framing is checked, and its data copied out, in a few vector operations for all rows at once. Values
are read by `fixed_size_values` and, with memcached's tokens, by `cas_values_reply` and `cas_write_reply`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import EOL, WRONG_TYPE, Bytes, is_error, matches, prefix_size, take_line, value_size


class UnexpectedValueError(Exception):
    """A value of another size than the table's records lies under a row's key; `row` is its index in the reply."""

    def __init__(self, reply: object, row: int, size_bytes: int, expected_bytes: int) -> None:
        super().__init__(f"row {row}: value of {size_bytes} bytes, expected {expected_bytes}")
        self.reply, self.row, self.size_bytes, self.expected_bytes = reply, row, size_bytes, expected_bytes


class ReplyReader(Protocol):
    """What the exchange needs of a reply."""

    @property
    def done(self) -> bool:
        """Whether the whole reply has been consumed."""

    def feed(self, data: Bytes) -> int:
        """Consume what is complete at the start of data; return how many bytes that was. Called again with the rest and more."""


@dataclass(frozen=True)
class Step:
    """One request and the reply it will get.

    Args:
        source: the request's bytes, or what builds them: it is called when the request is sent, so that the requests of a large batch are
            built while the server works on the first ones.
        reply: reads the answer.
        reply_bytes: how large the answer is if nothing is missing; 0 = small or unknown. A hint for the exchange, which may wait for
            more of a large answer before it looks at it.
    """

    source: memoryview | Callable[[], memoryview]
    reply: ReplyReader
    reply_bytes: int = 0

    @property
    def request(self) -> memoryview:
        """The request's bytes; built anew at each call where they are built."""
        return self.source() if callable(self.source) else self.source


@dataclass(eq=False)
class CodeReply:
    """n status replies of one size, such as `+OK` or `HD`.

    Args:
        codes: the accepted replies, all of one length.
        out: uint8 [n]; the index in `codes` of each reply is stored here.
        row_prefix: as in `StrideReply`.
    """

    codes: tuple[bytes, ...]
    out: NDArray[np.uint8]
    row_prefix: bytes = b""
    errors: list[tuple[int, bytes]] = field(default_factory=list)
    _at: int = 0

    @property
    def done(self) -> bool:
        return self._at == len(self.out)

    def feed(self, data: Bytes) -> int:
        position, stride = 0, len(self.codes[0])
        while not self.done:
            count = min(len(self.out) - self._at, (len(data) - position) // stride)
            block = data[position : position + count * stride].reshape(count, stride)
            run = self._take_codes(block) if count else 0
            position += run * stride
            if self.done or (run == count and len(data) - position >= stride):
                continue
            skipped = prefix_size(data[position:], self.row_prefix)
            line = take_line(data, position + skipped)
            if line is None:
                break
            if not is_error(line):
                raise ProtocolError(f"reply {line[:40]!r}, expected one of {self.codes!r}")
            self.errors.append((self._at, line))
            self._at += 1
            position += skipped + len(line) + len(EOL)
        return position

    def _take_codes(self, block: Bytes) -> int:
        good = np.zeros(len(block), dtype=bool)
        out = self.out[self._at : self._at + len(block)]
        for index, code in enumerate(self.codes):
            hit = matches(block, 0, code)
            out[hit] = index
            good |= hit
        run = len(block) if good.all() else int(np.argmin(good))
        self._at += run
        return run


FOREIGN = b"-FOREIGN"
"""Stands for a small value that cannot be one of ours: of another type, or larger than MAX_BLOB_BYTES. No value of ours is this text."""
MAX_BLOB_BYTES = 1 << 20
_MOST_BYTES = 1 << 30  # more than any server stores under a key


@dataclass(eq=False)
class BlobReply:
    """One small value, such as a marker, or a miss; FOREIGN for what only another program can have put there.

    Args:
        miss: the whole line (without its end) that says the value is missing.
        line: the first line as it came; memcached's tells the token.
    """

    miss: bytes
    value: bytes | None = None
    error: bytes | None = None
    line: bytes = b""
    done: bool = False
    _skip: int = 0  # bytes still to come of a value that is passed over

    def feed(self, data: Bytes) -> int:
        if self._skip:
            taken = min(self._skip, len(data))
            self._skip -= taken
            self.done = not self._skip
            return taken
        line = take_line(data, 0)
        if line is None:
            return 0
        after, self.line = len(line) + len(EOL), line
        if line == self.miss or is_error(line):
            self.value = FOREIGN if line.startswith(WRONG_TYPE) else None
            self.error = line if is_error(line) and self.value is None else None
            self.done = True
            return after
        size = value_size(line)
        if size is None or size > _MOST_BYTES:
            raise ProtocolError(f"reply {line[:40]!r}, expected a value")
        if size > MAX_BLOB_BYTES:
            self.value, self._skip = FOREIGN, size + len(EOL)
            return after
        if len(data) < after + size + len(EOL):
            return 0
        if data[after + size : after + size + len(EOL)].tobytes() != EOL:
            raise ProtocolError(f"a value of {size} bytes is not followed by a line end")
        self.value = data[after : after + size].tobytes()
        self.done = True
        return after + size + len(EOL)


@dataclass(eq=False)
class RepliesInOrder:
    """Several small replies to one request that holds several commands: one step per command would wait for the window."""

    replies: Sequence[ReplyReader]
    _at: int = 0

    @property
    def done(self) -> bool:
        return self._at == len(self.replies)

    def feed(self, data: Bytes) -> int:
        position = 0
        while not self.done:
            position += self.replies[self._at].feed(data[position:])
            if not self.replies[self._at].done:
                break
            self._at += 1
        return position


@dataclass(eq=False)
class LineReply:
    """One line, kept as it is."""

    line: bytes = b""
    done: bool = False

    def feed(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        self.line, self.done = line, True
        return len(line) + len(EOL)
