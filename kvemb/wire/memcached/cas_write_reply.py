"""Reader of memcached's answers to conditional writes: `HD c<token>` and its refusals, one line per row, of varying width.

No values are in these replies, so every line end ends a row's answer. memcached hands them over in small pieces. They are left to gather,
since parsing costs the same for few lines as for many. Tokens count up, so usually all lines are equally wide and have a constant stride;
others are parsed from the positions of their ends.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import EOL, Bytes, is_error, matches, parse_digits, take_line
from kvemb.wire.replies import RowsReader

_STORED = int.from_bytes(b"HD", "little")
# NS: "must not exist", but it does. EX: the token is an older one. NF: a token was given for a row that is not there.
_REFUSED = tuple(int.from_bytes(code, "little") for code in (b"NS", b"EX", b"NF"))
_HEAD = 4  # "HD c"
_USUAL = b"HD c"
_MOST_DIGITS = 19  # that 64 bits certainly hold
_GATHERED_BYTES = 16 << 10


@dataclass(eq=False)
class CasWriteReply(RowsReader):
    """n answers to `ms` with the flag c.

    Args:
        out: uint8 [n], set to 0 for stored, 1 for a conflict.
        tokens: uint64 [n], set to the new token of rows stored.
    """

    out: NDArray[np.uint8]
    tokens: NDArray[np.uint64]
    errors: list[tuple[int, bytes]] = field(default_factory=list)
    _at: int = 0

    @property
    def n_rows(self) -> int:
        return len(self.out)

    def feed(self, data: Bytes) -> int:
        return 0 if self._may_wait(data) else super().feed(data)

    def take(self, data: Bytes) -> int:
        return self._take_usual(data) or self._take_lines(data) or self._take_odd(data)

    def _may_wait(self, data: Bytes) -> bool:
        """Whether more is coming for sure: nothing in it can be an error, behind which the node may fall silent."""
        if len(data) >= _GATHERED_BYTES or np.count_nonzero(data == ord("\n")) >= len(self.out) - self._at:
            return False
        return not (data == ord("R")).any()  # which is in every ERROR, and in no other answer

    def _take_usual(self, data: Bytes) -> int:
        """Take lines of rows that were stored, as long as they are as wide as the first one."""
        width = data[: _HEAD + _MOST_DIGITS + 2].tobytes().find(b"\n") + 1
        n_digits = width - _HEAD - 2
        if n_digits < 1:
            return 0
        count = min(len(self.out) - self._at, len(data) // width)
        lines = data[: count * width].reshape(count, width)
        good = matches(lines, 0, _USUAL) & matches(lines, width - 2, EOL)
        value = np.zeros(count, np.uint64)
        for column in range(_HEAD, _HEAD + n_digits):
            digit = lines[:, column] - np.uint8(ord("0"))
            good &= digit <= 9
            value *= np.uint64(10)
            value += digit
        run = count if good.all() else int(np.argmin(good))
        rows = slice(self._at, self._at + run)
        self.out[rows], self.tokens[rows] = 0, value[:run]
        self._at += run
        return run * width

    def _take_lines(self, data: Bytes) -> int:
        ends = np.flatnonzero(data == ord("\n"))[: len(self.out) - self._at]
        if not len(ends):
            return 0
        starts = np.concatenate([[0], ends[:-1] + 1])
        n_digits = ends - starts - _HEAD - 1
        plausible = n_digits > 0
        starts = np.where(plausible, starts, 0)
        codes = data[starts].astype(np.uint16) | (data[np.minimum(starts + 1, len(data) - 1)].astype(np.uint16) << np.uint16(8))
        stored = codes == _STORED
        good = stored | (codes == _REFUSED[0]) | (codes == _REFUSED[1]) | (codes == _REFUSED[2])
        good &= plausible & (data[np.minimum(starts + 3, len(data) - 1)] == ord("c")) & (data[ends - 1] == ord("\r"))
        # Every byte between head and line end must be a digit.
        n_before = np.cumsum((data >= ord("0")) & (data <= ord("9")))
        good &= n_before[np.maximum(ends - 2, 0)] - n_before[np.minimum(starts + _HEAD - 1, len(data) - 1)] == n_digits
        count = len(ends) if good.all() else int(np.argmin(good))
        rows = slice(self._at, self._at + count)
        self.out[rows] = ~stored[:count]
        self.tokens[rows] = parse_digits(data, starts[:count] + _HEAD, n_digits[:count])
        self._at += count
        return int(ends[count - 1]) + 1 if count else 0

    def _take_odd(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        if not is_error(line):
            raise ProtocolError(f"reply {line[:40]!r}, expected HD, NS, EX or NF with a token")
        self._refused(line)
        return len(line) + 2
