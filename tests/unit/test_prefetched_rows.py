"""Rows that a trainer has prefetched, on the trainer's side: how they are cut for shards and messages, and what an answer becomes."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb import init, optim
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.datapath.prefetched_rows import (
    PrefetchedRows,
    changed_rows_of,
    check_changed_rows,
    join_changed_rows,
    prepare_prefetched,
    route_prefetched,
)
from kvemb.errors import MessageError
from kvemb.protocol.message_format import ChangedRowsBlock, digest_tables
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef
from tests.owners import shard_of
from tests.unit.fake_shard import Connections, FakeShard, accept, rows_of, soon

USER = TableDef("user", 4, optim.sgd(), init.normal(std=1.0))
ITEM = TableDef("item", 2, optim.sgd(), init.normal(std=1.0), dtype="float16")


def holds(table: TableDef, n: int) -> PrefetchedRows:
    ids = np.random.default_rng(n).permutation(n)
    return prepare_prefetched(table, ids, ids.astype(np.uint64) + np.uint64(5))


def answer(at: list[int], versions: list[int], rows: NDArray[np.float32], dtype: str = "float32") -> ChangedRowsBlock:
    return ChangedRowsBlock(np.array(at, np.uint32), np.array(versions, np.uint64), round_nearest(rows, dtype).tobytes())


@pytest.mark.parametrize("n_shards", [1, 2, 5])
def test_every_row_goes_to_its_shard_in_messages_that_question_and_answer_fit(n_shards: int) -> None:
    prefetched = [holds(USER, 1000), holds(ITEM, 300), holds(USER, 0)]
    limit, shards = 2000, ClusterMap.first(0, n_shards)
    routed = route_prefetched(prefetched, shards, limit)
    seen: dict[str, list[NDArray[np.uint64]]] = {"user": [], "item": []}
    for shard, messages in enumerate(routed):
        for message in messages:
            assert sum(len(rows.ids) * (rows.row_bytes + 28) for rows in message) <= limit
            for rows in message:
                assert (shard_of(rows.ids, n_shards) == shard).all()
                np.testing.assert_array_equal(rows.versions, rows.ids + np.uint64(5))
                seen[rows.definition.name].append(rows.ids)
    for rows in prefetched[:2]:
        assert np.array_equal(np.sort(np.concatenate(seen[rows.definition.name])), np.sort(rows.ids))
    assert all(len(messages) == 1 for messages in route_prefetched(prefetched, shards))
    assert route_prefetched([holds(USER, 0)], shards) == [[] for _ in range(n_shards)]


def test_what_is_prefetched_does_not_change_with_the_callers_arrays() -> None:
    ids, versions = np.arange(3), np.ones(3, np.uint64)
    prefetched = prepare_prefetched(USER, ids, versions)
    ids[0] = versions[0] = 9
    assert (prefetched.ids.tolist(), prefetched.versions.tolist()) == ([0, 1, 2], [1, 1, 1])


@pytest.mark.parametrize("table", [USER, ITEM])
def test_an_answer_becomes_rows_and_those_that_do_not_exist_begin_anew(table: TableDef) -> None:
    prefetched = holds(table, 10)
    values = np.arange(2 * table.dim, dtype=np.float32).reshape(2, -1)
    changed = changed_rows_of(prefetched, answer([1, 4, 9], [7, 0, 8], values, table.dtype))
    np.testing.assert_array_equal(changed.ids, prefetched.ids[[1, 4, 9]])
    assert changed.versions.tolist() == [7, 0, 8]
    np.testing.assert_array_equal(changed.rows[[0, 2]], to_float32(round_nearest(values, table.dtype), table.dtype))
    np.testing.assert_array_equal(changed.rows[[1]], table.initial_rows(prefetched.ids[[4]]))
    assert changed_rows_of(prefetched, answer([], [], values[:0], table.dtype)).rows.shape == (0, table.dim)
    both = join_changed_rows([changed, changed_rows_of(prefetched, answer([0], [3], values[:1], table.dtype))])
    assert (both.ids.tolist(), both.versions.tolist()) == ([*changed.ids.tolist(), prefetched.ids[0]], [7, 0, 8, 3])


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [answer([3], [1], np.zeros((1, 4), np.float32))],  # there are rows 0 to 2
        [answer([1], [1], np.zeros((2, 4), np.float32))],
        [answer([1], [0], np.zeros((1, 4), np.float32))],
        [answer([1], [1], np.zeros((1, 4), np.float32), "float16")],
        [answer([1], [1], np.zeros((1, 4), np.float32))] * 2,
    ],
)
def test_an_answer_that_does_not_fit_is_refused(wrong: list[ChangedRowsBlock]) -> None:
    with pytest.raises(MessageError):
        check_changed_rows([holds(USER, 3)], wrong)


@pytest.fixture
def shard() -> FakeShard:
    return FakeShard()


@pytest.fixture
def connect(shard: FakeShard) -> Iterator[Connections]:
    connections = Connections([shard])
    yield connections
    connections.close()


def answering(shard: FakeShard, changed: list[ChangedRowsBlock]) -> None:
    def script(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        yield from accept(shard, part)
        yield PushReply(part.sequence, "applied", k=part.sequence, changed_rows=changed if part.prefetched else [])

    shard.script = script


def test_parts_carry_what_is_prefetched_and_its_digest_and_the_ack_the_answer(shard: FakeShard, connect: Connections) -> None:
    answering(shard, [answer([2], [9], np.ones((1, 4), np.float32))])
    session, prefetched = connect(sync=True), holds(USER, 3)
    ack = session.push(rows_of(1), soon(), [prefetched])
    ack.wait_applied()
    (part,) = shard.parts
    assert part.digest == digest_tables(part.tables, part.prefetched) != digest_tables(part.tables)
    assert (part.prefetched[0].ids.tolist(), part.prefetched[0].rows.shape) == (prefetched.ids.tolist(), (3, 0))
    assert ack.changed_rows is not None
    assert ack.changed_rows["user"].ids.tolist() == [int(prefetched.ids[2])]
    shard.script = accept
    assert session.push(rows_of(1), soon(), [prefetched]).changed_rows is None  # not applied


def test_an_ack_does_not_know_what_the_shard_did_not_say(shard: FakeShard, connect: Connections) -> None:
    answering(shard, [])
    session = connect(sync=True)
    ack = session.push(rows_of(1), soon(), [holds(USER, 3)])
    ack.wait_applied()
    assert ack.changed_rows is None
    nothing = session.push(rows_of(1), soon(), [holds(USER, 0)])
    nothing.wait_applied()
    assert nothing.changed_rows == {}


def test_an_answer_that_does_not_fit_ends_the_stream_and_is_not_used(shard: FakeShard, connect: Connections) -> None:
    answering(shard, [answer([7], [9], np.ones((1, 4), np.float32))])
    session = connect(sync=True)
    ack = session.push(rows_of(1), soon(), [holds(USER, 3)])
    ack.wait_applied()
    assert ack.changed_rows is None

    def wait_on() -> None:
        deadline = soon()
        while not deadline.expired:  # the ack is told a moment before the stream ends
            session.wait_applied(deadline)

    with pytest.raises(MessageError, match="3 rows of 16 bytes are prefetched"):
        wait_on()
