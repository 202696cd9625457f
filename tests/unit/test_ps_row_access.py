"""Rows are written where the map says, and where slots come from or go to, even where the map is followed in the middle of a write."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import kvemb.init
import kvemb.optim
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from paramserver.engine.row_access import RowAccess

TABLE = TableDef("t", 2, kvemb.optim.sgd(1.0), kvemb.init.zeros())
IDS = np.array([3, 7], np.uint64)
RECORDS = np.arange(2 * TABLE.record.size_bytes, dtype=np.uint8).reshape(2, -1)


class Node:
    """Rows of one node by key, all of them in moving slots."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.after: Callable[[], None] = lambda: None  # called after the next write or erase

    def has(self, keys: RowKeys) -> np.ndarray:
        return np.ones(len(keys), bool)

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        results = []
        for part in parts:
            found = [self.rows.get(key) for key in map(bytes, part.keys.encode())]
            records = np.zeros((len(found), part.prefix_bytes), np.uint8)
            here = np.array([one is not None for one in found])
            for index, one in enumerate(found):
                if one is not None:
                    records[index] = np.frombuffer(one, np.uint8)[: part.prefix_bytes]
            results.append(ReadResult(records, here, None, None, np.zeros(len(found), bool)))
        return results

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        for part in parts:
            self.rows.update(zip(map(bytes, part.keys.encode()), map(bytes, part.records), strict=True))
        self._done()
        return [WriteResult(np.ones(len(part.keys), bool), None) for part in parts]

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[np.ndarray]:
        for part in parts:
            for key in map(bytes, part.keys.encode()):
                self.rows.pop(key, None)
        self._done()
        return [np.ones(len(part.keys), bool) for part in parts]

    def _done(self) -> None:
        after, self.after = self.after, lambda: None
        after()


class MovingSlots:
    """A store of two nodes whose rows move from the first to the second."""

    def __init__(self) -> None:
        self.old, self.new = Node(), Node()
        self.capabilities = SimpleNamespace(cas=False, pages=False)
        self.first: Node = self.old
        self.second: Node | None = self.new
        self.other = self.new

    def flip(self) -> None:
        self.first, self.second, self.other = self.new, self.old, self.old

    def clean(self) -> None:
        """The map names the new node alone, and what the old one has is being erased."""
        self.flip()
        self.second = None

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self.first.read(parts, deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self.first.write(parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[np.ndarray]:
        return self.first.erase(parts, deadline)


@pytest.fixture
def store() -> MovingSlots:
    return MovingSlots()


def part(access: RowAccess) -> WritePart:
    return WritePart(access.keys(TABLE, IDS), RECORDS)


def test_a_write_in_the_middle_of_which_slots_flip_reaches_both_nodes(store: MovingSlots) -> None:
    access = RowAccess(store, 5.0)  # type: ignore[arg-type]  # what it needs of a Store
    store.new.after = store.flip  # between the write to the other node and the one to the map's
    (result,) = access.write([part(access)])
    assert result.stored.all()
    assert store.old.rows == store.new.rows
    assert len(store.old.rows) == len(IDS)


@pytest.mark.parametrize("blindly", [False, True])
def test_an_erase_in_the_middle_of_which_slots_flip_reaches_both_nodes(store: MovingSlots, blindly: bool) -> None:
    access = RowAccess(store, 5.0)  # type: ignore[arg-type]
    access.write([part(access)])
    store.new.after = store.flip
    if blindly:
        access.erase_blindly([part(access)])
    else:
        access.erase(TABLE, IDS)
    assert not store.old.rows
    assert not store.new.rows


@pytest.mark.parametrize("blindly", [False, True])
def test_a_row_that_is_erased_while_its_old_node_is_cleaned_is_erased_there_too(store: MovingSlots, blindly: bool) -> None:
    # One that was left there would come back with its slot: a shard that starts again does not know of it any more.
    access = RowAccess(store, 5.0)  # type: ignore[arg-type]
    access.write([part(access)])
    store.clean()
    if blindly:
        access.erase_blindly([part(access)])
    else:
        access.erase(TABLE, IDS)
    assert not store.old.rows
    assert not store.new.rows
