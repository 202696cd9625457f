"""Rows that come back with acks, between a scripted shard and the trainer's cache."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.client.all_shards import AllShards
from kvemb.client.push_session import PushSession
from kvemb.datapath.row_cache import RowCache
from kvemb.errors import MessageError
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.table_def import TableDef
from tests.unit.fake_shard import CLUSTER, FakeShard, accept, owned, rows_of, soon

USER = TableDef("user", 2, optim.sgd(lr=0.5), init.zeros())


def with_rows(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
    """A healthy shard whose rows are their ids plus a hundred times k."""
    yield from accept(shard, part)
    k = part.sequence
    rows = [np.repeat(rows.ids[:, None] + 100 * k, 2, axis=1).astype("<f4").tobytes() for rows in part.tables]
    yield PushReply(part.sequence, "applied", k, epoch=1, rows=rows if part.return_rows else [])


@pytest.fixture
def shards() -> Iterator[list[FakeShard]]:
    shards = [FakeShard(with_rows), FakeShard(with_rows)]
    yield shards
    for shard in shards:
        shard.stop()


@pytest.fixture
def session(shards: list[FakeShard]) -> Iterator[PushSession]:
    cache = RowCache(1 << 20, 1)
    cache.add_table(USER)
    servers = AllShards([f"127.0.0.1:{shard.port}" for shard in shards])
    session = PushSession(servers, CLUSTER, "trainer-a", sync=False, row_cache=cache)
    yield session
    session.close(None)
    servers.close()


def kept(session: PushSession, ids: list[int]) -> dict[int, float]:
    assert session.row_cache is not None
    out = np.empty((len(ids), 2), np.float32)
    found = session.row_cache.fill(USER, np.array(ids, np.uint64), out)
    return {} if found is None else {row_id: float(out[i, 0]) for i, row_id in enumerate(ids) if found.rows[i]}


def test_rows_are_there_when_the_ack_says_applied(session: PushSession) -> None:
    ids = sorted(owned(0, 2) + owned(1, 2))
    for push in range(1, 20):
        session.push(rows_of(*ids), soon()).wait_applied()
        assert kept(session, ids) == {row_id: row_id + 100 * push for row_id in ids}


def test_without_a_cache_no_rows_are_asked_for(shards: list[FakeShard]) -> None:
    servers = AllShards([f"127.0.0.1:{shard.port}" for shard in shards])
    session = PushSession(servers, CLUSTER, "trainer-b", sync=False)
    session.push(rows_of(1, 2), soon()).wait_applied()
    session.close(None)
    servers.close()
    parts = [part for shard in shards for part in shard.parts]
    assert parts
    assert not any(part.return_rows for part in parts)


def test_a_lost_connection_drops_what_was_kept_and_what_was_on_its_way(session: PushSession, shards: list[FakeShard]) -> None:
    ids = owned(0, 3)
    session.push(rows_of(*ids[:2]), soon()).wait_applied()
    assert len(kept(session, ids)) == 2
    shards[0].script = accept  # the outcome is lost with the connection
    ack = session.push(rows_of(ids[2]), soon())
    ack.wait()
    shards[0].stop()
    shards[0].script = with_rows
    shards[0].start()
    ack.wait_applied()
    assert kept(session, ids) == {}
    session.push(rows_of(*ids), soon()).wait_applied()
    assert len(kept(session, ids)) == 3


def test_rows_of_another_size_end_the_session_and_the_push_counts_as_applied(session: PushSession, shards: list[FakeShard]) -> None:
    def bad(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        yield from accept(shard, part)
        yield PushReply(part.sequence, "applied", 1, epoch=1, rows=[b"123"])

    shards[0].script = bad
    ack = session.push(rows_of(*owned(0, 1)), soon())
    ack.wait_applied()
    assert kept(session, owned(0, 1)) == {}
    with pytest.raises(MessageError, match="3 bytes came back"):
        session.push(rows_of(*owned(0, 1)), soon()).wait_applied()
