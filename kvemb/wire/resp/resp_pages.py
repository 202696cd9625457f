"""Rows in pages over the Redis protocol: GETRANGE and SETRANGE. Commands: https://redis.io/docs/latest/commands/getrange/, …/setrange/

Redis takes offsets without leading zeros only, so the requests of a page's rows are of a few lengths ("kinds"), by the digits of their
offsets. Rows of one kind have requests of one stride; stores put the rows of a kind together, and steps are cut where the kind changes.
The text of a row's offset is looked up in a table that holds it for every place of a page.

Before a row is written whose page may not exist, the byte after the page's last record is written. That makes a page whole at once, and
changes nothing on one that is whole.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_rows
from kvemb.schema.pages import PAGE_KEY_SIZE, PagedKeys, PageLayout
from kvemb.schema.record import HEADER_SIZE
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.replies import RowsStep
from kvemb.wire.request_arrays import Bytes, StepLimit, chunks, columns
from kvemb.wire.resp.integer_replies import IntegerReplies

_KEY_HEAD = b"$%d\r\n" % PAGE_KEY_SIZE
_GETRANGE = b"*4\r\n$8\r\nGETRANGE\r\n" + _KEY_HEAD
_SETRANGE = b"*4\r\n$8\r\nSETRANGE\r\n" + _KEY_HEAD
_MISS = b"$0\r\n\r\n"
_NO_ROW = bytes(HEADER_SIZE)
_PAGE_IS_MADE = 16  # added to a row's kind; above every number of kinds by digits, which is two for every length of an offset


class PageRequests:
    """Builds steps for rows that lie in pages; `ask` is sent before every command, and answered with `asked`."""

    def __init__(self, ask: bytes, asked: bytes, rows_per_step: int, limit: StepLimit) -> None:
        self._ask, self._asked = ask, asked
        self._rows_per_step, self._limit = rows_per_step, limit

    def read_steps(
        self, keys: PagedKeys, record_bytes: int, out: Bytes, found: NDArray[np.bool_], foreign: NDArray[np.bool_] | None
    ) -> list[RowsStep]:
        """Read the first out.shape[1] bytes of every record, and no others; fewer than a header would not tell rows from no rows."""
        size = out.shape[1]
        if size < HEADER_SIZE or record_bytes != keys.layout.record_bytes:
            raise ValueError(f"read {size} of {record_bytes} bytes from pages of records of {keys.layout.record_bytes}")
        head = self._asked + b"$%d\r\n" % size
        texts = _range_texts(keys.layout, size)
        steps = []
        for rows, kind in self._runs(texts.kinds[keys.places], size):
            request = partial(self._get_request, keys[rows], texts, kind)
            reply = FixedSizeValuesReply(
                head,
                size,
                self._asked + _MISS,
                out[rows],
                found[rows],
                row_prefix=self._asked,
                blank_bytes=HEADER_SIZE,
                foreign=None if foreign is None else foreign[rows],
            )
            steps.append(RowsStep(request, reply, reply.reply_bytes))
        return steps

    def write_steps(self, keys: PagedKeys, records: RecordsToWrite, out: NDArray[np.uint8]) -> list[RowsStep]:
        """Write n records."""
        return self._set_steps(keys, records, records.size_bytes, out)

    def erase_steps(self, keys: PagedKeys, out: NDArray[np.uint8]) -> list[RowsStep]:
        """Write n headers of no row."""
        return self._set_steps(keys, None, HEADER_SIZE, out)

    @staticmethod
    def read_kinds(keys: PagedKeys, size_bytes: int) -> NDArray[np.int8]:
        """Return the kind of each row's request to read so many bytes: int8 [n]."""
        return _range_texts(keys.layout, size_bytes).kinds[keys.places]

    @staticmethod
    def write_kinds(keys: PagedKeys) -> NDArray[np.int8]:
        """Return the kind of each row's request to write: int8 [n]. Rows that make their page come first, so that others find it made."""
        kinds = _offset_texts(keys.layout, 0).kinds[keys.places]
        return kinds if keys.opens is None else kinds + np.where(keys.opens, np.int8(0), np.int8(_PAGE_IS_MADE))

    def _set_steps(self, keys: PagedKeys, records: RecordsToWrite | None, size: int, out: NDArray[np.uint8]) -> list[RowsStep]:
        texts, line = _offset_texts(keys.layout, size), (b"+:" if self._asked else b":")
        steps = []
        for rows, kind in self._runs(self.write_kinds(keys), size):
            opens = kind < _PAGE_IS_MADE
            request = partial(self._set_request, keys[rows], None if records is None else records[rows], texts, kind % _PAGE_IS_MADE, opens)
            steps.append(RowsStep(request, IntegerReplies(line * (1 + opens), keys.layout.page_bytes, out[rows])))
        return steps

    def _runs(self, kinds: NDArray[np.int8], bytes_per_row: int) -> list[tuple[slice, int]]:
        """Slices of neighbouring rows of one kind, with their kind."""
        if not len(kinds):
            return []
        starts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
        runs, most = [], min(self._rows_per_step, max(1, self._limit.most_bytes // bytes_per_row))
        for first, last in pairwise(starts):
            for rows in chunks(last - first, most):
                runs.append((slice(first + rows.start, first + rows.stop), int(kinds[first])))
        return runs

    def _get_request(self, keys: PagedKeys, texts: "_Texts", kind: int) -> memoryview:
        return columns(len(keys), self._ask + _GETRANGE, keys.encode(), texts.of(kind, keys.places)).reshape(-1).data

    def _set_request(self, keys: PagedKeys, records: RecordsToWrite | None, texts: "_Texts", kind: int, opens: bool) -> memoryview:
        name, command = keys.encode(), self._ask + _SETRANGE
        last = b"%d" % (keys.layout.page_bytes - 1)
        opening: list[bytes | Bytes] = [command, name, b"\r\n$%d\r\n%s\r\n$1\r\n\0\r\n" % (len(last), last)] if opens else []
        value = _NO_ROW if records is None else records.bytes()
        return columns(len(keys), *opening, command, name, texts.of(kind, keys.places), value, b"\r\n").reshape(-1).data


@dataclass(frozen=True, eq=False)
class _Texts:
    """A text for every place of a page, by kind: texts of one kind have one length, and are those of neighbouring places."""

    kinds: NDArray[np.int8]  # int8 [rows per page]
    firsts: tuple[int, ...]  # the first place of each kind
    tables: tuple[NDArray[np.void], ...]  # of each kind the texts, each one item of raw bytes: [places]

    def of(self, kind: int, places: NDArray[np.intp]) -> Bytes:
        """Return the texts of n places, all of this kind: uint8 [n, length]."""
        return as_rows(self.tables[kind][places - self.firsts[kind]])


def _texts(texts: list[bytes]) -> _Texts:
    lengths = np.array([len(text) for text in texts])  # intp [places]
    kinds = np.concatenate([[0], np.cumsum(np.diff(lengths) != 0)]).astype(np.int8)  # int8 [places]: one more at each change of length
    firsts = np.flatnonzero(np.diff(kinds, prepend=-1)).tolist()  # of each kind, its first place
    bounds = [*firsts, len(texts)]
    tables = [np.frombuffer(b"".join(texts[first:last]), dtype=f"V{len(texts[first])}") for first, last in pairwise(bounds)]
    return _Texts(kinds, tuple(firsts), tuple(tables))


@cache
def _range_texts(layout: PageLayout, size_bytes: int) -> _Texts:
    """The text after the key in GETRANGE: the first and the last byte to read."""
    starts = [place * layout.record_bytes for place in range(layout.rows_per_page)]
    pairs = [(b"%d" % start, b"%d" % (start + size_bytes - 1)) for start in starts]
    return _texts([b"\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(start), start, len(end), end) for start, end in pairs])


@cache
def _offset_texts(layout: PageLayout, size_bytes: int) -> _Texts:
    """The text between key and value in SETRANGE: the offset, and the value's size."""
    starts = [b"%d" % (place * layout.record_bytes) for place in range(layout.rows_per_page)]
    return _texts([b"\r\n$%d\r\n%s\r\n$%d\r\n" % (len(start), start, size_bytes) for start in starts])
