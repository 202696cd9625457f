"""What a shard says of prefetched rows: by the index, from cache, last batch or storage, and nothing when it does not know."""

from collections.abc import Sequence

import numpy as np
import pytest
from memory_store import memory_node

from kvemb.arrays.record_cache import CacheBudget
from kvemb.arrays.rounding import to_float32
from kvemb.errors import PushRejectedError, SlotsMovedError
from kvemb.protocol.message_format import ChangedRowsBlock, digest_tables
from kvemb.protocol.messages import PushReply
from kvemb.schema.record import make_version
from paramserver.apply.changed_rows import ChangedRowsFinder
from paramserver.engine.batch_records import PreparedRows
from paramserver.engine.engine import Applied, Engine
from paramserver.engine.storage_pace import row_bytes
from paramserver.ingest.part_checks import check_prefetched
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows, PartTicket
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from paramserver.rpc import push_streams
from paramserver.rpc.push_streams import AnswerQueue
from tests.unit.engine_storage import ADAM, HALF, Storage, make_store, never, node_of, read, rows, run
from tests.unit.lonely_engine import ALONE
from tests.unit.sent_parts import OWNED, THREE_SHARDS, find, part
from tests.unit.sent_parts import rows as sent


class Shard:
    """An engine, and what answers for it."""

    def __init__(self, cache_rows: int = 10_000) -> None:
        self.store: Storage = make_store()
        budget = CacheBudget(cache_rows * 200) if cache_rows else None
        self.tables = Tables([], budget)
        self.engine = Engine(self.store, self.tables, Timeline(1), k=0, timeout_s=5, repair=ALONE)
        self.prefetched = ChangedRowsFinder(self.store, self.tables, 5)
        self.last: Applied | None = None

    def run(self, kind: str, *ids: int, table: object = ADAM) -> None:
        dim = 0 if kind == ERASE else None
        self.last = run(self.engine, Batch(kind, (rows(table, list(ids), 0.25, dim),)), never)  # type: ignore[arg-type]

    def answer(self, *prefetched: CheckedRows) -> list[ChangedRowsBlock]:
        assert self.last is not None
        return self.prefetched.answer(prefetched, self.last.written)


def holds(ids: list[int], k: list[int], table: object = ADAM) -> CheckedRows:
    versions = [make_version(1, number) if number else 0 for number in k]
    empty = np.empty((len(ids), 0), np.float32)
    return CheckedRows(table, np.array(ids, np.uint64), empty, np.array(versions, np.uint64), {})  # type: ignore[arg-type]


def check(shard: Shard, prefetched: CheckedRows, changed: ChangedRowsBlock, at: list[int], k: list[int]) -> None:
    """Compare an answer with the expected one, and its rows with storage."""
    assert changed.at.tolist() == at
    assert changed.versions.tolist() == [make_version(1, number) if number else 0 for number in k]
    definition = prefetched.definition
    ids = [int(row_id) for row_id, number in zip(prefetched.ids[changed.at], k, strict=True) if number]
    stored = np.frombuffer(changed.rows, "<u2" if definition.dtype == "bfloat16" else "<f4").reshape(-1, definition.dim)
    np.testing.assert_array_equal(to_float32(stored, definition.dtype), read(shard.store, definition, ids)[2])


@pytest.mark.parametrize("cache_rows", [0, 10_000])
def test_it_says_what_changed_and_how(cache_rows: int) -> None:
    shard = Shard(cache_rows)
    shard.run(APPLY, *range(10))
    shard.run(APPLY, 3, 4, 5)
    prefetched = holds([9, 5, 0, 4, 77, 3], [1, 1, 1, 2, 0, 0])
    (changed,) = shard.answer(prefetched)
    check(shard, prefetched, changed, [1, 5], [2, 2])
    assert shard.answer(holds([9, 4, 77], [1, 2, 0]))[0].at.tolist() == []


@pytest.mark.parametrize("cache_rows", [0, 10_000])
def test_it_says_so_of_a_batch_in_several_pieces_too(cache_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.engine.storage_pace.MOST_BYTES", 2 * row_bytes(rows(ADAM, [1])))
    shard = Shard(cache_rows)
    shard.run(APPLY, *range(10))
    shard.run(APPLY, 3, 4, 5, 6, 7)
    prefetched = holds([9, 5, 0, 4, 77, 3], [1, 1, 1, 2, 0, 0])
    (changed,) = shard.answer(prefetched)
    check(shard, prefetched, changed, [1, 5], [2, 2])


def test_several_tables_of_several_dtypes() -> None:
    shard = Shard()
    shard.run(APPLY, 1, 2)
    shard.run(APPLY, 2, 3, table=HALF)
    prefetched = holds([1, 2], [0, 1]), holds([3, 1, 2], [0, 0, 0], HALF)
    changed = shard.answer(*prefetched)
    check(shard, prefetched[0], changed[0], [0], [1])
    check(shard, prefetched[1], changed[1], [0, 2], [2, 2])


def test_rows_of_the_last_batch_are_not_read_without_a_cache() -> None:
    shard = Shard(cache_rows=0)
    shard.run(APPLY, 1, 2)
    shard.run(APPLY, 2, 3)
    expected = read(shard.store, ADAM, [2, 3])[2]
    for address in shard.store.nodes.addresses:
        memory_node(address).down = True
    (changed,) = shard.answer(holds([3, 2], [0, 1]))
    assert changed.rows == expected[::-1].tobytes()
    assert shard.answer(holds([3, 1], [0, 0])) == []  # row 1 would have to be read: nothing is said, and the trainer pulls


@pytest.mark.parametrize("cache_rows", [0, 10_000])
def test_before_a_batch_is_stored_the_answer_is_what_it_is_afterwards(cache_rows: int) -> None:
    shard = Shard(cache_rows)
    shard.run(APPLY, *range(6))
    prefetched = holds([9, 5, 0, 4, 77, 3], [0, 1, 1, 1, 0, 0])
    before: list[ChangedRowsBlock] = []

    def computed(batch: Sequence[PreparedRows]) -> None:
        assert read(shard.store, ADAM, [4, 77])[1].tolist() == [make_version(1, 1), 0]
        before.extend(shard.prefetched.answer([prefetched], batch))

    batch = Batch(APPLY, (rows(ADAM, [4, 5, 77], 0.25),))
    shard.last = shard.engine.run(batch, make_version(1, 2), never, computed=computed)
    (after,) = shard.answer(prefetched)
    check(shard, prefetched, before[0], [1, 3, 4, 5], [2, 2, 2, 1])
    assert (before[0].at.tolist(), before[0].versions.tolist(), before[0].rows) == (after.at.tolist(), after.versions.tolist(), after.rows)


def test_erased_and_assigned_rows() -> None:
    shard = Shard()
    shard.run(APPLY, 1, 2, 3)
    shard.run(ERASE, 1, 2)
    shard.run(ASSIGN, 2, 3)
    prefetched = holds([1, 2, 3, 4], [1, 1, 1, 1])
    (changed,) = shard.answer(prefetched)
    check(shard, prefetched, changed, [0, 1, 2, 3], [0, 3, 3, 0])


def test_a_row_that_storage_has_lost_is_not_told() -> None:
    shard = Shard(cache_rows=0)
    shard.run(APPLY, 1)
    shard.run(APPLY, 2)
    node, key = node_of(shard.store, ADAM, 1)
    del node.values[key]  # type: ignore[attr-defined]
    assert shard.answer(holds([1], [0])) == []
    assert shard.answer(holds([2], [0])) != []


def test_who_asks_again_is_told_nothing_and_pulls() -> None:
    told: list[PushReply] = []
    ticket = PartTicket(1, 0, 0)
    ticket.answer(told.append)
    changed = ChangedRowsBlock(np.zeros(1, np.uint32), np.ones(1, np.uint64), b"1234")
    ticket.finish(PushReply(1, "applied", 7, changed_rows=[changed]))
    ticket.answer(told.append)
    assert [reply.changed_rows for reply in told] == [[changed], []]


def test_answers_that_a_trainer_does_not_take_leave_the_rows_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_streams, "_MAX_ROW_BYTES", 40)
    outbox = AnswerQueue()
    changed = ChangedRowsBlock(np.zeros(1, np.uint32), np.ones(1, np.uint64), bytes(12))
    for sequence in (1, 2):
        outbox.expect()
        outbox.put(PushReply(sequence, "applied", changed_rows=[changed]))
    outbox.end_input()
    assert [len(reply.changed_rows) for reply in outbox] == [1, 0]


def asked(**changes: object) -> object:
    """A part that holds rows."""
    fields = {"rows": np.empty((len(OWNED), 0), np.float32), "versions": np.zeros(len(OWNED), np.uint64)} | changes
    prefetched = sent(**fields)
    return part(prefetched=[prefetched], digest=digest_tables([], [prefetched]))


def test_good_prefetched_rows_come_back_checked() -> None:
    (checked,) = check_prefetched(asked(), find, 1, THREE_SHARDS, sync=True)  # type: ignore[arg-type]
    assert (checked.ids.tolist(), checked.rows.shape) == (OWNED.tolist(), (len(OWNED), 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": np.empty(0, np.uint64)}, "4 rows are prefetched, with 0 versions"),
        ({"rows": np.ones((len(OWNED), 2), np.float32)}, "rows of dim 2, expected 0"),
        ({"table": "nobody"}, "no table 'nobody'"),
        ({"schema": 255}, "another definition"),
        ({"ids": OWNED[[0, 1, 2, 2]]}, "stands twice"),
        ({"ids": OWNED + np.uint64(1)}, "belongs to shard"),
    ],
)
def test_wrong_prefetched_rows_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises((PushRejectedError, SlotsMovedError), match=message):
        check_prefetched(asked(**changes), find, 1, THREE_SHARDS, sync=True)  # type: ignore[arg-type]


def test_prefetched_rows_are_refused_in_async_mode_and_twice() -> None:
    once = asked()
    with pytest.raises(PushRejectedError, match="only shards of a sync job"):
        check_prefetched(once, find, 1, THREE_SHARDS, sync=False)  # type: ignore[arg-type]
    once.prefetched.append(once.prefetched[0])  # type: ignore[attr-defined]
    with pytest.raises(PushRejectedError, match="prefetched twice"):
        check_prefetched(once, find, 1, THREE_SHARDS, sync=True)  # type: ignore[arg-type]
