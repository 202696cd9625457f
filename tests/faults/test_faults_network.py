"""The network between trainers, shards and nodes: whatever it does to a stream, rows are right or the connection is closed."""

import os
import signal
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from chaos.cluster import FaultyCluster
from chaos.proxy import DOWN, UP, FaultProxy, Flow
from jobs import DIM, PATIENCE_S, add, counting_table, eventually, require

import kvemb
from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline

IDS = np.arange(2000)
WAYS = {"both ways": None, "up": UP, "down": DOWN}


def table_of_own_rows(cluster: kvemb.Cluster, name: str) -> tuple[kvemb.Table, np.ndarray]:
    """Every row holds its id, its square root and so on: a row of another id is seen."""
    table = counting_table(cluster, name)
    rows = np.stack([IDS + 1, -IDS, np.sqrt(IDS), IDS % 7], axis=1).astype(np.float32)
    assert rows.shape[1] == DIM
    table.assign(IDS, rows, timeout_s=PATIENCE_S)
    return table, rows


@pytest.mark.parametrize("way", WAYS)
def test_a_partition_between_trainer_and_shard_costs_time_and_nothing_else(way: str, single: FaultyCluster) -> None:
    proxy = single.shard_proxies[0]
    with kvemb.connect(single.url, timeout_s=PATIENCE_S) as cluster:
        table = counting_table(cluster, f"to shard {way}".replace(" ", "_"))
        add(table, IDS).wait(timeout_s=PATIENCE_S)
        proxy.set(Flow(swallow=True), WAYS[way])
        acks = [add(table, IDS) for _ in range(4)]
        with pytest.raises(KvembError, match=proxy.address):
            acks[-1].wait(timeout_s=1)
        proxy.heal()
        for ack in acks:
            ack.wait_applied(timeout_s=PATIENCE_S)
        require(table, IDS, 5)


@pytest.mark.full  # half a minute
def test_a_connection_that_swallows_everything_is_given_up_and_another_one_made(single: FaultyCluster) -> None:
    proxy = single.shard_proxies[0]
    with kvemb.connect(single.url, timeout_s=PATIENCE_S) as cluster:
        table = counting_table(cluster, "deaf")
        add(table, IDS).wait(timeout_s=PATIENCE_S)
        proxy.set_open(Flow(swallow=True))  # as of a firewall that has forgotten it: nobody says that it has ended
        ack, began = add(table, IDS), Deadline.after(PATIENCE_S)
        ack.wait(timeout_s=PATIENCE_S)
        assert PATIENCE_S - began.remaining_s() < 60, "gRPC's own times are 90 s"
        ack.wait_applied(timeout_s=PATIENCE_S)
        require(table, IDS, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_partition_between_shards_and_a_node_costs_time_and_nothing_else(
    way: str, local: FaultyCluster, connected: kvemb.Cluster
) -> None:
    table = counting_table(connected, f"to node {way}".replace(" ", "_"))
    for _ in range(2):
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    proxy = local.node_proxies[1]
    proxy.set(Flow(swallow=True), WAYS[way])
    ack = add(table, IDS)
    ack.wait(timeout_s=PATIENCE_S)
    eventually(lambda: proxy.address in " ".join(shard.reply.failure for shard in connected.status().shards if shard.reply), "said")
    assert not ack.applied
    proxy.heal()
    ack.wait_applied(timeout_s=PATIENCE_S)
    require(table, IDS, 3)


Harm = Callable[[FaultProxy, int], None]


def harm_resets(proxy: FaultProxy, turn: int) -> None:
    proxy.set(Flow(cut_after_bytes=37 * (2 * turn + 1) ** 2, cut="reset"), DOWN)


def harm_eof(proxy: FaultProxy, turn: int) -> None:
    proxy.set(Flow(cut_after_bytes=37 * (2 * turn + 1) ** 2, cut="eof"), DOWN)


def harm_requests(proxy: FaultProxy, turn: int) -> None:
    proxy.set(Flow(cut_after_bytes=37 * (2 * turn + 1) ** 2, cut=("reset", "eof")[turn % 2]), UP)  # type: ignore[arg-type]


def harm_slices(proxy: FaultProxy, turn: int) -> None:
    proxy.set(Flow(slice_bytes=1 + turn))


def harm_jitter(proxy: FaultProxy, turn: int) -> None:
    proxy.set(Flow(slice_bytes=200, jitter_s=0.002 * turn))


@pytest.mark.parametrize("harm", [harm_resets, harm_eof, harm_requests, harm_slices, harm_jitter])
def test_rows_are_right_or_the_connection_is_closed(harm: Harm, local: FaultyCluster, connected: kvemb.Cluster) -> None:
    table, rows = table_of_own_rows(connected, "own")
    n_right = n_refused = 0
    n_turns = 3 if harm in (harm_slices, harm_jitter) else 4
    for turn in range(n_turns):
        for proxy in local.node_proxies:
            harm(proxy, turn)
        for _ in range(2):
            ids = np.random.default_rng(turn).permutation(IDS)[: 300 if harm is harm_slices else 1500]
            try:
                got = table.pull(ids, timeout_s=0.5 if n_turns == 4 else 20)
            except KvembError:
                n_refused += 1
                continue
            np.testing.assert_array_equal(got, rows[ids])
            n_right += 1
        for proxy in local.node_proxies:
            proxy.heal()
        np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), rows)
    assert n_right == 2 * n_turns if harm in (harm_slices, harm_jitter) else n_refused > 0


@pytest.mark.parametrize("harm", [harm_resets, harm_eof, harm_requests, harm_slices])
def test_pushes_survive_broken_streams_to_nodes_and_shards(harm: Harm, local: FaultyCluster, connected: kvemb.Cluster) -> None:
    name = f"pushed_{harm.__name__}"
    table = counting_table(connected, name)
    acks = [add(table, IDS[:200])]
    acks[0].wait(timeout_s=PATIENCE_S)
    for turn in range(5):
        for proxy in (*local.node_proxies, *local.shard_proxies):
            harm(proxy, turn)
        acks.append(add(table, IDS[:200]))
    local.heal()
    for ack in acks:
        ack.wait_applied(timeout_s=PATIENCE_S)
    require(table, IDS[:200], 6)


class _OutOfTheBlueError(BaseException):
    """Like KeyboardInterrupt, but never anybody else's."""


def test_an_exception_out_of_the_blue_in_mid_call_leaves_no_wrong_rows(local: FaultyCluster, connected: kvemb.Cluster) -> None:
    table, rows = table_of_own_rows(connected, "own")

    def raise_it(*_: object) -> None:
        raise _OutOfTheBlueError

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        for direction in (UP, DOWN):
            proxy = local.node_proxies[0]
            proxy.set(Flow(hold=True), direction)

            def interrupt(proxy: FaultProxy = proxy, way: str = direction) -> None:
                eventually(lambda: proxy.held_bytes(way) > 0, "nothing was on its way")  # type: ignore[arg-type]
                os.kill(os.getpid(), signal.SIGUSR1)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(_OutOfTheBlueError):
                table.pull(IDS[:700], timeout_s=PATIENCE_S)
            thread.join()
            proxy.heal()
            for ids in (IDS[900:], IDS[:700][::-1]):
                np.testing.assert_array_equal(table.pull(ids, timeout_s=PATIENCE_S), rows[ids])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_fork_in_mid_call_leaves_both_processes_with_right_rows(local: FaultyCluster) -> None:
    with kvemb.connect(local.url, timeout_s=PATIENCE_S) as writer:
        rows = table_of_own_rows(writer, "own")[1]
    with kvemb.connect(local.url, read_only=True, timeout_s=PATIENCE_S) as cluster:
        table = cluster.table("own")
        table.pull(IDS, timeout_s=PATIENCE_S)
        proxy, got = local.node_proxies[0], []
        proxy.set_open(Flow(hold=True), DOWN)
        thread = threading.Thread(target=lambda: got.append(table.pull(IDS, timeout_s=PATIENCE_S)))
        thread.start()
        eventually(lambda: proxy.held_bytes(DOWN) > 0, "nothing was on its way")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if all((table.pull(IDS, timeout_s=PATIENCE_S) == rows).all() for _ in range(5)) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        proxy.heal()
        thread.join()
        np.testing.assert_array_equal(got[0], rows)
        np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), rows)
