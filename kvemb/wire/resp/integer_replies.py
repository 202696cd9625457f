"""Reader of Redis's integer replies (`:4029`), one for every row, or with other short replies before it.

The integer that answers a write into a page is the page's length after it. For whole pages, which is nearly always, that is one number, and
the answers are compared as an array with a constant stride. Others are read line by line, yet all at once: no values are in these replies,
so every line end ends an answer.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import Bytes, matches, parse_digits, take_line
from kvemb.wire.replies import RowsReader

_ERROR, _INTEGER = ord("-"), ord(":")
_INTEGERS = re.compile(rb"(?::[0-9]{1,18}\r\n)+")
_FEWEST_BYTES = 4  # of a line: `:0`, and no error is shorter
_OK = int.from_bytes(b"+OK", "little")


@dataclass(eq=False)
class IntegerReplies(RowsReader):
    """n rows of several lines each, the last one an integer."""

    lines: bytes  # the kind of each line of a row: b"+" for `+OK`, b":" for an integer; an error may stand in any place
    most: int  # the largest integer that is right; a row with a larger one counts as an error
    out: NDArray[np.uint8]  # uint8 [n], set to 0 for rows that were answered
    usual: int | None = None  # the integer that nearly all replies are; `most` where nothing is said

    def __post_init__(self) -> None:
        self.n_rows = len(self.out)
        integer = b":%d\r\n" % (self.most if self.usual is None else self.usual)
        self._usual = b"".join(integer if line == _INTEGER else b"+OK\r\n" for line in self.lines)

    @property
    def fewest_bytes(self) -> int:
        return _FEWEST_BYTES * len(self.lines) * len(self.out)

    def take(self, data: Bytes) -> int:
        return self._take_usual(data) or self._take_integers(data) or self._take_lines(data)

    def _take_usual(self, data: Bytes) -> int:
        stride = len(self._usual)
        count = min(len(self.out) - self._at, len(data) // stride)
        # bool [count]: rows whose lines are the usual ones, if all before them are as long
        good = matches(data[: count * stride].reshape(count, stride), 0, self._usual)
        run = count if good.all() else int(np.argmin(good))
        self.out[self._at : self._at + run] = 0
        self._at += run
        return run * stride

    def _take_integers(self, data: Bytes) -> int:
        """Take integers of any lengths, nothing else: as writes that create rows are answered, run by run."""
        if len(self.lines) > 1 or not (match := _INTEGERS.match(data.data)):
            return 0
        lines = match.group().split(b"\r\n", len(self.out) - self._at)  # one integer's line per row, then the rest of the match
        rest = len(lines.pop())  # nothing, or the lines behind the last row
        if max(int(line[1:]) for line in lines) > self.most:
            return 0
        self.out[self._at : self._at + len(lines)] = 0
        self._at += len(lines)
        return match.end() - rest

    def _take_lines(self, data: Bytes) -> int:
        per_row = len(self.lines)
        ends = np.flatnonzero(data == ord("\n"))[: (len(self.out) - self._at) * per_row]  # intp [k]: each line's LF
        n_rows = len(ends) // per_row
        if not n_rows:
            take_line(data, int(ends[-1]) + 1 if len(ends) else 0)  # refuses a line without an end
            return 0
        ends = ends[: n_rows * per_row]  # [n_rows * per_row]: of whole rows alone
        starts = np.concatenate([[0], ends[:-1] + 1])  # the same: each line's first byte
        failed = self._failed(data, starts, ends).reshape(n_rows, per_row)  # bool: errors, by row and line
        for row in np.flatnonzero(failed.any(axis=1)).tolist():
            line = row * per_row + int(np.argmax(failed[row]))
            self.errors.append((self._at + row, data[starts[line] : ends[line] - 1].tobytes()))
        self.out[self._at : self._at + n_rows] = 0
        self._at += n_rows
        return int(ends[-1]) + 1

    def _failed(self, data: Bytes, starts: NDArray[np.intp], ends: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which lines are errors, or integers that are too large: bool [k]."""
        kinds = data[starts]  # uint8 [k]: each line's first byte
        expected = np.frombuffer(self.lines, dtype=np.uint8)  # [lines per row]: the first bytes they should have
        failed: NDArray[np.bool_] = kinds == _ERROR  # [k]
        n_digits = ends - starts - 2  # intp [k]: bytes between a line's first one and CR
        n_before = np.cumsum((data >= ord("0")) & (data <= ord("9")))  # intp [len(data)]: digits up to each byte, that byte included
        digits: NDArray[np.intp] = n_before[np.maximum(ends - 2, 0)] - n_before[starts]  # [k]: how many of these bytes are digits
        integer = (kinds == _INTEGER) & (n_digits > 0) & (digits == n_digits) & (n_digits <= 18)  # bool [k]: whole integers
        ok = (n_digits == 2) & (_three_bytes(data, starts) == _OK)  # bool [k]: `+OK`
        good = np.where(np.resize(expected, len(starts)) == _INTEGER, integer, ok) | failed  # bool [k]: right in its place, or an error
        good &= data[ends - 1] == ord("\r")
        if not good.all():
            at = int(np.argmin(good))
            line = data[starts[at] : ends[at] + 1].tobytes()
            raise ProtocolError(f"reply {line[:40]!r}, expected {'an integer' if expected[at % len(expected)] == _INTEGER else '+OK'}")
        value = parse_digits(data, starts + 1, np.where(integer, n_digits, 0))  # uint64 [k]: 0 where the line is no integer
        failed |= integer & (value > np.uint64(self.most))
        return failed


def _three_bytes(data: Bytes, starts: NDArray[np.intp]) -> NDArray[np.uint32]:
    last = len(data) - 1  # a line near the end of data may be shorter than three bytes
    first, second, third = (data[np.minimum(starts + offset, last)].astype(np.uint32) for offset in range(3))  # each [k]
    three: NDArray[np.uint32] = first | second << np.uint32(8) | third << np.uint32(16)
    return three
