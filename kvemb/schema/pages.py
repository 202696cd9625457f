"""Pages: the records of a table whose ids lie in [0, num_ids), side by side in strings of one size. Pure; no I/O, no protocol.

Row i lies in page i // rows_per_page, at a fixed offset. The page's number takes the id's place: the slot follows from it, so that rows of
a page have one node and one writer. A page's key holds a hash tag that pins it to its slot, and its number as a row's key would. A header
of zeros means that the row does not exist, and so does a page that is not there.

The number of rows per page follows from the record's size alone, so every process computes the same. Pages fill one of jemalloc's size
classes, Redis's string header included; docs/adr/0009 has the measurements. A byte after the last record, written first, makes a page
whole at once: it is then allocated once, at its exact size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.process.cached_property import batch_value, cached_property
from kvemb.schema.keys import KEY_SIZE, PINNED_HEAD_SIZE, Containers, RowKeys, RowTags, pinned_head
from kvemb.schema.slots import TAG_SIZE

# Part of a table's identity: which rows share a page may never change for a table that exists.
LAYOUT_VERSION = 1
_SMALLEST_BYTES, _LARGEST_BYTES = 4096, 65536
_GOOD_RATIO = 1.04
_KEY_BYTES = 64  # entry, key, object and share of the directory that a server keeps for each key
_PAD_BYTES = 1
PAGE_KEY_SIZE = PINNED_HEAD_SIZE + KEY_SIZE - TAG_SIZE
_MOST_TABLE_BITS = 8  # of the 16 bits of `locality`


@dataclass(frozen=True)
class PageLayout:
    """Where the rows of a table lie; make it with `page_layout`."""

    record_bytes: int  # of one row
    rows_per_page: int  # how many rows share a page

    @property
    def page_bytes(self) -> int:
        """Of a whole page: its records and the byte that makes it whole."""
        return self.rows_per_page * self.record_bytes + _PAD_BYTES

    def pages(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the number of each row's page: uint64 [n]."""
        return ids // np.uint64(self.rows_per_page)


@cache
def page_layout(record_bytes: int) -> PageLayout:
    """Return the layout of a table whose records have this size: the smallest page that wastes little, or the one that wastes least."""
    best, best_ratio = PageLayout(record_bytes, 1), float("inf")
    for class_bytes in _size_classes(max(_SMALLEST_BYTES, record_bytes), max(_LARGEST_BYTES, 4 * record_bytes)):
        header_bytes = 6 if class_bytes <= 1 << 16 else 10  # Redis's string header (5 or 9) and the byte that ends every string
        rows = (class_bytes - header_bytes - _PAD_BYTES) // record_bytes
        if not rows:
            continue
        ratio = (class_bytes + _KEY_BYTES) / (rows * record_bytes)
        if ratio < best_ratio:
            best, best_ratio = PageLayout(record_bytes, rows), ratio
        if ratio <= _GOOD_RATIO:
            break
    return best


def _size_classes(low: int, high: int) -> list[int]:
    """jemalloc's size classes from low to high: four to every doubling."""
    classes = [(4 + quarter) << power for power in range(8, 40) for quarter in range(1, 5)]
    return [size for size in classes if low <= size <= high]


@batch_value
class PagedKeys(RowKeys):
    """The keys of n rows that lie in pages; the ids are the rows', uint64 [n]. See `RowKeys`.

    `opens`, bool [n], are the rows before whose write the page may have to be made; None: before every row's.
    """

    layout: PageLayout
    opens: NDArray[np.bool_] | None = None

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "PagedKeys":
        opens = None if self.opens is None else self.opens[rows]
        return PagedKeys(self.tag, self.ids[rows], self.layout, opens, tables=self.tables and self.tables[rows], name=self.name)

    def of_any_rows(self) -> "PagedKeys":
        return replace(self, opens=None)

    @property
    def coalesce_key(self) -> PageLayout:
        return self.layout

    def coalesced(self, keys: Sequence[RowKeys], ids: NDArray[np.uint64], tables: RowTags) -> "PagedKeys":
        paged = [one for one in keys if isinstance(one, PagedKeys)]
        if all(one.opens is None for one in paged):
            return PagedKeys(b"", ids, self.layout, tables=tables)
        # opens [n of all tables]: a table without knowledge of its pages may have to make one before every row
        opens = np.concatenate([np.ones(len(one), dtype=bool) if one.opens is None else one.opens for one in paged])
        return PagedKeys(b"", ids, self.layout, opens, tables=tables)

    @property
    def key_bytes(self) -> int:
        return PAGE_KEY_SIZE

    def encode(self) -> NDArray[np.uint8]:
        """Return the keys of the rows' pages as text: uint8 [n, 19]."""
        return self._page_keys().encode()

    def slots(self) -> NDArray[np.int64]:
        return self._page_keys().slots()

    def locality(self) -> NDArray[np.uint16] | None:
        # If rows of a page are read one after another, the page is in the server's cache: that saves a third of its time for uniform ids.
        if not len(self.ids):
            return None
        table_bits = 0 if self.tables is None else min((len(self.tables.tags) - 1).bit_length(), _MOST_TABLE_BITS)
        excess = max(0, int(self._pages.max()).bit_length() + table_bits - 16)
        number = (self._pages >> np.uint64(excess)).astype(np.uint16)  # [n]: the row's table in the upper `table_bits`, its page below
        if self.tables is not None:  # table by table, so that each one's rows arrive, and are copied on, next to each other
            number |= self.tables.which << np.uint16(16 - table_bits)
        return None if (number[1:] >= number[:-1]).all() else number

    @cached_property
    def places(self) -> NDArray[np.intp]:
        """Which row of its page each is: intp [n] in [0, rows_per_page)."""
        return (self.ids - self._pages * np.uint64(self.layout.rows_per_page)).view(np.int64)

    def containers(self) -> Containers:
        """Return the rows' pages; the ids of their keys are the pages' numbers."""
        tables = None if self.tables is None else self.tables.which
        # both uint64: the page of each row, [n], or its page and table, [n, 2]; first intp [k]: one row of each different page
        both = self._pages if tables is None else np.stack([self._pages, tables.astype(np.uint64)], axis=1)
        first = np.unique(both, axis=0, return_index=True)[1]
        return Containers(self._page_keys()[first], "string", self.layout.page_bytes)

    def _page_keys(self) -> "WholePages":
        return WholePages(self.tag, self._pages, tables=self.tables, name=self.name)

    @cached_property
    def _pages(self) -> NDArray[np.uint64]:  # [n]: the number of each row's page
        return self.layout.pages(self.ids)


@batch_value
class WholePages(RowKeys):
    """The keys of k pages themselves; the ids, uint64 [k], are the pages' numbers."""

    @property
    def key_bytes(self) -> int:
        return PAGE_KEY_SIZE

    def encode(self) -> NDArray[np.uint8]:
        """Return the keys as text: uint8 [k, 19]."""
        out = np.empty((len(self.ids), PAGE_KEY_SIZE), dtype=np.uint8)
        pinned_head(self, out)
        out[:, PINNED_HEAD_SIZE:] = super().encode()[:, TAG_SIZE:]  # [k, 11]: the page's number, as a row's key has its id
        return out

    def slots(self) -> NDArray[np.int64]:
        return self.placement.slots(self.ids)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "WholePages":
        return WholePages(self.tag, self.ids[rows], tables=self.tables and self.tables[rows], name=self.name)


def paged_keys(
    tag: bytes, ids: NDArray[np.uint64], layout: PageLayout, new: NDArray[np.bool_] | None = None, *, name: str = ""
) -> PagedKeys:
    """Return the keys of unique ids, uint64 [n], in pages; `new`, bool [n], says whose page may not exist, None: any row's."""
    if new is None:
        return PagedKeys(tag, ids, layout, name=name)
    opens = np.zeros(len(ids), dtype=bool)
    rows = np.flatnonzero(new)  # intp [q]: which of the n rows are new
    if len(rows):  # the first of a page's new rows makes the page for the others
        opens[rows[np.unique(layout.pages(ids[rows]), return_index=True)[1]]] = True
    return PagedKeys(tag, ids, layout, opens, name=name)
