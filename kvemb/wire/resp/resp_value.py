"""Reader of any reply of the Redis protocol (RESP2), within bounds: for administration, where replies are of many shapes. Pure.

A server may be another one than was expected, or broken. Lines, arrays and depths that no server of ours sends are refused as soon as they
are announced. What has arrived is looked at once, however small its pieces. Rows never pass here.
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
        return self._take_run(data) or self._take_one(data)

    def _take_one(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        kind, text, taken = line[:1], line[1:], len(line) + len(EOL)
        if kind == b"*":
            self._begin(_number(line))
            return taken
        if kind == b"$" and text != b"-1":
            size = _number(line)
            if not 0 <= size <= MAX_BULK_BYTES:
                raise ProtocolError(f"reply {line[:40]!r}, expected at most {MAX_BULK_BYTES} bytes")
            if len(data) < taken + size + len(EOL):
                return 0
            if data[taken + size : taken + size + len(EOL)].tobytes() != EOL:
                raise ProtocolError(f"a value of {size} bytes is not followed by a line end")
            self._put(data[taken : taken + size].tobytes())
            return taken + size + len(EOL)
        if kind not in (b"+", b"-", b":", b"$"):
            raise ProtocolError(f"reply {line[:40]!r}, expected one of the Redis protocol (RESP2)")
        self._put(_of_line(kind, line))
        return taken

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
        block = data[: count * stride].reshape(count, stride)
        good = matches(block, 0, header + EOL) & matches(block, begin + size, EOL)
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


def _number(line: bytes) -> int:
    digits = line[2:] if line[1:2] == b"-" else line[1:]
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ProtocolError(f"reply {line[:40]!r}, expected a number")
    return int(line[1:])
