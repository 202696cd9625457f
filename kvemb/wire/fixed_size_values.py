"""Reader of a batch of values of one size, each of which may be missing: the replies of pipelined GETRANGEs, HMGETs of one field, and `mg`.

The fast paths copy runs of hits straight out of the receive buffer, and pass over runs of misses. Where both are mixed there is no
stride: rows are then found from the positions of the misses, still in vector operations. Only an error, or a value of another size, is
read singly.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import (
    EOL,
    UNREAD,
    WRONG_TYPE,
    Bytes,
    find,
    is_error,
    matches,
    matches_at,
    pieces,
    prefix_size,
    take_line,
    unread_bytes,
    value_size,
)
from kvemb.wire.replies import RowsReader, UnexpectedValueError

_MISSES_IN_A_ROW = 16  # with fewer, looking for a run costs more than it saves


@dataclass(eq=False)
class FixedSizeValuesReply(RowsReader):
    """n values of one size, each of which may be missing."""

    head: bytes  # bytes before every value (they hold its size)
    size_bytes: int  # of a value
    miss: bytes  # the reply for a missing value
    out: Bytes  # uint8 [n, m], m <= size_bytes; the first m bytes of each value found are copied here
    found: NDArray[np.bool_]  # bool [n], set here
    # the reply to the command before each row's (Redis Cluster's ASKING): every `head` and `miss` begins with it, and an error follows it,
    # too
    row_prefix: bytes = b""
    # the bytes between that and a value or a miss, in `head` and `miss`, too, but not before an error (an array's first line)
    announced: bytes = b""
    # where not 0, a value that begins with so many zero bytes counts as missing (a row that its page has no record of). A multiple of 4.
    blank_bytes: int = 0
    # bool [n], set here for values of another size, which are passed over then; None: such a value is an error
    foreign: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.n_rows = len(self.found)
        self._stride = len(self.head) + self.size_bytes + len(EOL)
        self._values = as_items(self.out)  # [n] items of m bytes, in the memory of out
        self._unread = 2 * self.head + self.miss  # see unread_bytes

    @property
    def reply_bytes(self) -> int:
        """How large the reply is if nothing is missing."""
        return len(self.found) * self._stride

    def take(self, data: Bytes) -> int:
        if len(data) < self._stride and self._hit_is_cut(data):
            return 0
        else:
            taken = self._take_hits(data)
            if self._at < len(self.found):
                taken += self._take_misses(data[taken:])
            if self._at < len(self.found) and not self._hit_is_cut(data[taken:]):
                taken += self._take_mixed(data[taken:])
                taken = taken or self._take_odd(data)
        if self.blank_bytes and self._at == len(self.found):
            self._drop_blank()
        return taken

    def _drop_blank(self) -> None:
        written = np.zeros(len(self.out), dtype=np.uint32)  # [n]: the OR of a row's first words; 0 = blank
        for at in range(0, self.blank_bytes, 4):
            written |= np.ndarray((len(self.out),), "<u4", self.out, at, (self.out.strides[0],))
        self.found &= written != 0

    def _take_hits(self, data: Bytes) -> int:
        """The fast path: a run of hits, straight from the receive buffer to the output."""
        count = min(len(self.found) - self._at, len(data) // self._stride)
        if not count or data[: len(self.head)].tobytes() != self.head:
            return 0
        run = count if self._all_hits(data, count) else self._n_hits(data[: count * self._stride].reshape(count, self._stride))
        rows = slice(self._at, self._at + run)
        # Both [run] items of m bytes; in data they lie a stride apart, after each head.
        self._values[rows] = np.ndarray((run,), self._values.dtype, data, len(self.head), (self._stride,))
        self.found[rows] = True
        self._at += run
        return run * self._stride

    def _take_misses(self, data: Bytes) -> int:
        """The other fast path: a run of misses, as of rows that were never written. A short run is for `_take_mixed`."""
        size = len(self.miss)
        count = min(len(self.found) - self._at, len(data) // size)
        if count < _MISSES_IN_A_ROW or data[: _MISSES_IN_A_ROW * size].tobytes() != _MISSES_IN_A_ROW * self.miss:
            return 0
        good = matches(data[: count * size].reshape(count, size), 0, self.miss)  # bool [count]: a miss each, if all before are
        run = count if good.all() else int(np.argmin(good))
        self.found[self._at : self._at + run] = False
        self._at += run
        return run * size

    def _all_hits(self, data: Bytes, count: int) -> bool:
        """Whether data is `count` hits, its first head apart: between rows stand the end of one and the head of the next, in few words."""
        end, inside = count * self._stride, len(self.head) + self.size_bytes
        if data[end - len(EOL) : end].tobytes() != EOL:
            return False
        # uint8 [count - 1, stride]: from the end of one row's value on, so that it begins with EOL and the next row's head
        seams = data[inside : inside + end - self._stride].reshape(-1, self._stride)
        return 0 not in matches(seams, 0, EOL + self.head).tobytes()

    def _n_hits(self, block: Bytes) -> int:  # uint8 [k, stride]: a row each, if all are hits
        """How many of the first rows are hits, when not all are."""
        good = matches(block, 0, self.head)  # bool [k]
        good &= matches(block, len(self.head) + self.size_bytes, EOL)
        return int(np.argmin(good))

    def _hit_is_cut(self, data: Bytes) -> bool:
        """Whether data is empty or a value's beginning alone: by far the most frequent end of a feed."""
        begins = not len(data) or data[: len(self.head)].tobytes() == self.head
        return begins and len(data) < self._stride and data[: len(self._unread)].tobytes() != self._unread

    def _take_mixed(self, data: Bytes) -> int:
        """Hits and misses in any order: the misses are searched, and everything between them must be hits."""
        left = len(self.found) - self._at
        data = data[: left * max(self._stride, len(self.miss))]
        ranks, tail = self._ranks(find(data, self.miss), len(data), left)  # ranks: intp [misses], row numbers from 0 for the next row
        if not len(ranks):
            return 0
        count = min(left, int(ranks[-1]) + 1 + tail // self._stride)
        missing = np.zeros(count, dtype=bool)  # [count]: of the next rows
        missing[ranks] = True
        ends = np.cumsum(np.where(missing, len(self.miss), self._stride))  # intp [count]: where each row ends in data
        starts = np.append(0, ends[:-1])  # intp [count]: where it begins
        good = self._hits_at(data, starts, missing)  # bool [count]
        if not good.all():
            count = int(np.argmin(good))
            if not count:
                return 0
        rows = slice(self._at, self._at + count)
        hits = np.flatnonzero(~missing[:count])  # intp [h]: rows with a value
        if len(hits):
            values = pieces(data, self._values.dtype.itemsize)  # item i: the m bytes of data from i on
            self._values[self._at + hits] = values[starts[hits] + len(self.head)]
        self.found[rows] = ~missing[:count]
        self._at += count
        return int(ends[count - 1])

    def _hits_at(self, data: Bytes, starts: NDArray[np.intp], missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether a hit begins and ends where each row that is not missing should."""
        last = len(data) - self._stride
        if last < 0:
            return missing
        starts = np.minimum(starts, last)  # only a missing row can lie after the last hit
        good = matches_at(data, starts, self.head, self._stride)
        good &= matches_at(data[self._stride - len(EOL) :], starts, EOL, len(EOL))
        good |= missing
        return good

    def _ranks(self, at: NDArray[np.intp], n_bytes: int, left: int) -> tuple[NDArray[np.intp], int]:
        """Turn candidates for misses, intp [c], into row numbers below `left` (the rows that remain); count the bytes behind the last.

        A genuine one leaves a whole number of hits before it; the others lie inside a value, or after this reply's end.
        """
        while len(at):
            before = np.arange(len(at))  # intp [c]: misses before each, should all be genuine
            # intp [c] each: whole hits before it, and the bytes that make no whole one (0 where it is genuine)
            hits, rest = np.divmod(at - len(self.miss) * before, self._stride)
            ranks = hits + before  # intp [c]: its row, from 0 for the next row
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
        skipped += prefix_size(data[skipped:], self.announced)
        line = take_line(data, skipped)
        if line is None:
            return 0
        if unread := unread_bytes(data, line):
            self._refused(UNREAD)
            return unread
        begin = data[:skipped].tobytes() + line + EOL
        if begin == self.head or self.miss.startswith(begin):
            whole = self._stride if begin == self.head else len(self.miss)
            if len(data) >= whole:  # the framing of a whole one was refused by the fast paths
                raise ProtocolError(f"a value of {self.size_bytes if begin == self.head else 0} bytes is not followed by a line end")
            return 0
        if is_error(line):
            if self.foreign is not None and line.startswith(WRONG_TYPE):
                self.foreign[self._at] = True
                self._at += 1
            else:
                self._refused(line)
            return skipped + len(line) + len(EOL)
        size = value_size(line)
        if size is None or size == self.size_bytes:
            raise ProtocolError(f"reply line {line[:40]!r}, expected {self.head!r} or {self.miss!r}")
        if self.foreign is None:
            raise UnexpectedValueError(self, self._at, size, self.size_bytes)
        self.foreign[self._at] = True
        self._at += 1
        whole = skipped + len(line) + size + 2 * len(EOL)
        self._skip = max(0, whole - len(data))
        return whole - self._skip
