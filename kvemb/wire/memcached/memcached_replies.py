"""Readers of memcached's replies to the meta commands and to `stats`. Pure.

`CasValuesReply`: values with compare-and-swap tokens, `VA <size> c<token>` lines, whose width varies with the token. The stride is not
constant there, so rows are found from the positions of all lines that look like a hit or a miss. Genuine ones follow each other without a
gap. One that lies inside a value starts before its predecessor ends, and is dropped. All in vector operations.

`CasWriteReply`: tokens without values, `HD c<token>` or a miss, one line per row; after a conditional write its outcome comes first.
memcached hands them over in small pieces. They gather first, since parsing costs the same for few lines as for many. Tokens count up, so
usually all lines are equally wide and have a constant stride; others are parsed from the positions of their ends.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import (
    EOL,
    UNREAD,
    Bytes,
    find,
    is_error,
    matches,
    matches_at,
    parse_digits,
    take_line,
    unread_bytes,
    value_size,
    windows,
)
from kvemb.wire.replies import ReplyReader, RowsReader, UnexpectedValueError

_MISS = b"EN\r\n"
_MAX_DIGITS = 20
_HEAD = b"HD c"
_STORED_LINE = b"STORED\r\n"
# There is an older or newer token; nothing; something, or nothing, although the value was to be added, or to be replaced.
_REFUSED_LINES = (b"EXISTS\r\n", b"NOT_FOUND\r\n", b"NOT_STORED\r\n")
_PADDING = np.zeros(max(map(len, _REFUSED_LINES)), np.uint8)
_MOST_DIGITS = 19  # that 64 bits certainly hold
_GATHERED_BYTES = 16 << 10
_MOST_LINES = 1 << 14


@dataclass(eq=False)
class CasValuesReply(RowsReader):
    """n values of one size with their tokens, each of which may be missing."""

    size_bytes: int  # of a value
    out: Bytes  # uint8 [n, m], m <= size_bytes; the first m bytes of each value found are copied here
    found: NDArray[np.bool_]  # bool [n], set here
    tokens: NDArray[np.uint64]  # uint64 [n], set here for values found
    # bool [n], set here for values of another size, which are passed over then, with their tokens; None: they are errors
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
        ends = starts + lengths  # intp [k]: where the row after each begins
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
        if unread := unread_bytes(data, line):
            self._refused(UNREAD)
            return unread
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
    following = np.searchsorted(starts, ends).tolist()  # [k]: of each candidate, the first one that begins at or after its end
    kept = [0]
    while following[kept[-1]] < len(starts):
        kept.append(following[kept[-1]])
    return starts[kept], lengths[kept], digits[kept]


@dataclass(eq=False)
class CasWriteReply(RowsReader):
    """n answers to `mg` with the flag c alone; or to a conditional write and such a `mg` for each row."""

    out: NDArray[np.uint8]  # uint8 [n], set to 0 for stored or found, 1 for a conflict or a miss
    tokens: NDArray[np.uint64]  # uint64 [n], set to the token of the value that is there; 0 where there is none
    found: NDArray[np.bool_] | None = None  # bool [n] of reads: set here
    written: bool = False  # whether the line of a conditional write comes before each of a `mg`
    _owed: bool = False  # whether the line of the `mg` after a write that failed is still to come

    def __post_init__(self) -> None:
        self.n_rows = len(self.out)
        self._usual = _STORED_LINE + _HEAD if self.written else _HEAD

    @property
    def done(self) -> bool:
        return self._at == self.n_rows and not self._owed

    def feed(self, data: Bytes) -> int:
        return 0 if self._may_wait(data) else super().feed(data)

    def take(self, data: Bytes) -> int:
        if self._owed:
            return self._take_owed(data)
        return self._take_usual(data) or self._take_lines(data) or self._take_odd(data)

    def _may_wait(self, data: Bytes) -> bool:
        """Whether more is coming for sure: nothing in it can be an error, after which the node may fall silent."""
        n_lines = (len(self.out) - self._at) * (1 + self.written)
        if len(data) >= _GATHERED_BYTES or self._owed or np.count_nonzero(data == ord("\n")) >= n_lines:
            return False
        return not len(find(data, b"RR"))  # which is in every ERROR, and in no other answer

    def _take_usual(self, data: Bytes) -> int:
        """Take lines of rows that were stored, as long as they are as wide as the first one."""
        head = len(self._usual)
        width = data[: head + _MOST_DIGITS + 2].tobytes().find(b"\n", head) + 1
        n_digits = width - head - 2
        if n_digits < 1:
            return 0
        count = min(len(self.out) - self._at, len(data) // width)
        lines = data[: count * width].reshape(count, width)  # uint8 [count, width]: the lines of a row, if all are as wide
        good = matches(lines, 0, self._usual) & matches(lines, width - 2, EOL)  # bool [count]: `HD c`, digits, CR LF
        value = np.zeros(count, np.uint64)  # uint64 [count]: the tokens, up to the column reached
        for column in range(head, head + n_digits):
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
        per_row = 1 + self.written
        ends = np.flatnonzero(data == ord("\n"))[: (len(self.out) - self._at) * per_row]  # intp [lines]: each line's LF
        ends = ends[: len(ends) // per_row * per_row]
        if not len(ends):
            return 0
        starts = np.concatenate([[0], ends[:-1] + 1])  # intp [lines]: each line's first byte
        padded = np.append(data, _PADDING)
        outcomes = _outcomes(padded, starts[::2], ends[::2]) if self.written else None  # bool [k] each, of k rows
        starts, ends = starts[per_row - 1 :: per_row], ends[per_row - 1 :: per_row]  # intp [k]: of the lines with tokens
        n_digits = ends - starts - len(_HEAD) - 1  # intp [k]: bytes between `HD c` and CR
        there = (n_digits > 0) & matches_at(padded, starts, _HEAD, len(_PADDING)) & (data[ends - 1] == ord("\r"))  # bool [k]
        # Every byte between head and line end must be a digit. n_before: intp [len(data)], digits up to each byte, that byte included.
        n_before = np.cumsum((data >= ord("0")) & (data <= ord("9")))
        there &= n_before[np.maximum(ends - 2, 0)] - n_before[np.minimum(starts + len(_HEAD) - 1, len(data) - 1)] == n_digits
        good = there | ((ends - starts == len(_MISS) - 1) & matches_at(padded, starts, _MISS, len(_PADDING)))  # bool [k]
        stored = there
        if outcomes is not None:
            stored, good = outcomes[0], good & outcomes[1]
        count = len(ends) if good.all() else int(np.argmin(good))  # good rows, from the first on
        rows = slice(self._at, self._at + count)
        self._note(rows, stored[:count])
        self.tokens[rows] = parse_digits(data, starts[:count] + len(_HEAD), np.where(there, n_digits, 0)[:count])
        self._at += count
        return int(ends[count - 1]) + 1 if count else 0

    def _take_odd(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        if is_error(line):
            self._refused(line)
            self._owed = self.written
            return len(line) + len(EOL)
        if self.written and line + EOL in (_STORED_LINE, *_REFUSED_LINES):
            second = take_line(data, len(line) + len(EOL))
            if second is None:
                return 0
            if is_error(second):
                self._refused(second)
                return len(line) + len(second) + 2 * len(EOL)
            line = second
        raise ProtocolError(f"reply {line[:40]!r}, expected {self._usual!r}…, a refusal or {_MISS!r}")

    def _take_owed(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        self._owed = False
        return len(line) + len(EOL)


def _outcomes(padded: Bytes, starts: NDArray[np.intp], ends: NDArray[np.intp]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Read the lines of writes: bool [k] each, which say that the value was stored, and which say something at all."""

    def are(line: bytes) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = (ends - starts == len(line) - 1) & matches_at(padded, starts, line, len(_PADDING))
        return there

    stored = are(_STORED_LINE)
    good = stored.copy()
    for line in _REFUSED_LINES:
        good |= are(line)
    return stored, good


@dataclass(eq=False)
class ClassicWriteReply(RowsReader):
    """n outcomes of classic commands that store; `stored`: bool [n], set here."""

    stored: NDArray[np.bool_]

    def __post_init__(self) -> None:
        self.n_rows = len(self.stored)

    def take(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        if is_error(line):
            self._refused(line)
        elif line + EOL in (_STORED_LINE, *_REFUSED_LINES):
            self.stored[self._at] = line + EOL == _STORED_LINE
            self._at += 1
        else:
            raise ProtocolError(f"reply {line[:40]!r}, expected the outcome of a write")
        return len(line) + len(EOL)


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
