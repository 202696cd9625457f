"""Tokens of rows at their other node are kept while slots move, and are no more than a guess: what is stale there is looked at."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import kvemb.init
import kvemb.optim
from kvemb.errors import NodeUnavailableError
from kvemb.index.record_cache import CacheBudget
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import ABORTING, CLEANING, FLIPPED, MOVING, NODES, MovePlan
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from paramserver.engine.row_access import RowAccess
from paramserver.model.tables import Tables

TABLE = TableDef("t", 2, kvemb.optim.sgd(1.0), kvemb.init.zeros())
IDS = np.array([3, 7], np.uint64)


def records_of(k: int) -> np.ndarray:
    return TABLE.record.encode(IDS, make_version(1, k), np.full((len(IDS), 2), k, np.float32), np.empty((len(IDS), 0), np.float32))


class TokenNode:
    """Rows of one node by key, all of them in moving slots, under tokens of its own."""

    def __init__(self, first_token: int) -> None:
        self.rows: dict[bytes, tuple[bytes, int]] = {}
        self.n_read = self.n_written = 0
        self.next_token = first_token
        self.before_write: Callable[[], None] = lambda: None  # called once

    def has(self, keys: RowKeys) -> np.ndarray:
        return np.ones(len(keys), bool)

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return [self._read(part) for part in parts]

    def _read(self, part: ReadPart) -> ReadResult:
        self.n_read += len(part.keys)
        held = [self.rows.get(key, (b"", 0)) for key in map(bytes, part.keys.encode())]
        whole = np.array([len(value) == part.record_bytes for value, _ in held])
        records = np.zeros((len(held), part.prefix_bytes), np.uint8)
        for row in np.flatnonzero(whole):
            records[row] = np.frombuffer(held[row][0], np.uint8)[: part.prefix_bytes]
        tokens = np.array([token for _, token in held], np.uint64)
        return ReadResult(records, whole, None, tokens, (tokens != 0) & ~whole)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        before, self.before_write = self.before_write, lambda: None
        before()
        return [self._write(part) for part in parts]

    def _write(self, part: WritePart) -> WriteResult:
        assert part.tokens is not None
        self.n_written += len(part.keys)
        stored, tokens = np.zeros(len(part.keys), bool), part.tokens.copy()
        for row, key in enumerate(map(bytes, part.keys.encode())):
            if self.rows.get(key, (b"", 0))[1] == part.tokens[row]:
                self.put(key, part.records[row].tobytes())
                stored[row], tokens[row] = True, self.rows[key][1]
        return WriteResult(stored, tokens)

    def put(self, key: bytes, value: bytes) -> None:
        self.rows[key] = value, self.next_token
        self.next_token += 1


class MovingSlots:
    """A store of two nodes whose rows move from the first to the second, and the shard's access to it."""

    def __init__(self, cache_bytes: int = 1 << 20) -> None:
        self.old, self.new = TokenNode(100), TokenNode(900)
        self.capabilities = SimpleNamespace(cas=True, pages=False)
        self.first: TokenNode = self.old
        self.second: TokenNode | None = self.new
        before = ClusterMap.first(2, 1)
        there = np.full_like(before.slot_nodes, 1)
        here = np.zeros_like(there)
        self.cluster_map = replace(before, slot_nodes=here, plan=MovePlan(NODES, MOVING, there, (0,)))
        self.tables = Tables([], CacheBudget(cache_bytes))
        self.access = RowAccess(self, 5.0)  # type: ignore[arg-type]
        self.tables.state(TABLE)
        self.k = 0

    def follow(self, phase: str) -> None:
        """The map is followed to another phase."""
        now, plan = self.cluster_map, self.cluster_map.plan
        assert plan is not None
        self.cluster_map = replace(now, version=now.version + 1, plan=replace(plan, phase=phase))
        if phase == FLIPPED:
            self.cluster_map = replace(self.cluster_map, slot_nodes=plan.slot_owners)
            self.first, self.second = self.new, self.old
        if phase in (CLEANING, ABORTING):
            self.second = None

    def batch(self) -> np.ndarray:
        """Write all rows once more, as the piece writer does; return which were stored at the node that the map names."""
        self.k += 1
        self.tables.follow(self.cluster_map)
        cache, records = self.tables.state(TABLE).cache, records_of(self.k)
        at = cache.find(IDS)
        tokens = np.zeros(len(IDS), np.uint64)
        tokens[at >= 0] = cache.tokens[at[at >= 0]]
        known = self.tables.second_tokens(self.cluster_map, TABLE, at)
        (result,) = self.access.write([WritePart(self.access.keys(TABLE, IDS), records, tokens)], [known])
        stored = result.stored
        cache.forget(IDS[~stored])
        assert result.tokens is not None
        there = None if known is None else known.tokens[stored]
        cache.put(IDS[stored], records[stored], result.tokens[stored], second_tokens=there)
        return stored

    def known(self) -> list[int]:
        """The tokens that are known of the rows at their other node."""
        cache = self.tables.state(TABLE).cache
        return cache.second_tokens(cache.peek(IDS)).tolist()

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self.first.read(parts, deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self.first.write(parts, deadline)


def values_at(node: TokenNode) -> list[bytes]:
    return [value for value, _ in node.rows.values()]


@pytest.fixture
def store() -> MovingSlots:
    return MovingSlots()


def test_a_row_is_written_to_its_other_node_again_and_again_without_a_look_at_it(store: MovingSlots) -> None:
    for _ in range(3):
        assert store.batch().all()
    assert store.new.n_read == 0
    assert store.new.n_written == 3 * len(IDS)
    assert values_at(store.new) == values_at(store.old) == list(map(bytes, records_of(3)))


def test_a_row_that_another_program_changed_there_is_looked_at_and_written_over(store: MovingSlots) -> None:
    store.batch()
    key = next(iter(store.new.rows))
    store.new.put(key, b"of another program")
    assert store.batch().all()
    assert store.new.n_read == 1  # that one alone
    assert values_at(store.new) == values_at(store.old) == list(map(bytes, records_of(2)))
    store.batch()
    assert store.new.n_read == 1  # and its new token is known


def test_a_row_that_is_newer_there_is_left_alone(store: MovingSlots) -> None:
    store.batch()
    newer = bytes(records_of(50)[0])
    store.new.put(next(iter(store.new.rows)), newer)
    store.batch()
    assert values_at(store.new) == [newer, bytes(records_of(2)[1])]


def test_a_row_that_is_gone_there_is_written_anew(store: MovingSlots) -> None:
    store.batch()
    store.new.rows.clear()
    assert store.batch().all()
    assert values_at(store.new) == list(map(bytes, records_of(2)))


def test_a_row_that_is_there_already_is_looked_at_once(store: MovingSlots) -> None:
    # Its shard was started again, and knows nothing of what it has written there.
    store.batch()
    store.tables.state(TABLE).cache.forget_second_tokens()
    store.batch()
    store.batch()
    assert store.new.n_read == len(IDS)
    assert values_at(store.new) == list(map(bytes, records_of(3)))


def test_after_the_flip_neither_node_is_looked_at(store: MovingSlots) -> None:
    store.batch()
    store.follow(FLIPPED)
    assert store.batch().all()  # no conflict at the node that the map names now
    assert store.batch().all()
    assert store.new.n_read == store.old.n_read == 0
    assert values_at(store.new) == values_at(store.old) == list(map(bytes, records_of(3)))
    store.follow(CLEANING)
    assert store.batch().all()
    assert values_at(store.new) == list(map(bytes, records_of(4)))


def test_a_flip_that_nobody_followed_before_a_batch_costs_a_conflict_and_no_row(store: MovingSlots) -> None:
    store.batch()
    store.new.before_write = lambda: store.follow(FLIPPED)  # another thread follows, in the middle of the batch
    assert not store.batch().any()  # the tokens are those of the node that was
    assert values_at(store.old) == list(map(bytes, records_of(1)))
    for _ in range(2):
        if not store.batch().all():
            looked = store.read([ReadPart(store.access.keys(TABLE, IDS), TABLE.record.size_bytes, TABLE.record.size_bytes, True)], within())
            assert looked[0].tokens is not None
            store.tables.state(TABLE).cache.put(IDS, looked[0].records, looked[0].tokens)  # as the piece writer does after a conflict
    assert store.batch().all()
    assert values_at(store.new) == values_at(store.old) == list(map(bytes, records_of(store.k)))


def test_tokens_of_a_plan_that_was_taken_back_are_forgotten(store: MovingSlots) -> None:
    store.batch()
    store.follow(ABORTING)
    store.batch()
    store.new.rows.clear()
    store.follow(MOVING)
    store.second = store.new
    store.tables.follow(store.cluster_map)
    assert store.known() == [0, 0]
    store.batch()
    assert values_at(store.new) == list(map(bytes, records_of(3)))


def test_after_a_write_that_landed_and_was_not_answered_rows_are_looked_at(store: MovingSlots) -> None:
    store.batch()

    def land_and_fail() -> None:
        for key, record in zip(store.new.rows, records_of(2), strict=True):
            store.new.put(key, record.tobytes())
        raise NodeUnavailableError("no answer")

    store.new.before_write = land_and_fail
    with pytest.raises(NodeUnavailableError):
        store.batch()
    assert store.batch().all()
    assert store.new.n_read == len(IDS)
    assert values_at(store.new) == values_at(store.old) == list(map(bytes, records_of(3)))


def test_without_a_cache_nothing_is_kept_and_every_row_is_looked_at() -> None:
    store = MovingSlots(cache_bytes=0)
    store.batch()
    assert store.new.n_read == len(IDS)
    assert values_at(store.new) == list(map(bytes, records_of(1)))


def within() -> Deadline:
    return Deadline.after(5.0)
