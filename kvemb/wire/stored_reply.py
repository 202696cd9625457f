"""Reader of memcached's answers to conditional writes: `HD c<token>` and its refusals, one line per row, of varying width.

No values are in these replies, so every line end ends a row's answer, and all lines are parsed at once from the positions of the ends.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.wire.scan import Bytes, is_error, take_line
from kvemb.wire.token_reply import parse_digits

_STORED = int.from_bytes(b"HD", "little")
# NS: "must not exist", but it does. EX: the token is an older one. NF: a token was given for a row that is not there.
_REFUSED = tuple(int.from_bytes(code, "little") for code in (b"NS", b"EX", b"NF"))
_HEAD = 4  # "HD c"


@dataclass(eq=False)
class StoredReply:
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
    def done(self) -> bool:
        return self._at == len(self.out)

    def feed(self, data: Bytes) -> int:
        position = 0
        while not self.done:
            before = position
            position += self._take_lines(data[position:])
            if position == before and not self.done:
                position += self._take_odd(data[position:])
            if position == before:
                break
        return position

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
        self.errors.append((self._at, line))
        self._at += 1
        return len(line) + 2
