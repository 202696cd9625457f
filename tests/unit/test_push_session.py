"""What a session sends, and what its acks tell."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from kvemb.client import part_numbering, push_session
from kvemb.errors import ShardFailedError, ShardUnavailableError, to_wire
from kvemb.protocol.message_format import digest_tables
from kvemb.protocol.messages import PushPart, PushReply
from tests.unit.fake_shard import WAIT_S, Connections, FakeShard, accept, apply, owned, rows_of, soon


def test_nobody_is_spoken_to_before_the_first_push(shards: list[FakeShard], connect: Connections) -> None:
    session = connect(2)
    assert [shard.hellos for shard in shards] == [[], []]
    session.push(rows_of(1), soon()).wait()
    assert [[(h.trainer, h.incarnation, h.map_serial) for h in shard.hellos] for shard in shards] == [
        [("trainer-a", 0, 1)],
        [("trainer-a", 41, 1)],
    ]


def test_parts_are_numbered_per_shard_and_carry_their_digest(shards: list[FakeShard], connect: Connections) -> None:
    session = connect(2)
    for ids in (owned(0, 3), owned(0, 1) + owned(1, 2), owned(1, 1)):
        session.push(rows_of(*sorted(ids)), soon()).wait_applied()
    assert [[(p.sequence, p.step, len(p.tables[0].ids)) for p in shard.parts] for shard in shards] == [
        [(1, 1, 3), (2, 2, 1)],
        [(1, 2, 2), (2, 3, 1)],
    ]
    assert all(part.digest == digest_tables(part.tables) for shard in shards for part in shard.parts)


def test_in_sync_mode_every_shard_gets_a_part_of_every_push(shards: list[FakeShard], connect: Connections) -> None:
    session = connect(2, sync=True)
    session.push(rows_of(*owned(1, 2)), soon()).wait_applied()
    assert [[len(part.tables[0].ids) for part in shard.parts] for shard in shards] == [[0], [2]]


def test_a_restarted_sync_trainer_begins_where_the_foremost_shard_is_and_levels_the_others(
    shards: list[FakeShard], connect: Connections
) -> None:
    shards[0].first_step, shards[1].first_step = 9, 7
    session = connect(2, sync=True)
    for _ in range(2):
        session.push(rows_of(*owned(0, 1), *owned(1, 1)), soon()).wait_applied()
    assert [[(part.sequence, part.step, len(part.tables)) for part in shard.parts] for shard in shards] == [
        [(1, 9, 1), (2, 10, 1)],
        [(1, 7, 0), (2, 8, 0), (3, 9, 1), (4, 10, 1)],
    ]


def test_a_refused_empty_part_of_a_restarted_trainer_is_told(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].first_step, shards[1].first_step = 2, 1
    shards[1].script = lambda shard, part: iter([PushReply(part.sequence, "failed", error=to_wire(ShardFailedError("full stop")))])
    session = connect(2, sync=True)
    with pytest.raises(ShardFailedError, match="full stop"):
        session.push(rows_of(*owned(0, 1)), soon()).wait_applied()


def test_in_async_mode_an_empty_push_is_done_at_once(shards: list[FakeShard], connect: Connections) -> None:
    ack = connect(2).push(rows_of(), soon())
    assert ack.applied
    assert ack.staleness is None


def test_the_caller_may_change_its_arrays_as_soon_as_push_returns(shards: list[FakeShard], connect: Connections) -> None:
    go = threading.Event()
    shards[0].script = lambda shard, part: apply(shard, part) if go.wait(WAIT_S) else iter(())
    session = connect()
    rows = rows_of(1, 2)
    acks = [session.push(rows, soon()), session.push(rows, soon())]
    rows[0].rows[:] = np.nan
    rows[0].ids[:] = 0
    go.set()
    for ack in acks:
        ack.wait_applied()
    assert [(p.tables[0].ids.tolist(), p.tables[0].rows.tolist()) for p in shards[0].parts] == [([1, 2], [[1, 1]] * 2)] * 2


def test_a_large_push_is_cut_and_marked(shards: list[FakeShard], connect: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    original = part_numbering.split
    monkeypatch.setattr(part_numbering, "split", lambda tables: original(tables, 100))
    connect().push(rows_of(*range(13)), soon()).wait_applied()
    assert [(len(p.tables[0].ids), p.more, p.step) for p in shards[0].parts] == [(6, True, 1), (6, True, 1), (1, False, 1)]


def test_accepted_comes_before_applied(shards: list[FakeShard], connect: Connections) -> None:
    go = threading.Event()

    def hold(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        yield from accept(shard, part)
        go.wait(WAIT_S)
        yield PushReply(part.sequence, "applied", k=1)

    shards[0].script = hold
    ack = connect().push(rows_of(1), soon())
    ack.wait()
    assert (ack.accepted, ack.applied) == (True, False)
    with pytest.raises(ShardUnavailableError, match=rf"not applied within 0.01 s by shard 0 \(127.0.0.1:{shards[0].port}\)"):
        ack.wait_applied(timeout_s=0.01)
    go.set()
    ack.wait_applied()
    assert ack.applied


def test_staleness_weighs_shards_by_their_rows(shards: list[FakeShard], connect: Connections) -> None:
    for shard, (changed, elapsed) in zip(shards, [(1.0, 2), (0.0, 9)], strict=True):
        reply = dict(state="applied", k=1, changed=changed, elapsed=elapsed)
        shard.script = lambda s, part, reply=reply: [PushReply(part.sequence, **reply)]  # type: ignore[misc]
    ack = connect(2).push(rows_of(*sorted(owned(0, 1) + owned(1, 3))), soon())
    ack.wait_applied()
    assert ack.staleness is not None
    assert (ack.staleness.changed_fraction, ack.staleness.batches_elapsed) == (0.25, 9)


def test_closing_says_goodbye_to_every_shard(shards: list[FakeShard], connect: Connections) -> None:
    session = connect(2)
    session.push(rows_of(1), soon())
    session.close(soon())
    assert [[(bye.trainer, bye.incarnation) for bye in shard.byes] for shard in shards] == [[("trainer-a", 41)]] * 2


def test_closing_says_goodbye_to_a_shard_that_ended_the_idle_stream(shards: list[FakeShard], connect: Connections) -> None:
    shards[1].ends_streams = True
    session = connect(2)
    session.push(rows_of(*owned(0, 1), *owned(1, 1)), soon()).wait_applied()
    deadline = soon()
    while session._streams[1].trouble != "the shard ended the stream":
        assert not deadline.expired
    session.close(soon())
    assert [len(shard.byes) for shard in shards] == [1, 1]


def test_pushes_of_many_threads_reach_every_shard_in_the_same_order(shards: list[FakeShard], connect: Connections) -> None:
    session = connect(2, sync=True)
    with ThreadPoolExecutor(4) as pool:
        for ack in list(pool.map(lambda i: session.push(rows_of(i), soon()), range(40))):
            ack.wait_applied()
    assert [[p.step for p in shard.parts] for shard in shards] == [list(range(1, 41))] * 2
    assert [shard.sequences for shard in shards] == [list(range(1, 41))] * 2


def test_an_ack_says_how_long_its_push_waited_for_room(connect: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    session, clock = connect(2), iter((100.0, 100.75))
    monkeypatch.setattr(push_session, "time", SimpleNamespace(monotonic=clock.__next__))
    ids = [*owned(0, 3), *owned(1, 2)]
    ack = session.push(rows_of(*sorted(ids)), soon())
    assert (ack.window_s, ack.n_rows) == (0.75, 5)
    ack.wait_applied()
