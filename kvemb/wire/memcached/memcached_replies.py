"""Readers of memcached's replies to the meta commands and to `stats`. Pure.

`CasValuesReply`: values with compare-and-swap tokens, `VA <size> c<token>` lines, whose width varies with the token. The stride is not
constant there, so rows are found from the positions of all lines that look like a hit or a miss. Genuine ones follow each other without a
gap. One that lies inside a value starts before its predecessor ends, and is dropped. All in vector operations.

`CasWriteReply`: conditional writes, `HD c<token>` and its refusals, one line per row. Tokens that were asked for without their values look
alike. Every line end ends a row's answer. memcached hands
them over in small pieces. They gather first, since parsing costs the same for few lines as for many. Tokens count up, so usually all
lines are equally wide and have a constant stride; others are parsed from the positions of their ends.

`StatsReply`: lines of a name and a value, until END.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import EOL, Bytes, find, is_error, matches, matches_at, parse_digits, take_line, value_size, windows
from kvemb.wire.replies import ReplyReader, RowsReader, UnexpectedValueError

_MISS = b"EN\r\n"
_PADDING = np.zeros(len(_MISS), np.uint8)
_MAX_DIGITS = 20
_STORED = int.from_bytes(b"HD", "little")
# NS: "must not exist", but it does. EX: the token is an older one. NF: a token was given for a row that is not there.
_REFUSED = tuple(int.from_bytes(code, "little") for code in (b"NS", b"EX", b"NF"))
_HEAD = 4  # "HD c"
_USUAL = b"HD c"
_MOST_DIGITS = 19  # that 64 bits certainly hold
_GATHERED_BYTES = 16 << 10
_MOST_LINES = 1 << 14


@dataclass(eq=False)
class CasValuesReply(RowsReader):
    """n values of one size with their tokens, each of which may be missing.

    Args:
        size_bytes: of a value.
        out: uint8 [n, m], m <= size_bytes; the first m bytes of each value found are copied here.
        found: bool [n], set here.
        tokens: uint64 [n], set here for values found.
        foreign: bool [n], set here for values of another size, which are passed over then, with their tokens; None: they are errors.
    """

    size_bytes: int
    out: Bytes
    found: NDArray[np.bool_]
    tokens: NDArray[np.uint64]
    foreign: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.n_rows = len(self.found)
        self._head = b"VA %d c" % self.size_bytes

    def take(self, data: Bytes) -> int:
        return self._take_rows(data) or self._take_odd(data)

    def _take_rows(self, data: Bytes) -> int:
        starts, lengths, digits = self._candidates(data)  # intp [k] each: every place that looks like a row
        starts, lengths, digits = _without_inner(starts, lengths, digits)  # [k]: without those inside a value, which are fewer
        if not len(starts) or starts[0] != 0:
            return 0
        ends = starts + lengths  # intp [k]: where the row behind each begins
        # bool [k]: the row begins where the one before ended, has arrived whole, and ends with CR LF
        chained = np.append(True, starts[1:] == ends[:-1]) & (ends <= len(data))
        chained &= (data[np.minimum(ends, len(data)) - 2] == ord("\r")) & (data[np.minimum(ends, len(data)) - 1] == ord("\n"))
        count = len(starts) if chained.all() else int(np.argmin(chained))  # rows in order, from the first on
        count = min(count, len(self.found) - self._at)
        if not count:
            return 0
        hits = np.flatnonzero(digits[:count] > 0)  # intp [h]: which of these rows are values; the others are misses
        rows = self._at + hits  # intp [h]: their numbers in the reply
        if len(hits):
            values = starts[hits] + len(self._head) + digits[hits] + 2  # intp [h]: where their bytes begin in data
            self.out[rows] = windows(data, self.out.shape[1])[values]
            self.tokens[rows] = parse_digits(data, starts[hits] + len(self._head), digits[hits])
            self.found[rows] = True
        self._at += count
        return int(ends[count - 1])

    def _candidates(self, data: Bytes) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Every place that looks like a row: (start, length of the row, digits of its token; 0 = a miss), by start."""
        heads, misses = find(data, self._head), find(data, _MISS)  # intp [h] and [m]: positions in data
        reach = len(self._head) + _MAX_DIGITS + 1
        # A head so near the end that its line may be cut waits for more bytes, unless the line's end is there already.
        padded = np.concatenate([data, np.zeros(reach, dtype=np.uint8)])
        # uint8 [h, 21]: the bytes behind each head: the token's digits, then CR
        after = windows(padded, _MAX_DIGITS + 1)[heads + len(self._head)] if len(heads) else np.empty((0, 1), np.uint8)
        other = (after < ord("0")) | (after > ord("9"))  # bool [h, 21]: bytes that are no digits
        digits = np.argmax(other, axis=1) if len(heads) else np.empty(0, np.intp)  # intp [h]: how many digits come first
        # bool [h]: heads with a token whose line ends behind it
        ended = (digits > 0) & (after[np.arange(len(heads)), digits] == ord("\r")) if len(heads) else np.empty(0, bool)
        heads, digits = heads[ended], digits[ended]
        starts = np.concatenate([heads, misses])  # intp [k]: k = ended heads and misses; unsorted until the last line
        lengths = np.concatenate([len(self._head) + digits + 2 + self.size_bytes + 2, np.full(len(misses), len(_MISS))])
        digits = np.concatenate([digits, np.zeros(len(misses), dtype=np.intp)])
        order = np.argsort(starts, kind="stable")
        return starts[order], lengths[order], digits[order]

    def _take_odd(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None or line + b"\r\n" == _MISS:
            return 0
        digits = line[len(self._head) :] if line.startswith(self._head) else b""
        if digits.isdigit() and len(digits) <= _MAX_DIGITS:
            if len(data) >= len(line) + self.size_bytes + 4:
                raise ProtocolError(f"a value of {self.size_bytes} bytes is not followed by a line end")
            return 0
        if is_error(line):
            self._refused(line)
            return len(line) + 2
        size = value_size(line)
        if size is None or size == self.size_bytes:
            raise ProtocolError(f"reply line {line[:40]!r}, expected {self._head!r}… or {_MISS!r}")
        token = line.rpartition(b" c")[2]
        if self.foreign is None or not token.isdigit() or len(token) > _MAX_DIGITS:
            raise UnexpectedValueError(self, self._at, size, self.size_bytes)
        self.foreign[self._at], self.tokens[self._at] = True, np.uint64(int(token))
        self._at += 1
        whole = len(line) + size + 4
        self._skip = max(0, whole - len(data))
        return whole - self._skip


def _without_inner(
    starts: NDArray[np.intp], lengths: NDArray[np.intp], digits: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Drop candidates that begin inside a value: from the first row on, each row is followed by the first candidate after its end."""
    ends = starts + lengths
    if not (starts[1:] < ends[:-1]).any():
        return starts, lengths, digits
    # Rare (a record happens to hold such text), so the chain of rows is followed one by one here.
    following = np.searchsorted(starts, ends).tolist()  # [k]: of each candidate, the first one that begins at or behind its end
    kept = [0]
    while following[kept[-1]] < len(starts):
        kept.append(following[kept[-1]])
    return starts[kept], lengths[kept], digits[kept]


@dataclass(eq=False)
class CasWriteReply(RowsReader):
    """n answers to `ms` with the flag c, or to `mg` with that flag alone.

    Args:
        out: uint8 [n], set to 0 for stored or found, 1 for a conflict or a miss.
        tokens: uint64 [n], set to the new token of rows stored, or the present one of values found.
        found: bool [n] of `mg`, whose answer may be that there is no value: set here. None of `ms`.
    """

    out: NDArray[np.uint8]
    tokens: NDArray[np.uint64]
    found: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.n_rows = len(self.out)

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
        lines = data[: count * width].reshape(count, width)  # uint8 [count, width]: a line per row, if all are as wide
        good = matches(lines, 0, _USUAL) & matches(lines, width - 2, EOL)  # bool [count]: `HD c`, digits, CR LF
        value = np.zeros(count, np.uint64)  # uint64 [count]: the tokens, up to the column reached
        for column in range(_HEAD, _HEAD + n_digits):
            digit = lines[:, column] - np.uint8(ord("0"))  # uint8 [count]; another byte than a digit wraps to more than 9
            good &= digit <= 9
            value *= np.uint64(10)
            value += digit
        run = count if good.all() else int(np.argmin(good))  # good rows, from the first on
        rows = slice(self._at, self._at + run)
        self._note(rows, np.True_)
        self.tokens[rows] = value[:run]
        self._at += run
        return run * width

    def _note(self, rows: slice, stored: NDArray[np.bool_] | np.bool_) -> None:
        self.out[rows] = ~stored
        if self.found is not None:
            self.found[rows] = stored

    def _take_lines(self, data: Bytes) -> int:
        ends = np.flatnonzero(data == ord("\n"))[: len(self.out) - self._at]  # intp [k]: each line's LF
        if not len(ends):
            return 0
        starts = np.concatenate([[0], ends[:-1] + 1])  # intp [k]: each line's first byte
        n_digits = ends - starts - _HEAD - 1  # intp [k]: bytes between `HD c` and CR
        plausible = n_digits > 0  # bool [k]: long enough for a token
        lines, starts = starts, np.where(plausible, starts, 0)
        # uint16 [k]: the first two bytes of each line as one number: HD, NS, EX or NF
        codes = data[starts].astype(np.uint16) | (data[np.minimum(starts + 1, len(data) - 1)].astype(np.uint16) << np.uint16(8))
        stored = plausible & (codes == _STORED)  # bool [k]; the other good ones are conflicts
        good = stored | (codes == _REFUSED[0]) | (codes == _REFUSED[1]) | (codes == _REFUSED[2])
        # bool [k]: a known code, then `c`, then CR before LF
        good &= plausible & (data[np.minimum(starts + 3, len(data) - 1)] == ord("c")) & (data[ends - 1] == ord("\r"))
        # Every byte between head and line end must be a digit. n_before: intp [len(data)], digits up to each byte, that byte included.
        n_before = np.cumsum((data >= ord("0")) & (data <= ord("9")))
        good &= n_before[np.maximum(ends - 2, 0)] - n_before[np.minimum(starts + _HEAD - 1, len(data) - 1)] == n_digits
        if self.found is not None:  # such an answer is good, too
            good |= (ends - lines == len(_MISS) - 1) & matches_at(np.append(data, _PADDING), lines, _MISS, len(_MISS))
        count = len(ends) if good.all() else int(np.argmin(good))  # good lines, from the first on
        rows = slice(self._at, self._at + count)
        self._note(rows, stored[:count])
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


@dataclass(eq=False)
class StatsReply(ReplyReader):
    """A server's statistics, as text; `error` for an error in its place."""

    fields: dict[str, str] = field(default_factory=dict)
    error: bytes | None = None
    done: bool = False

    def take(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        self._note(line)
        return len(line) + len(EOL)

    def _note(self, line: bytes) -> None:
        word, _, rest = line.decode("utf-8", "replace").partition(" ")
        name, _, value = rest.partition(" ")
        if line == b"END" or is_error(line):
            self.error = line if is_error(line) else None
            self.done = True
        elif word == "STAT" and name and len(self.fields) < _MOST_LINES:
            self.fields[name] = value
        else:
            raise ProtocolError(f"reply {line[:40]!r}, expected a line of `stats`")
