"""Reader of any reply of the Redis protocol (RESP2), within bounds: for administration, where replies are of many shapes. Pure.

A server may be another one than was expected, or broken. Lines, arrays and depths that no server of ours sends are refused as soon as they
are announced. Items that have arrived are read once, however small the pieces. Rows never pass here.
"""

from dataclasses import dataclass, field

import numpy as np

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import EOL, Bytes, matches, take_line
from kvemb.wire.replies import ReplyReader

MAX_ITEMS = 1 << 20
MAX_BULK_BYTES = 32 << 20
_MAX_DEPTH = 8
_MAX_DIGITS = 19
_SHORT_BYTES = 64
_MAX_LINE = 4096
_READ_AT_ONCE = 1 << 16
_OF_ONE_LINE = frozenset({b"+", b"-", b":", b"$"})


@dataclass(frozen=True)
class ErrorLine:
    """An error in the place of a value: its line, with the minus."""

    line: bytes


Value = int | bytes | ErrorLine | None | list["Value"]
"""A status or a string as bytes, an integer, an array, an error; None for what is not there."""


@dataclass(eq=False)
class _Array:
    """An array that is being read: how many of its items are still to come."""

    left: int
    items: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class ValueReply(ReplyReader):
    """One reply of any shape; `value` once it is done."""

    value: Value = None
    done: bool = False
    _open: list[_Array] = field(default_factory=list)
    _n_items: int = 0

    def take(self, data: Bytes) -> int:
        if taken := self._take_run(data):
            return taken
        raw, at = data[:_READ_AT_ONCE].tobytes(), 0  # bytes: a map of slots has a hundred thousand small values
        while not self.done and (taken := self._take_one(raw, at)):
            at += taken
        return at or self._take_large(data)

    def _take_one(self, raw: bytes, at: int) -> int:
        """Take the value or the beginning of an array that lies there whole; return how many bytes it was, 0 for none."""
        end = raw.find(EOL, at, at + _MAX_LINE)
        if end < 0:
            return 0  # `_take_large` says whether that is an error
        line, after = raw[at:end], end + len(EOL)
        kind = line[:1]
        if kind == b"*":
            self._begin(_number(line))
        elif kind == b"$" and line != b"$-1":
            stop = after + _size(line)
            if raw[stop : stop + len(EOL)] != EOL:
                return 0
            self._put(raw[after:stop])
            return stop + len(EOL) - at
        elif kind in _OF_ONE_LINE:
            self._put(_of_line(kind, line))
        else:
            raise ProtocolError(f"reply {line[:40]!r}, expected one of the Redis protocol (RESP2)")
        return after - at

    def _take_large(self, data: Bytes) -> int:
        """Take a string that is longer than the bytes read at once; nothing else remains here once its line is whole."""
        line = take_line(data, 0)
        if line is None:
            return 0
        begin, stop = len(line) + len(EOL), len(line) + len(EOL) + _size(line)
        if len(data) < stop + len(EOL):
            return 0
        if data[stop : stop + len(EOL)].tobytes() != EOL:
            raise ProtocolError(f"a value of {stop - begin} bytes is not followed by a line end")
        self._put(data[begin:stop].tobytes())
        return stop + len(EOL)

    def _take_run(self, data: Bytes) -> int:
        """Take short strings of one size, one after another, at once: the keys of a listing."""
        if not self._open or len(data) < 2 or data[0] != ord("$"):
            return 0
        header = data[:8].tobytes().partition(EOL)[0]
        size = int(header[1:]) if header[1:].isdigit() and len(header) < 4 else _SHORT_BYTES + 1
        begin = len(header) + len(EOL)
        stride = begin + size + len(EOL)
        count = min(len(data) // stride, self._open[-1].left - 1)  # the last one is for `_put`, which knows what follows
        if size > _SHORT_BYTES or count < 2:
            return 0
        block = data[: count * stride].reshape(count, stride)  # uint8 [count, stride]: a string each, if all are of this size
        good = matches(block, 0, header + EOL) & matches(block, begin + size, EOL)  # bool [count]
        run = count if good.all() else int(np.argmin(good))
        raw = data[: run * stride].tobytes()
        self._open[-1].items += [raw[at : at + size] for at in range(begin, run * stride, stride)]
        self._open[-1].left -= run
        return run * stride

    def _begin(self, count: int) -> None:
        if count <= 0:
            self._put([] if count == 0 else None)
            return
        self._n_items += count
        if self._n_items > MAX_ITEMS or len(self._open) == _MAX_DEPTH:
            raise ProtocolError(f"an array of {count} items in {len(self._open)} others, more than any server of ours sends")
        self._open.append(_Array(count))

    def _put(self, value: Value) -> None:
        while self._open:
            inner = self._open[-1]
            inner.items.append(value)
            inner.left -= 1
            if inner.left:
                return
            value = inner.items
            self._open.pop()
        self.value, self.done = value, True


def _of_line(kind: bytes, line: bytes) -> Value:
    if kind == b"+":
        return line[1:]
    if kind == b":":
        return _number(line)
    return ErrorLine(line) if kind == b"-" else None


def _size(line: bytes) -> int:
    size = _number(line)
    if not 0 <= size <= MAX_BULK_BYTES:
        raise ProtocolError(f"reply {line[:40]!r}, expected at most {MAX_BULK_BYTES} bytes")
    return size


def _number(line: bytes) -> int:
    digits = line[2:] if line[1:2] == b"-" else line[1:]
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ProtocolError(f"reply {line[:40]!r}, expected a number")
    return int(line[1:])
