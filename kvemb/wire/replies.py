"""Readers of reply streams: bytes in, arrays out; no sockets, any split of the stream.

A reply is fed views of the receive buffer and says how many bytes it has consumed. All of them rest on one idea: a batch of replies is an
array with a constant stride, so its framing is checked, and its data copied out, in a few vector operations for all rows at once. Misses
break the stride; `StrideReply` then finds the rows from the positions of the misses, still in vector operations. Only a row that is
neither a hit of the expected size nor a miss (a server's error) is looked at by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError

Bytes = NDArray[np.uint8]
_MAX_LINE = 4096
_EOL = b"\r\n"


class UnexpectedValueError(Exception):
    """A value of another size than the table's records lies under a row's key; `row` is its index in the reply."""

    def __init__(self, reply: object, row: int, size_bytes: int, expected_bytes: int) -> None:
        super().__init__(f"row {row}: value of {size_bytes} bytes, expected {expected_bytes}")
        self.reply, self.row, self.size_bytes, self.expected_bytes = reply, row, size_bytes, expected_bytes


class Reply(Protocol):
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
    reply: Reply
    reply_bytes: int = 0

    @property
    def request(self) -> memoryview:
        """The request's bytes; built anew at each call where they are built."""
        return self.source() if callable(self.source) else self.source


def matches(block: Bytes, at: int, pattern: bytes) -> NDArray[np.bool_]:
    """Return which rows of block [k, stride] hold the pattern at column `at`: bool [k].

    Compares in machine words: a comparison of [k, len(pattern)] single bytes costs ten times as much.
    """
    good = np.ones(len(block), dtype=bool)
    for offset, width, mask, value in _words(pattern, block.shape[1] - at) if len(block) else ():
        words = np.ndarray((len(block),), f"<u{width}", block, at + offset, (block.strides[0],))
        good &= (words if mask is None else words & mask) == value
    return good


def matches_at(data: Bytes, starts: NDArray[np.intp], pattern: bytes, room: int) -> NDArray[np.bool_]:
    """Return at which of the given positions of data the pattern lies: bool [k]. Behind every position must be `room` bytes."""
    good = np.ones(len(starts), dtype=bool)
    for offset, width, mask, value in _words(pattern, room) if len(starts) else ():
        words = pieces(data[offset:], width, f"<u{width}")[starts]
        good &= (words if mask is None else words & mask) == value
    return good


@cache
def _words(pattern: bytes, room: int) -> tuple[tuple[int, int, np.uint64 | None, int], ...]:
    """Cut a pattern into machine words: (offset, width, mask, value); one wide word with the rest masked out where there is room for it."""
    words: list[tuple[int, int, np.uint64 | None, int]] = []
    offset = 0
    while offset < len(pattern):
        left = len(pattern) - offset
        value = int.from_bytes(pattern[offset : offset + 8], "little")
        if left not in (1, 2, 4) and offset + 8 <= room:
            words.append((offset, 8, np.uint64((1 << 8 * left) - 1) if left < 8 else None, value))
            offset += 8
        else:
            width = next(w for w in (8, 4, 2, 1) if w <= left)
            words.append((offset, width, None, value & (1 << 8 * width) - 1))
            offset += width
    return tuple(words)


def pieces(data: Bytes, size: int, dtype: str = "") -> NDArray[Any]:
    """Return the view [len - size + 1] whose item i is data[i : i + size] in one piece, raw bytes unless a dtype is given.

    Items of one opaque type are copied whole: gathering rows of [n, size] single bytes costs three times as much.
    """
    return np.ndarray((len(data) - size + 1,), dtype or f"V{size}", data, 0, (1,))


def find(data: Bytes, pattern: bytes) -> NDArray[np.intp]:
    """Return every position at which the pattern starts, ascending."""
    last = len(data) - len(pattern) + 1
    if last <= 0:
        return np.empty(0, dtype=np.intp)
    at = np.flatnonzero((data[:last] == pattern[0]) & (data[1 : last + 1] == pattern[1]))
    for offset in range(2, len(pattern)):
        at = at[data[at + offset] == pattern[offset]]
    return at


def windows(data: Bytes, size: int) -> NDArray[np.uint8]:
    """Return the view [len - size + 1, size] whose row i is data[i : i + size]."""
    return np.lib.stride_tricks.sliding_window_view(data, size)


def take_line(data: Bytes, at: int) -> bytes | None:
    """Return the line starting at `at` without its end, or None while its end has not arrived."""
    line = data[at : at + _MAX_LINE].tobytes()
    end = line.find(_EOL)
    if end < 0 and len(line) == _MAX_LINE:
        raise ProtocolError(f"reply line longer than {_MAX_LINE} bytes: {line[:40]!r}…")
    return None if end < 0 else line[:end]


def prefix_size(data: Bytes, prefix: bytes) -> int:
    """Return the prefix's length when data begins with it, else 0."""
    return len(prefix) if prefix and data[: len(prefix)].tobytes() == prefix else 0


def is_error(line: bytes) -> bool:
    """Whether a reply line is an error of Redis or memcached."""
    return line[:1] == b"-" or line.split(b" ", 1)[0] in (b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR")


@dataclass(eq=False)
class StrideReply:
    """n values of one size, each of which may be missing.

    Args:
        head: bytes before every value (they hold its size).
        size_bytes: of a value.
        miss: what a missing value looks like.
        out: uint8 [n, m], m <= size_bytes; the first m bytes of each value found are copied here.
        found: bool [n], set here.
        preamble: bytes before the first value, b"" for none.
        row_prefix: how every `head` and `miss` begins because another command goes before each row's (Redis Cluster's ASKING); an error
            follows it too.
    """

    head: bytes
    size_bytes: int
    miss: bytes
    out: Bytes
    found: NDArray[np.bool_]
    preamble: bytes = b""
    row_prefix: bytes = b""
    errors: list[tuple[int, bytes]] = field(default_factory=list)
    _at: int = 0

    def __post_init__(self) -> None:
        self._stride = len(self.head) + self.size_bytes + len(_EOL)
        self._values = self.out.view(f"V{self.out.shape[1]}")[:, 0]

    @property
    def done(self) -> bool:
        return self._at == len(self.found)

    def feed(self, data: Bytes) -> int:
        position = 0
        if self.preamble:
            position = self._skip_preamble(data)
            if self.preamble:
                return position
        while not self.done:
            before = position
            position += self._take_hits(data[position:])
            if self.done or self._hit_is_cut(data[position:]):
                break
            position += self._take_mixed(data[position:])
            if position == before:
                position += self._take_odd(data[position:])
            if position == before:
                break
        return position

    def _skip_preamble(self, data: Bytes) -> int:
        size = len(self.preamble)
        if len(data) >= size and data[:size].tobytes() == self.preamble:
            self.preamble = b""
            return size
        line = take_line(data, 0)
        if line is None:
            return 0
        if not is_error(line):
            raise ProtocolError(f"reply begins with {line[:40]!r}, expected {self.preamble!r}")
        # One error stands for the whole request (a MGET that was refused).
        self.preamble = b""
        self.errors.extend((row, line) for row in range(self._at, len(self.found)))
        self._at = len(self.found)
        return len(line) + len(_EOL)

    def _take_hits(self, data: Bytes) -> int:
        """The fast path: a run of hits, straight from the receive buffer to the output."""
        count = min(len(self.found) - self._at, len(data) // self._stride)
        if not count:
            return 0
        block = data[: count * self._stride].reshape(count, self._stride)
        good = matches(block, 0, self.head)
        good &= matches(block, self._stride - len(_EOL), _EOL)
        run = count if good.all() else int(np.argmin(good))
        rows = slice(self._at, self._at + run)
        self._values[rows] = np.ndarray((run,), self._values.dtype, data, len(self.head), (self._stride,))
        self.found[rows] = True
        self._at += run
        return run * self._stride

    def _hit_is_cut(self, data: Bytes) -> bool:
        """Whether nothing or a value's beginning is all that is there: by far the most frequent end of a feed."""
        return len(data) < self._stride and (not len(data) or data[: len(self.head)].tobytes() == self.head)

    def _take_mixed(self, data: Bytes) -> int:
        """Hits and misses in any order: the misses are searched, and everything between them must be hits."""
        left = len(self.found) - self._at
        data = data[: left * max(self._stride, len(self.miss))]
        ranks, tail = self._ranks(find(data, self.miss), len(data), left)
        if not len(ranks):
            return 0
        count = min(left, int(ranks[-1]) + 1 + tail // self._stride)
        missing = np.zeros(count, dtype=bool)
        missing[ranks] = True
        ends = np.cumsum(np.where(missing, len(self.miss), self._stride))
        starts = np.append(0, ends[:-1])
        good = self._hits_at(data, starts, missing)
        if not good.all():
            count = int(np.argmin(good))
            if not count:
                return 0
        rows = slice(self._at, self._at + count)
        hits = np.flatnonzero(~missing[:count])
        if len(hits):
            values = pieces(data, self._values.dtype.itemsize)
            self._values[self._at + hits] = values[starts[hits] + len(self.head)]
        self.found[rows] = ~missing[:count]
        self._at += count
        return int(ends[count - 1])

    def _hits_at(self, data: Bytes, starts: NDArray[np.intp], missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether a hit begins and ends where each row that is not missing should."""
        last = len(data) - self._stride
        if last < 0:
            return missing
        starts = np.minimum(starts, last)  # only a missing row can lie behind the last hit
        good = matches_at(data, starts, self.head, self._stride)
        good &= matches_at(data[self._stride - len(_EOL) :], starts, _EOL, len(_EOL))
        good |= missing
        return good

    def _ranks(self, at: NDArray[np.intp], n_bytes: int, left: int) -> tuple[NDArray[np.intp], int]:
        """Turn candidates for misses into row numbers, below `left`; and count the bytes behind the last of them.

        A genuine one leaves a whole number of hits before it; the others lie inside a value, or behind this reply's end.
        """
        while len(at):
            before = np.arange(len(at))
            hits, rest = np.divmod(at - len(self.miss) * before, self._stride)
            ranks = hits + before
            n_inside = int(np.searchsorted(ranks, left))  # ranks ascend
            false = np.flatnonzero(rest[:n_inside])
            if not len(false):
                return ranks[:n_inside], n_bytes - int(at[n_inside - 1]) - len(self.miss) if n_inside else 0
            # All candidates from the first false one to the next genuine one go at once: a record may be full of them.
            first = int(false[0])
            genuine = np.flatnonzero((at[first:] - len(self.miss) * first) % self._stride == 0)
            at = np.delete(at, slice(first, first + int(genuine[0]) if len(genuine) else len(at)))
        return at, 0

    def _take_odd(self, data: Bytes) -> int:
        """Neither a hit nor a miss is complete here: an error, a value of another size, or too few bytes yet."""
        skipped = prefix_size(data, self.row_prefix)
        line = take_line(data, skipped)
        if line is None:
            return 0
        begin = self.row_prefix[:skipped] + line + _EOL
        if begin in (self.head, self.miss):
            if begin == self.head and len(data) >= self._stride:
                raise ProtocolError(f"a value of {self.size_bytes} bytes is not followed by a line end")
            return 0
        if is_error(line):
            self.errors.append((self._at, line))
            self._at += 1
            return skipped + len(line) + len(_EOL)
        size = value_size(line)
        if size is None or size == self.size_bytes:
            raise ProtocolError(f"reply line {line[:40]!r}, expected {self.head!r} or {self.miss!r}")
        raise UnexpectedValueError(self, self._at, size, self.size_bytes)


def value_size(line: bytes) -> int | None:
    """Return the size that the first line of a value announces (`$76`, `VA 76 …`), or None when it is no such line."""
    text = line[1:] if line[:1] == b"$" else line[3:].split(b" ")[0] if line[:3] == b"VA " else b""
    return int(text) if text.isdigit() else None


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
            position += skipped + len(line) + len(_EOL)
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


@dataclass(eq=False)
class BlobReply:
    """One value of any size up to a limit, or a miss: markers and other small values.

    Args:
        miss: the whole line (without its end) that says the value is missing.
        max_bytes: larger values are refused.
    """

    miss: bytes
    max_bytes: int = 1 << 20
    value: bytes | None = None
    error: bytes | None = None
    done: bool = False

    def feed(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        after = len(line) + len(_EOL)
        if line == self.miss or is_error(line):
            self.error = line if is_error(line) else None
            self.done = True
            return after
        size = value_size(line)
        if size is None or size > self.max_bytes:
            raise ProtocolError(f"reply {line[:40]!r}, expected a value of at most {self.max_bytes} bytes")
        if len(data) < after + size + len(_EOL):
            return 0
        if data[after + size : after + size + len(_EOL)].tobytes() != _EOL:
            raise ProtocolError(f"a value of {size} bytes is not followed by a line end")
        self.value = data[after : after + size].tobytes()
        self.done = True
        return after + size + len(_EOL)


@dataclass(eq=False)
class RepliesInOrder:
    """Several small replies to one request that holds several commands: one step per command would wait for the window."""

    replies: Sequence[Reply]
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
        return len(line) + len(_EOL)
