"""Push parts that come twice, late, out of order, with gaps, too many, or from a sender without the right to push: message by message."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.proxy import DOWN, Flow
from jobs import PATIENCE_S, add, counting_table, eventually, raw_part, require

import kvemb
from kvemb.errors import FencedError, PushRejectedError, ShardUnavailableError
from kvemb.protocol.messages import SERVICE
from paramserver.rpc.push_streams import MAX_STREAMS_OF_PEER
from tests.raw_shard import RawShard, RawStream

IDS = np.arange(50)


@pytest.fixture
def cluster(single: FaultyCluster) -> Iterator[kvemb.Cluster]:
    """Of one shard."""
    with kvemb.connect(single.url, timeout_s=20) as connected:
        yield connected
        single.heal()


@pytest.fixture
def shard(single: FaultyCluster) -> Iterator[RawShard]:
    """The shard, behind its proxy."""
    with RawShard(single.shard_proxies[0].address) as raw:
        yield raw


def test_a_duplicate_gets_the_first_answer_and_changes_nothing(cluster: kvemb.Cluster, shard: RawShard) -> None:
    table = counting_table(cluster, "duplicate")
    me = shard.hello("duplicate").incarnation
    part = raw_part(table.definition, IDS, "duplicate", me, 1)
    with RawStream(shard) as stream:
        for _ in range(3):  # pending or applied by the time that the next one comes
            stream.send(part)
        first = stream.outcome()
        assert (first.state, first.sequence) == ("applied", 1)
        k = shard.status().k
    with RawStream(shard) as stream:
        stream.send(part)
        again = stream.outcome()
        assert (again.state, again.k) == ("applied", first.k)
    assert shard.status().k == k
    require(table, IDS, 1)


def test_parts_out_of_order_and_gaps_are_refused_until_the_missing_one_came(cluster: kvemb.Cluster, shard: RawShard) -> None:
    table = counting_table(cluster, "order")
    me = shard.hello("order").incarnation
    parts = {n: raw_part(table.definition, IDS, "order", me, n) for n in (1, 2, 3, 7)}
    with RawStream(shard) as stream:
        stream.send(parts[2])
        assert isinstance(stream.error(), PushRejectedError)
        for n in (1, 2):
            stream.send(parts[n])
            assert stream.outcome().sequence == n
        stream.send(parts[7])
        error = stream.error()
        assert isinstance(error, PushRejectedError)
        assert "7" in str(error)
        stream.send(parts[1])  # an old one: a duplicate, not a step back
        assert stream.outcome().state == "applied"
        stream.send(parts[3])
        assert stream.outcome().state == "applied"
    require(table, IDS, 3)


def test_an_answer_that_never_came_is_asked_for_again_under_the_same_sequence(
    single: FaultyCluster, cluster: kvemb.Cluster, shard: RawShard
) -> None:
    table = counting_table(cluster, "again")
    before = shard.status().k
    add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    single.shard_proxies[0].set(Flow(hold=True), DOWN)
    acks = [add(table, IDS) for _ in range(5)]
    direct = RawShard(f"127.0.0.1:{single.shard_proxies[0].target[1]}")
    try:
        eventually(lambda: direct.status().rows_applied >= 6 * len(IDS), "the shard did not get the pushes")
        assert not any(ack.accepted for ack in acks)
        single.shard_proxies[0].reset_all()  # the answers are lost for good
        single.heal()
        for ack in acks:
            ack.wait_applied(timeout_s=PATIENCE_S)
        assert direct.status().k <= before + 6
    finally:
        direct.close()
    require(table, IDS, 6)


def test_a_push_in_parts_is_applied_when_all_are_in_and_not_by_half(cluster: kvemb.Cluster, shard: RawShard) -> None:
    table = counting_table(cluster, "parts")
    me = shard.hello("parts").incarnation
    halves = [raw_part(table.definition, IDS[:25], "parts", me, 1, more=True), raw_part(table.definition, IDS[25:], "parts", me, 2)]
    halves[1] = type(halves[1])(**{**vars(halves[1]), "step": halves[0].step})
    with RawStream(shard) as stream:
        stream.send(halves[0])
    cluster.flush()
    require(table, IDS, 0)
    with RawStream(shard) as stream:
        for half in halves:  # the first as a duplicate, or as a new part
            stream.send(half)
        assert [stream.outcome().state for _ in range(2)] == ["applied", "applied"]
    require(table, IDS, 1)


def test_other_data_under_a_used_sequence_is_refused(cluster: kvemb.Cluster, shard: RawShard) -> None:
    table = counting_table(cluster, "other")
    me = shard.hello("other").incarnation
    with RawStream(shard) as stream:
        stream.send(raw_part(table.definition, IDS, "other", me, 1))
        assert stream.outcome().state == "applied"
        stream.send(raw_part(table.definition, IDS, "other", me, 1, much=5))
        error = stream.error()
        assert isinstance(error, PushRejectedError)
        assert "1" in str(error)
    require(table, IDS, 1)


def test_a_restarted_trainer_begins_anew_and_its_predecessor_is_fenced(cluster: kvemb.Cluster, shard: RawShard) -> None:
    table = counting_table(cluster, "restarted")
    old = shard.hello("restarted").incarnation
    with RawStream(shard) as stream:
        stream.send(raw_part(table.definition, IDS, "restarted", old, 1))
        assert stream.outcome().state == "applied"
        new = shard.hello("restarted")
        assert (new.incarnation > old, new.last_sequence) == (True, 0)
        stream.send(
            raw_part(table.definition, IDS, "restarted", new.incarnation, 1, much=5)
        )  # other data, the same number: not a duplicate
        assert stream.outcome().state == "applied"
        stream.send(raw_part(table.definition, IDS, "restarted", old, 2))
        assert isinstance(stream.error(), FencedError)
    require(table, IDS, 6)


def test_more_than_a_shard_takes_waits_at_the_trainer_and_none_of_it_is_lost(single: FaultyCluster, cluster: kvemb.Cluster) -> None:
    table = counting_table(cluster, "much")
    add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    ids, acks = np.arange(20_000), []
    with processes.paused(single.servers[0].process):

        def push_on() -> None:
            while len(acks) < 2000:
                acks.append(table.push(ids, np.full((len(ids), 4), -1.0, np.float32), timeout_s=1.5))

        with pytest.raises(ShardUnavailableError, match="nothing was sent"):
            push_on()
        assert 8 <= len(acks) <= 100  # a window, whatever the shard holds of it
    for ack in acks:
        ack.wait_applied(timeout_s=PATIENCE_S)
    require(table, ids[50:], len(acks))


def test_more_streams_than_a_shard_serves_of_a_connection_are_turned_away_or_take_an_idle_ones_place(
    cluster: kvemb.Cluster, shard: RawShard
) -> None:
    table = counting_table(cluster, "streams")
    add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    me = shard.hello("streams").incarnation
    streams, refusals = [], []
    try:
        for _ in range(2 * MAX_STREAMS_OF_PEER):
            streams.append(RawStream(shard))
            streams[-1].send(raw_part(table.definition, IDS, "streams", me, 9))  # a gap: answered, nothing changes
            try:
                streams[-1].error()
            except grpc.RpcError as error:
                refusals.append((error.code(), error.details()))
        assert all(code is grpc.StatusCode.UNAVAILABLE and "push streams of this connection" in text for code, text in refusals), refusals
        eventually(lambda: sum(stream.is_open for stream in streams) <= MAX_STREAMS_OF_PEER, "those beyond the bound to end")
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    finally:
        for stream in streams:
            stream.close()
    require(table, IDS, 2)


def test_a_message_that_is_too_large_is_refused_as_such(cluster: kvemb.Cluster, single: FaultyCluster) -> None:
    with grpc.insecure_channel(single.shard_proxies[0].address, options=[("grpc.max_send_message_length", -1)]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/Describe")(bytes(70 << 20), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    table = counting_table(cluster, "large")
    add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    require(table, IDS, 1)
