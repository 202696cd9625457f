"""The contract of every reply's reader, and the readers of small replies. Bytes in, arrays out; no sockets, any split of the stream.

A reply is fed views of the receive buffer and says how many bytes it has consumed. All readers rest on one idea: a batch of replies is an
array with a constant stride. So its framing is checked, and its data copied out, in a few vector operations for all rows at once. Values
are read by `fixed_size_values`, by `bucket_values` and, with memcached's tokens, by `memcached_replies`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.process.cached_property import batch_value
from kvemb.wire.buffer_scan import EOL, UNREAD, WRONG_TYPE, Bytes, is_error, matches, prefix_size, take_line, unread_bytes, value_size


class UnexpectedValueError(Exception):
    """A value of another size than the table's records lies under a row's key; `row` is its index in the reply."""

    def __init__(self, reply: "RowsReader", row: int, size_bytes: int, expected_bytes: int) -> None:
        super().__init__(f"row {row}: value of {size_bytes} bytes, expected {expected_bytes}")
        self.reply, self.row, self.size_bytes, self.expected_bytes = reply, row, size_bytes, expected_bytes


class ReplyReader(ABC):
    """Reads the reply to one request, from bytes that come in pieces of any size.

    A subclass reads the start of the bytes in `take`. There are three answers, whatever the reply: something whole was taken,
    more bytes are needed, or an error is raised. `feed` is the one loop around it.
    """

    _skip: int = 0  # bytes still to come of a value that is passed over

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the whole reply has been consumed."""

    @property
    def fewest_bytes(self) -> int:
        """How many bytes the reply has at least, whatever the server says; 0 where nothing is known, or no use is made of it."""
        return 0

    @abstractmethod
    def take(self, data: Bytes) -> int:
        """Take some or all whole parts of the reply at the start of data; return how many bytes. Not called once done.

        Returns:
            0 when more bytes are needed before anything can be taken.

        Raises:
            ProtocolError: no server of this kind sends that.
            UnexpectedValueError: a value has another size than was asked for.
        """

    def feed(self, data: Bytes) -> int:
        """Consume the complete parts at the start of data; return how many bytes. Called again with the rest and more."""
        position = 0
        while position < len(data) and not self.done:
            if self._skip:
                taken = min(self._skip, len(data) - position)
                self._skip -= taken
            elif not (taken := self.take(data[position:] if position else data)):
                break
            position += taken
        return position


@dataclass(eq=False, kw_only=True)
class RowsReader(ReplyReader):
    """Reads one answer for each of n rows into arrays. Answers come in the order of the rows. Subclasses are dataclasses."""

    n_rows: int = field(init=False)  # how many rows this reply answers; a subclass sets it
    # (row, error line) of each row that the server refused; such a row is answered, too
    errors: list[tuple[int, bytes]] = field(default_factory=list)
    _at: int = 0  # how many rows were answered so far

    @property
    def done(self) -> bool:
        return self._at == self.n_rows and not self._skip

    def prepare(self) -> None:
        """Compute what reading takes besides the answer; may be called while the server works on it."""

    def _refused(self, line: bytes) -> None:
        """Record an error as the next row's answer."""
        self.errors.append((self._at, line))
        self._at += 1


@batch_value
class Step:
    """One request and the reply it will get."""

    # the request's bytes, or a function that builds them. It is called when the request is sent, so that the requests of a large batch are
    # built while the server works on the first ones.
    source: memoryview | Callable[[], memoryview]
    reply: ReplyReader  # reads the answer
    # how large the answer is if nothing is missing; 0 = small or unknown. A hint for the exchange, which may wait for more of a large
    # answer before it looks at it.
    reply_bytes: int = 0

    @property
    def request(self) -> memoryview:
        """The request's bytes; a source that builds them builds them again at each call."""
        return self.source() if callable(self.source) else self.source


@batch_value
class RowsStep(Step):
    """A step whose reply answers rows, one by one."""

    reply: RowsReader


@dataclass(eq=False)
class CodeReply(RowsReader):
    """n status replies of one size, such as `+OK` or `HD`."""

    codes: tuple[bytes, ...]  # the accepted replies, all of one length
    out: NDArray[np.uint8]  # uint8 [n]; the index in `codes` of each reply is stored here
    row_prefix: bytes = b""  # as in `FixedSizeValuesReply`

    def __post_init__(self) -> None:
        self.n_rows = len(self.out)

    def take(self, data: Bytes) -> int:
        stride = len(self.codes[0])
        count = min(len(self.out) - self._at, len(data) // stride)
        run = self._take_codes(data[: count * stride].reshape(count, stride)) if count else 0
        taken = run * stride
        return taken if run and run == count else taken + self._take_error(data[taken:])

    def _take_error(self, data: Bytes) -> int:
        skipped = prefix_size(data, self.row_prefix)
        line = take_line(data, skipped)
        if line is None:
            return 0
        if not is_error(line):
            raise ProtocolError(f"reply {line[:40]!r}, expected one of {self.codes!r}")
        self._refused(line)
        return skipped + len(line) + len(EOL)

    def _take_codes(self, block: Bytes) -> int:
        good = np.zeros(len(block), dtype=bool)  # [k]: rows with an accepted reply; block is [k, stride]
        out = self.out[self._at : self._at + len(block)]  # uint8 [k], a view
        for index, code in enumerate(self.codes):
            hit = matches(block, 0, code)  # bool [k]
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
class BlobReply(ReplyReader):
    """One small value, such as a marker, or a miss; FOREIGN for a value that only another program can have put there."""

    miss: bytes  # the whole line (without its end) that says the value is missing
    value: bytes | None = None
    error: bytes | None = None
    line: bytes = b""  # the first line as it came; memcached's tells the token
    done: bool = False
    _over: int = 0  # bytes still to come of a value that is too large

    def take(self, data: Bytes) -> int:
        if self._over:
            taken = min(self._over, len(data))
            self._over -= taken
            self.done = not self._over
            return taken
        line = take_line(data, 0)
        if line is None:
            return 0
        after, self.line = len(line) + len(EOL), line
        size = None if line == self.miss else value_size(line)
        if size is None and (line == self.miss or is_error(line)):
            self.value = FOREIGN if line.startswith(WRONG_TYPE) else None
            self.error = line if is_error(line) and self.value is None else None
            self.done = True
            return after
        if size is None or size > _MOST_BYTES:
            raise ProtocolError(f"reply {line[:40]!r}, expected a value")
        if size > MAX_BLOB_BYTES:
            self.value, self._over = FOREIGN, size + len(EOL)
            return after
        whole = data[after : after + size + len(EOL)].tobytes()
        if len(whole) == size + len(EOL) and whole.endswith(EOL):
            self.value, self.done = whole[: -len(EOL)], True
            return after + len(whole)
        if unread := unread_bytes(data, line):
            self.error, self.done = UNREAD, True
            return unread
        if len(whole) < size + len(EOL):
            return 0
        raise ProtocolError(f"a value of {size} bytes is not followed by a line end")


@dataclass(eq=False)
class RepliesInOrder(ReplyReader):
    """Several small replies to one request that holds several commands: one step per command would wait for the window."""

    replies: Sequence[ReplyReader]
    _at: int = 0

    @property
    def done(self) -> bool:
        return self._at == len(self.replies)

    def take(self, data: Bytes) -> int:
        reply = self.replies[self._at]
        taken = reply.feed(data)
        self._at += reply.done
        return taken


@dataclass(eq=False)
class LineReply(ReplyReader):
    """Reads a reply of one line, and keeps it as it is."""

    line: bytes = b""
    done: bool = False

    def take(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        self.line, self.done = line, True
        return len(line) + len(EOL)
