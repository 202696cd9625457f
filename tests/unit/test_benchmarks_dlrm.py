"""What `dlrm` computes: when bytes on an emulated link arrive, ratios within a round, losses that differ. No server, no time."""

import socket
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks import dlrm_rounds
from benchmarks.dlrm_rounds import Spent, Target, Trainer, Turn, WrongLossError, lines_of, require_same_losses, take_turns
from benchmarks.local_rows import LocalRows
from benchmarks.network_proxy import Chunk, Host, Link, Pipe
from kvemb import optim


def test_bytes_of_all_connections_queue_for_a_link() -> None:
    link = Link()
    assert link.carry(5.0, 2.0) == 5.0
    assert link.carry(5.5, 1.0) == 7.0, "behind those before"
    assert link.carry(20.0, 1.0) == 20.0, "an idle link carries at once"


def test_a_chunk_comes_out_at_the_rate_of_its_link() -> None:
    chunk = Chunk(begin_s=10.0, rate=100.0, data=memoryview(bytes(50)))
    assert [chunk.due(now_s) for now_s in (9.0, 10.0, 10.25, 11.0)] == [0, 0, 25, 50]
    chunk.taken = 20
    assert chunk.due(11.0) == 30
    assert chunk.wake_s(9.0) == pytest.approx(10.0005)
    assert chunk.wake_s(10.4999) == 10.5, "no later than its end"


def test_what_is_sent_goes_through_both_hosts_links_and_half_a_round_trip() -> None:
    one, other = Host(), Host()
    (sender, source), (sink, receiver) = socket.socketpair(), socket.socketpair()
    with sender, source, sink, receiver:
        pipe = Pipe(source, sink, one.out, other.into, 0.5, 100.0)
        other.into.free_s = 2.0  # another sender's bytes
        sender.sendall(b"x" * 50)
        pipe.read(bytearray(1000), 1.0)
        assert (one.out.free_s, other.into.free_s) == (1.5, 2.5)
        pipe.write(2.25)
        assert receiver.recv(1000) == b"x" * 25
        pipe.write(9.0)
        assert receiver.recv(1000) == b"x" * 25
        assert not pipe.queue
        assert not pipe.done
        sender.close()
        pipe.read(bytearray(1000), 9.0)
        assert pipe.done


def turns(*step_ms: float, loss: float = 0.5) -> list[Turn]:
    return [Turn({"step": ms / 1e3, "rows": 0.001, "push": 0.002, "trainer cpu": ms / 1e3}, 0.1, [loss + 0.1, loss]) for ms in step_ms]


def test_ratios_are_taken_within_a_round_and_told_beside_what_was_to_be_reached() -> None:
    rounds = {"memory": turns(100, 200, 400), "ahead": turns(110, 200, 420)}
    line = Target("ahead", "memory", 1.05).line(rounds)
    assert line.name == "ahead / memory"
    assert line.figures["ratio"].median == pytest.approx(1.05)
    assert line.figures["ratio"].high == pytest.approx(1.10)
    assert line.figures[""] == "reached"
    assert Target("ahead", "memory", 1.19, at_least=True).line(rounds).figures[""] == "missed"
    memory, ahead = lines_of(rounds, "memory", n_cores=2)
    assert memory.figures["/ local"].median == 1.0
    assert ahead.figures["ms/step"].median == pytest.approx(200)
    assert ahead.figures["rows"] == "1.0"
    assert ahead.figures["cpu / cores"] == "–", "nobody works beside it"
    with_shards = [Turn({**turn.spent_s, "shards cpu": 0.3}, 0.1, turn.losses) for turn in rounds["ahead"]]
    (line,) = lines_of({"memory": with_shards}, "memory", n_cores=2)
    assert line.figures["cpu / cores"] == "250.0", "half of 200 ms and 300 ms"


def scripted(name: str, losses: Sequence[float], exact: bool = False) -> Trainer:
    """A trainer whose losses are known, and whose every step takes 1 s of waiting for rows."""
    left, spent = iter(losses), Spent()

    def step(batch: object) -> float:
        spent.rows_s += 1.0
        return next(left)

    return Trainer(name, lambda indices: list(indices), step, lambda: None, spent, exact=exact)


def test_the_first_steps_of_a_turn_fill_the_pipelines_and_do_not_count_nor_do_the_last() -> None:
    seen = []
    one = scripted("one", np.linspace(1, 0.1, 100).tolist())
    one.settle = lambda: seen.append("settled")
    n = dlrm_rounds.N_FILL + 5 + dlrm_rounds.N_TAIL
    turn = one.turn(range(n))
    assert turn.spent_s["rows"] == pytest.approx(1.0), "5 steps of 1 s each"
    assert len(turn.losses) == n
    assert seen == ["settled"]


def test_a_contender_that_learns_something_else_is_refused() -> None:
    fine, n = np.linspace(0.7, 0.5, 3 * 7).tolist(), dlrm_rounds.N_FILL + 1 + dlrm_rounds.N_TAIL
    other = [*fine[:-1], float(np.nextafter(fine[-1], 1))]
    take_turns([scripted("memory", fine), scripted("exact", fine, exact=True), scripted("stale", other)], lambda number: range(n), 2)
    with pytest.raises(WrongLossError, match=r"exact: loss .* in step 6 of turn 2, expected"):
        take_turns([scripted("memory", fine), scripted("exact", other, exact=True)], lambda number: range(n), 2)
    with pytest.raises(WrongLossError, match="stale: mean loss"):
        take_turns([scripted("memory", fine), scripted("stale", [x * 1.1 for x in fine])], lambda number: range(n), 2)
    with pytest.raises(WrongLossError, match=r"memory: mean loss 0\.5"):
        require_same_losses([scripted("memory", [])], {"memory": turns(1, loss=0.5) + turns(1, loss=0.6)})


def test_rows_in_memory_are_updated_by_the_rules_of_the_parameter_servers() -> None:
    rows = LocalRows()
    spec = {"dim": 2, "optimizer": optim.sgd(lr=0.5), "initializer": None, "dtype": "float32", "seed": 0, "reduce": "sum"}
    table = rows.create_table("t", **spec, num_ids=10, exist_ok=True)
    ids = np.array([3, 7], np.uint64)
    table.assign(ids, np.ones((2, 2), np.float32))
    rows.push({"t": (ids[:1], np.full((1, 2), 2.0, np.float32))}, hyper={"t": {"lr": 0.25}})
    (pulled, versions), *_ = rows.pull_versions({"t": ids}).values()
    assert pulled.tolist() == [[0.5, 0.5], [1.0, 1.0]]
    assert versions.tolist() == [0, 0]
