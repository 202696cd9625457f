"""Rows are written where the map says, and where slots come from or go to, even where the map is followed in the middle of a write."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import kvemb.init
import kvemb.optim
from kvemb.arrays.record_cache import CacheBudget
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from paramserver.engine.row_access import RowAccess
from paramserver.model.tables import Tables

TABLE = TableDef("t", 2, kvemb.optim.sgd(1.0), kvemb.init.zeros())
IDS = np.array([3, 7], np.uint64)
RECORDS = np.arange(2 * TABLE.record.size_bytes, dtype=np.uint8).reshape(2, -1)


class Node:
    """Rows of one node by key, all of them in moving slots, under tokens of its own if it is given a first one."""

    def __init__(self, first_token: int = 0) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.tokens: dict[bytes, int] = {}
        self.next_token = first_token
        self.written, self.flipped = True, False
        self.before: Callable[[], None] = lambda: None  # called before the next write
        self.after: Callable[[], None] = lambda: None  # called after the next write or erase

    def has(self, keys: RowKeys) -> np.ndarray:
        return np.ones(len(keys), bool)

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        results = []
        for part in parts:
            keys = list(map(bytes, part.keys.encode()))
            found = [self.rows.get(key) for key in keys]
            records = np.zeros((len(found), part.prefix_bytes), np.uint8)
            here = np.array([one is not None and len(one) == part.record_bytes for one in found])
            for index in np.flatnonzero(here):
                records[index] = np.frombuffer(found[index] or b"", np.uint8)[: part.prefix_bytes]
            tokens = np.array([self.tokens.get(key, 0) for key in keys], np.uint64) if self.next_token else None
            results.append(ReadResult(records, here, None, tokens, np.array([one is not None for one in found]) & ~here))
        return results

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        before, self.before = self.before, lambda: None
        before()
        results = [self._write(part) for part in parts]
        self._done()
        return results

    def _write(self, part: WritePart) -> WriteResult:
        stored = np.ones(len(part.keys), bool)
        for index, key in enumerate(map(bytes, part.keys.encode())):
            if self.next_token:
                assert part.tokens is not None
                stored[index] = self.tokens.get(key, 0) == part.tokens[index]
            if stored[index]:
                self.put(key, bytes(part.records[index]))
        return WriteResult(stored, None)

    def put(self, key: bytes, value: bytes) -> None:
        self.rows[key] = value
        if self.next_token:
            self.tokens[key], self.next_token = self.next_token, self.next_token + 1

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

    def __init__(self, *, cas: bool = False) -> None:
        self.old, self.new = (Node(100), Node(900)) if cas else (Node(), Node())
        self.capabilities = SimpleNamespace(cas=cas, pages=False)
        self.rows = self
        self.first, self.moving = self.old, self.new

    def flip(self) -> None:
        self.first, self.moving = self.new, self.old
        self.old.flipped = True

    def clean(self) -> None:
        """The map names the new node alone, and rows on the old one are being erased."""
        self.flip()
        self.moving.written = False

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


@pytest.mark.parametrize("flipped", [False, True], ids=["before the flip", "behind it"])
def test_the_new_node_has_a_row_first_since_readers_go_from_the_old_one_to_it(store: MovingSlots, flipped: bool) -> None:
    access, order = RowAccess(store, 5.0), list[str]()  # type: ignore[arg-type]
    if flipped:
        store.flip()
    store.old.after, store.new.after = lambda: order.append("old"), lambda: order.append("new")
    access.write([part(access)])
    assert order == ["new", "old"]


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


def records_of(k: int) -> np.ndarray:
    return TABLE.record.encode(IDS, make_version(1, k), np.full((len(IDS), 2), k, np.float32), np.empty((len(IDS), 0), np.float32))


class TestTokens:
    """A token is good for one node: a row is looked at on its other node before it is written there, and judged there."""

    @pytest.fixture
    def store(self) -> MovingSlots:
        return MovingSlots(cas=True)

    @staticmethod
    def write(store: MovingSlots, k: int) -> None:
        access = RowAccess(store, 5.0)  # type: ignore[arg-type]
        keys = access.keys(TABLE, IDS)
        tokens = np.array([store.first.tokens.get(bytes(key), 0) for key in keys.encode()], np.uint64)
        assert access.write([WritePart(keys, records_of(k), tokens)])[0].stored.all()

    def test_rows_are_written_there_whether_they_are_there_or_not(self, store: MovingSlots) -> None:
        self.write(store, 1)
        self.write(store, 2)
        assert list(store.new.rows.values()) == list(store.old.rows.values()) == list(map(bytes, records_of(2)))

    def test_a_row_that_another_program_changed_there_is_written_over(self, store: MovingSlots) -> None:
        self.write(store, 1)
        store.new.put(next(iter(store.new.rows)), b"of another program")
        self.write(store, 2)
        assert list(store.new.rows.values()) == list(map(bytes, records_of(2)))

    @pytest.mark.parametrize("between", [False, True])
    def test_a_row_that_is_newer_there_is_left_alone(self, store: MovingSlots, between: bool) -> None:
        self.write(store, 1)
        key, newer = next(iter(store.new.rows)), bytes(records_of(50)[0])
        if between:  # look and write
            store.new.before = lambda: store.new.put(key, newer)
        else:
            store.new.put(key, newer)
        self.write(store, 2)
        assert list(store.new.rows.values()) == [newer, bytes(records_of(2)[1])]

    def test_a_row_that_changes_between_every_look_and_write_is_an_error(self, store: MovingSlots) -> None:
        self.write(store, 1)
        key = next(iter(store.new.rows))

        def change() -> None:
            store.new.put(key, bytes(records_of(1)[0]))
            store.new.before = change

        store.new.before = change
        with pytest.raises(StorageError, match="1 row "):
            self.write(store, 2)

    def test_tokens_of_rows_whose_slots_have_changed_their_node_are_forgotten(self) -> None:
        # Two nodes may well have the same token for a row: a write under the wrong one must be refused for certain.
        tables, before = Tables([], CacheBudget(1 << 20)), ClusterMap.first(2, 1)
        cache, ids = tables.state(TABLE).cache, np.arange(1, 1001, dtype=np.uint64)
        tables.follow(before)
        cache.put(ids, np.zeros((len(ids), TABLE.record.size_bytes), np.uint8), ids)
        slot_nodes = np.zeros_like(before.slot_nodes)
        tables.follow(replace(before, version=before.version + 1))
        assert (cache.tokens[cache.find(ids)] == ids).all()
        tables.follow(replace(before, version=before.version + 2, slot_nodes=slot_nodes))
        moved = before.slot_nodes[TABLE.keys(ids, pages=False).slots()] != 0
        assert moved.any()
        np.testing.assert_array_equal(cache.tokens[cache.find(ids)], np.where(moved, np.uint64(0), ids))
