"""Small parts of a batch as fewer ones: which are joined, and whose the results are."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import page_layout, paged_keys
from kvemb.stores.node_batch import CoalescedWrite, read_coalesced
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult

SIZE = 76


def keys_of(tag: bytes, n: int, *, paged: bool = False) -> RowKeys:
    ids = np.arange(n, dtype=np.uint64)
    return paged_keys(tag, ids, page_layout(SIZE)) if paged else RowKeys(tag, ids)


class Rows:
    """Answers a read with rows that say which key they are, in an order of its own; writes refuse odd ids."""

    def __init__(self, *, ordered: bool) -> None:
        self.ordered, self.asked = ordered, list[int]()

    def read(self, parts: Sequence[ReadPart]) -> list[ReadResult]:
        self.asked = [len(part.keys) for part in parts]
        return [self._result(part) for part in parts]

    def write(self, parts: Sequence[WritePart]) -> list[WriteResult]:
        self.asked = [len(part.keys) for part in parts]
        for part in parts:
            np.testing.assert_array_equal(part.records, rows_of(part.keys, part.records.shape[1]))
        return [WriteResult(part.keys.ids % 2 == 0, None if part.tokens is None else part.tokens + np.uint64(1)) for part in parts]

    def _result(self, part: ReadPart) -> ReadResult:
        n = len(part.keys)
        order = None if self.ordered else np.random.default_rng(n).permutation(n)
        keys = part.keys if order is None else part.keys[order]
        tokens = keys.ids * np.uint64(3) if part.tokens else None
        return ReadResult(rows_of(keys, part.prefix_bytes), keys.ids % 3 != 0, order, tokens, keys.ids % 3 == 0 if part.foreign else None)


def rows_of(keys: RowKeys, size: int) -> np.ndarray:
    return np.tile(keys.encode(), -(-size // 14))[:, :size].copy()


@pytest.mark.parametrize("ordered", [True, False])
def test_reads_of_small_parts_that_lie_alike_are_one(ordered: bool) -> None:
    shapes = [(b"aaa", 20, 12, False), (b"bbb", 5000, 12, False), (b"ccc", 300, 12, False), (b"ddd", 0, 12, False)]
    shapes += [(b"eee", 40, 30, False), (b"fff", 50, 12, True), (b"ggg", 60, 12, True)]
    parts = [ReadPart(keys_of(tag, n, paged=paged), SIZE, size) for tag, n, size, paged in shapes]
    parts += [ReadPart(keys_of(b"hhh", 7), SIZE, 12, tokens=True, foreign=True), ReadPart(keys_of(b"iii", 8), SIZE, 12, tokens=True)]
    parts += [ReadPart(keys_of(b"jjj", 9), SIZE, 12, tokens=True, foreign=True)]
    own = np.empty((11, 12), np.uint8)
    parts += [ReadPart(keys_of(b"kkk", 11), SIZE, 12, into=own)]
    rows = Rows(ordered=ordered)
    results = read_coalesced(parts, rows.read)
    assert sorted(rows.asked) == sorted([20 + 300, 5000, 0, 40, 50 + 60, 7 + 9, 8, 11])
    for part, result in zip(parts, results, strict=True):
        got, ids = result.in_key_order(), part.keys.ids
        np.testing.assert_array_equal(got.records[got.found], rows_of(part.keys, part.prefix_bytes)[got.found])  # the others mean nothing
        np.testing.assert_array_equal(got.found, ids % 3 != 0)
        assert (got.tokens is not None, got.foreign is not None) == (part.tokens, part.foreign)
        assert got.tokens is None or np.array_equal(got.tokens, ids * np.uint64(3))
        assert got.foreign is None or np.array_equal(got.foreign, ids % 3 == 0)


def test_writes_of_small_parts_that_lie_alike_are_one() -> None:
    keys = [
        keys_of(b"aaa", 20),
        keys_of(b"bbb", 5000),
        keys_of(b"ccc", 300),
        keys_of(b"ddd", 50, paged=True),
        keys_of(b"eee", 3, paged=True),
    ]
    parts = [WritePart(one, rows_of(one, SIZE), one.ids + np.uint64(10)) for one in keys]
    parts.append(WritePart(keys_of(b"fff", 8), rows_of(keys_of(b"fff", 8), SIZE)))
    parts.append(WritePart(keys_of(b"ggg", 9), rows_of(keys_of(b"ggg", 9), 20), np.zeros(9, np.uint64)))
    rows = Rows(ordered=True)
    coalesced = CoalescedWrite(parts)
    results = coalesced.results(rows.write(coalesced.parts))
    assert sorted(rows.asked) == sorted([20 + 300, 5000, 50 + 3, 8, 9])
    for part, result in zip(parts, results, strict=True):
        np.testing.assert_array_equal(result.stored, part.keys.ids % 2 == 0)
        assert (result.tokens is None) == (part.tokens is None)
        assert result.tokens is None or part.tokens is None or np.array_equal(result.tokens, part.tokens + np.uint64(1))


def test_on_one_node_only_rows_in_pages_are_joined_to_be_written() -> None:
    keys = [keys_of(b"aaa", 20), keys_of(b"bbb", 30), keys_of(b"ccc", 40, paged=True), keys_of(b"ddd", 50, paged=True)]
    rows = Rows(ordered=True)
    rows.write(CoalescedWrite([WritePart(one, rows_of(one, SIZE)) for one in keys], one_node=True).parts)
    assert rows.asked == [20, 30, 90]
