"""Reader of HMGET's replies: for every command an array of values of one size, each of which may be missing. Pure.

A step holds commands for many buckets, a few rows or a thousand each. The line that announces a bucket's array is known beforehand. So
each value's place is known, too, as long as none is missing; a miss shifts all bytes behind it by one fixed number. All rows of all
buckets that have arrived are checked and copied in a few vector operations; only errors and values of another size are read singly.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.errors import ProtocolError
from kvemb.process.cached_property import batch_value
from kvemb.wire.buffer_scan import EOL, WRONG_TYPE, Bytes, find, is_error, matches_at, pieces, prefix_size, take_line, value_size
from kvemb.wire.replies import RowsReader, UnexpectedValueError

MISS = b"$-1\r\n"
MOST_ROWS = 4096  # of a run
WORD_BYTES = 8
_EOL_BYTES = np.array(len(EOL))


@batch_value
class BucketRuns:
    """Neighbouring rows that are asked for by one command each."""

    firsts: NDArray[np.intp]  # intp [k], the first row of each run, ascending from 0
    sizes: NDArray[np.intp]  # intp [k], rows of each, at most MOST_ROWS

    @staticmethod
    def of(firsts: NDArray[np.intp], n_rows: int, most: int = MOST_ROWS) -> "BucketRuns":
        """Return the runs that begin at these rows, of n_rows in all, cut where longer than `most`: a server does not stop in a command."""
        sizes = np.empty_like(firsts)
        np.subtract(firsts[1:], firsts[:-1], sizes[:-1])
        sizes[-1] = n_rows - firsts.item(-1)
        if n_rows <= most or int(sizes.max(initial=0)) <= most:
            return BucketRuns(firsts, sizes)
        n_cuts = (sizes - 1) // most  # intp [k]: in how many places each run is cut
        # intp [k + cuts]: each piece's number within its run: its number among all pieces, less that of the run's first piece
        place = np.arange(len(firsts) + int(n_cuts.sum())) - np.repeat(np.cumsum(n_cuts + 1) - n_cuts - 1, n_cuts + 1)
        return BucketRuns.of(np.repeat(firsts, n_cuts + 1) + most * place, n_rows, most)


@batch_value
class _Frame:
    """Where everything lies in a reply in which no value is missing."""

    before: NDArray[np.intp]  # intp [k], bytes before each run's first row
    places: NDArray[np.intp]  # intp [n], where each row begins
    seams: NDArray[np.intp]  # intp [n], where the line before each row ends
    starts: NDArray[np.intp]  # intp [k], where each run's announcement begins
    # words, masks: uint64 [k], the announcement in a word, and which bytes of the word are its
    words: NDArray[np.uint64]
    masks: NDArray[np.uint64]


@dataclass(eq=False)
class BucketValuesReply(RowsReader):
    """n values of one size in runs, each of which may be missing."""

    runs: BucketRuns  # of the rows; each is announced by an array's first line
    size_bytes: int  # of a value
    out: Bytes  # uint8 [n, m], m <= size_bytes; the first m bytes of each value found are copied here
    found: NDArray[np.bool_]  # bool [n], set here
    asked: bytes = b""  # the reply to the command before each run's (Redis Cluster's ASKING), which comes before its array; b"" for none
    # bool [n], set here for values of another size, and for rows whose key holds no bucket; None: such a value is an error
    foreign: NDArray[np.bool_] | None = None
    _announced: int = 0  # runs whose announcement has come
    _frame: _Frame = field(init=False)  # once prepared
    _prepared: bool = False
    _misses: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))  # where each row would begin if all were missing

    def __post_init__(self) -> None:
        self.n_rows = len(self.found)
        self._head = b"$%d\r\n" % self.size_bytes
        self._stride = len(self._head) + self.size_bytes + len(EOL)
        self._values = as_items(self.out)  # [n] items of m bytes, in the memory of out

    def prepare(self) -> None:
        self._prepared = True
        texts, sizes = announcement_texts(), self.runs.sizes
        before = texts.lengths.take(sizes)
        if self.asked:
            before += len(self.asked)
        places = self._places_of(self._stride, before)
        self._frame = _Frame(
            before, places, places - _EOL_BYTES, places.take(self.runs.firsts) - before, texts.words.take(sizes), texts.masks.take(sizes)
        )

    def _places_of(self, row_bytes: int, before: NDArray[np.intp]) -> NDArray[np.intp]:
        """Where each row would begin if all were of this size, as everything before it has a known length: intp [n]."""
        places = np.arange(0, row_bytes * len(self.found), row_bytes)
        places += before[0] if len(before) == 1 else before.cumsum().repeat(self.runs.sizes)
        return places

    @property
    def reply_bytes(self) -> int:
        """About how large the reply is if nothing is missing."""
        return self._stride * len(self.found) + (WORD_BYTES + len(self.asked)) * len(self.runs.firsts)

    def take(self, data: Bytes) -> int:
        if not self._prepared:
            self.prepare()
        # An announcement may come next: its length, 0 where a row comes.
        run_waits = self._announced < len(self.runs.firsts) and self.runs.firsts.item(self._announced) == self._at
        waiting_bytes = self._frame.before.item(self._announced) if run_waits else 0
        if data[waiting_bytes : waiting_bytes + len(MISS)].tobytes() == MISS and (taken := self._take_misses(data, waiting_bytes)):
            return taken
        if taken := self._take_values(data, waiting_bytes):
            return taken
        # No row is whole and in order here: an announcement, an error, a value of another size, or too few bytes yet.
        return self._take_announcement(data) if run_waits else self._take_odd_value(data)

    def _take_misses(self, data: Bytes, waiting_bytes: int) -> int:
        """Take the rows that have arrived if all are misses, as for rows that are seen for the first time; else nothing."""
        if not len(self._misses):
            self._misses = self._places_of(len(MISS), self._frame.before)
        base = int(self._misses[self._at]) - waiting_bytes  # where data would begin if all rows so far were missing
        most = len(data) // len(MISS) + 1
        places = self._misses[self._at : self._at + most] - base  # intp [p]: where the next rows begin in data, if all are misses
        n_whole = int(np.searchsorted(places, len(data) - len(MISS), side="right"))
        if not n_whole or any(data[at : at + len(MISS)].tobytes() != MISS for at in (int(places[0]), int(places[n_whole - 1]))):
            return 0
        places = places[:n_whole]  # [n_whole]: of those that have arrived whole
        if not (matches_at(data, places, MISS, len(MISS)).all() and self._announced_right(data, places)[1].all()):
            return 0
        self._keep(data, places, np.ones(n_whole, dtype=bool))
        return int(places[-1]) + len(MISS)

    def _take_values(self, data: Bytes, waiting_bytes: int) -> int:
        """Take values and misses, and the announcements of their runs, as far as they have arrived and are in order."""
        if len(data) < self._stride + waiting_bytes:  # data is the next value's beginning alone: the most frequent end of a feed
            begin = self.asked + b"*%d\r\n" % self.runs.sizes[self._announced] + self._head if waiting_bytes else self._head
            if data[: len(begin)].tobytes() == begin[: len(data)]:
                return 0
        frame, first = self._frame, self._at
        base = frame.places.item(first) - waiting_bytes  # where data would begin if no row so far had been missing
        if frame.places.item(-1) + self._stride - base <= len(data):
            end = len(self.found)
        else:  # rows that can have come, so that small pieces of a large reply cost little each
            most = frame.places[first : first + len(data) // len(MISS) + 1]
            end = first + int(most.searchsorted(base + len(data) - self._stride, side="right"))
        if first < end and self._all_in_order(data, first, end, base):
            places = frame.places[first:end] - base if base else frame.places[first:end]
            self._keep(data, places, None)
            return int(places[-1]) + self._stride
        return self._take_mixed(data, frame.places[first : first + len(data) // len(MISS) + 1] - base)

    def _all_in_order(self, data: Bytes, first: int, end: int, base: int) -> bool:
        """Whether a value lies at the place of each of these rows, and the announcement of its run before it where it is the first."""
        frame = self._frame
        start, stop = frame.places.item(first) - base, frame.places.item(end - 1) - base + self._stride
        if data[start : start + len(self._head)].tobytes() != self._head or data[stop - len(EOL) : stop].tobytes() != EOL:
            return False
        # Before every other value's head a line ends, the last value's or that of an announcement: both in few machine words.
        seams = frame.seams[first + 1 : end]
        right = matches_at(data, seams - base if base else seams, EOL + self._head, self._stride + len(EOL))
        if 0 in right.tobytes():  # in a tenth of the time of `all`, which shows in small batches
            return False
        last = len(frame.before) if end == len(self.found) else int(self.runs.firsts.searchsorted(end))
        starts = frame.starts[self._announced : last]
        return 0 not in self._announced_at(data, starts - base if base else starts, last).tobytes()

    def _announced_at(self, data: Bytes, starts: NDArray[np.intp], last: int) -> NDArray[np.bool_]:
        """Whether the announcements of the next runs, up to run `last`, lie at these places of data, intp [r]: bool [r]."""
        if not len(starts):
            return np.empty(0, dtype=bool)
        runs = slice(self._announced, last)
        words = pieces(data[len(self.asked) :], WORD_BYTES, "<u8")[starts]  # uint64 [r]; a row follows, so 8 bytes are there
        right: NDArray[np.bool_] = (words & self._frame.masks[runs]) == self._frame.words[runs]  # bool [r]: `*<size>` EOL
        if self.asked:
            right &= matches_at(data, starts, self.asked, WORD_BYTES + len(self.asked))
        return right

    def _announced_right(self, data: Bytes, places: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Which of these rows begin a run, intp [r], and whether its announcement lies before each of them: bool [r]."""
        last = int(self.runs.firsts.searchsorted(self._at + len(places)))
        rows = self.runs.firsts[self._announced : last] - self._at  # intp [r]: rows that begin a run, as indices in places
        return rows, self._announced_at(data, places[rows] - self._frame.before[self._announced : last], last)

    def _keep(self, data: Bytes, places: NDArray[np.intp], missing: NDArray[np.bool_] | None) -> None:
        """Copy the values of the next rows, which begin at these places."""
        rows = slice(self._at, self._at + len(places))
        size = self._values.dtype.itemsize
        if missing is None:
            self._values[rows] = pieces(data[len(self._head) :], size)[places]
            self.found[rows] = True
        else:
            hits = np.flatnonzero(~missing)  # intp [h]: those that have a value
            if len(hits):
                self._values[self._at + hits] = pieces(data[len(self._head) :], size)[places[hits]]
            self.found[rows] = ~missing
        self._at = rows.stop
        self._announced = len(self.runs.firsts) if self._at == len(self.found) else int(self.runs.firsts.searchsorted(self._at))

    def _take_mixed(self, data: Bytes, places: NDArray[np.intp]) -> int:
        """Values and misses in any order: the misses are searched, and everything between them must be in order."""
        # places: intp [p], where the next rows begin in data, if none is missing; each miss brings later rows `less` bytes nearer
        less = self._stride - len(MISS)
        missing = np.zeros(len(places), dtype=bool)  # [p]
        missing[_genuine(find(data, MISS), places, less)] = True
        places = places - less * (np.cumsum(missing) - missing)  # intp [p]: where they really begin
        ends = places + np.where(missing, len(MISS), self._stride)  # intp [p]: and end
        n_whole = int(np.searchsorted(ends, len(data), side="right"))
        if not n_whole:
            return 0
        places, missing = places[:n_whole], missing[:n_whole]
        good = missing.copy()  # bool [n_whole]: rows in order; misses are, since they were found in their places
        hits = np.flatnonzero(~missing)  # intp [h]: rows with a value
        if len(hits):
            good[hits] = matches_at(data, places[hits], self._head, self._stride)
            good[hits] &= matches_at(data[self._stride - len(EOL) :], places[hits], EOL, len(EOL))
        firsts, right = self._announced_right(data, places)  # intp and bool [r]: rows that begin a run
        good[firsts] &= right
        n_good = n_whole if good.all() else int(np.argmin(good))
        if not n_good:
            return 0
        self._keep(data, places[:n_good], missing[:n_good])
        return int(ends[n_good - 1])

    def _take_announcement(self, data: Bytes) -> int:
        skipped = prefix_size(data, self.asked)
        line = take_line(data, skipped)
        if line is None:
            return 0
        size = int(self.runs.sizes[self._announced])
        if is_error(line):  # the error answers all rows of the command
            rows = range(self._at, self._at + size)
            if self.foreign is not None and line.startswith(WRONG_TYPE):
                self.foreign[rows.start : rows.stop] = True
            else:
                self.errors.extend((row, line) for row in rows)
            self._at = rows.stop
        elif self.asked[:skipped] + line != self.asked + b"*%d" % size:
            raise ProtocolError(f"reply line {line[:40]!r}, expected an array of {size} values")
        self._announced += 1
        return skipped + len(line) + len(EOL)

    def _take_odd_value(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        begin = line + EOL
        if begin in (self._head, MISS):
            if len(data) >= (self._stride if begin == self._head else len(MISS)):
                raise ProtocolError(f"a value of {self.size_bytes} bytes is not followed by a line end")
            return 0
        size = value_size(line)
        if size is None or size == self.size_bytes:
            raise ProtocolError(f"reply line {line[:40]!r}, expected {self._head!r} or {MISS!r}")
        if self.foreign is None:
            raise UnexpectedValueError(self, self._at, size, self.size_bytes)
        self.foreign[self._at] = True
        self._at += 1
        whole = len(begin) + size + len(EOL)
        self._skip = max(0, whole - len(data))
        return whole - self._skip


def _genuine(at: NDArray[np.intp], places: NDArray[np.intp], less: int) -> NDArray[np.intp]:
    """Return the row of each candidate, intp [c], at one of the `places`, intp [p]; others lie inside a value, or after these rows."""
    while len(at):
        expected = at + less * np.arange(len(at))  # intp [c]: its row's place, if all candidates before it are misses
        ranks = np.searchsorted(places, expected)  # intp [c]: the row that begins there, or after
        n_inside = int(np.searchsorted(ranks, len(places)))
        good = np.zeros(len(at), dtype=bool)  # [c]: genuine, up to the first false one
        good[:n_inside] = places[ranks[:n_inside]] == expected[:n_inside]
        false = np.flatnonzero(~good)
        if not len(false):
            return ranks
        # Behind a false one all ranks are off; those from it to the next genuine one go at once: a record may be full of them.
        first = int(false[0])
        later = at[first:] + less * first  # intp [c - first]: as `expected`, counting only the misses before `first`
        ranks = np.searchsorted(places, later)
        inside = ranks < len(places)
        genuine = np.flatnonzero(inside & (places[np.minimum(ranks, len(places) - 1)] == later))  # indices in later
        at = np.delete(at, slice(first, first + int(genuine[0]) if len(genuine) else len(at)))
    return at


@batch_value
class Announcements:
    """The line that announces an array (`*123\\r\\n`), by its number of values: length, and bytes as a word with a mask. [number] each."""

    lengths: NDArray[np.intp]
    words: NDArray[np.uint64]
    masks: NDArray[np.uint64]


@cache
def announcement_texts() -> Announcements:
    texts = [b"*%d\r\n" % n for n in range(2 * MOST_ROWS + 5)]  # a command that writes has two words for each row, and up to four more
    lengths = np.array([len(text) for text in texts])
    words = np.array([int.from_bytes(text, "little") for text in texts], dtype=np.uint64)
    return Announcements(lengths, words, np.array([(1 << 8 * len(text)) - 1 for text in texts], dtype=np.uint64))
