"""The protocol that moves a slot between nodes, every interleaving: reads are never too old, no row is lost, nothing is stuck."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from matrix import named

from kvemb.schema.move_plan import CLEANING, FLIPPED, MOVING
from tests.models import slot_move
from tests.models.carried import ABORTED, DONE
from tests.models.search import reachable, stuck
from tests.models.slot_move import (
    Shard,
    State,
    WrongReadError,
    is_over,
    require_sound,
    steps,
)

Steps = Callable[[State], Iterator[tuple[str, State]]]


def first(*, crashes: int = 0, losses: int = 0, batches: int = 1) -> State:
    return State(shards=(Shard(crashes=crashes), Shard()), losses=losses, batches=batches)


STARTS = {"calm": first(), "a crash": first(crashes=1), "two batches": first(crashes=1, batches=2), "a lost node": first(losses=1)}


@pytest.mark.parametrize("start", named(STARTS, full=["a lost node", "two batches"]))
def test_whatever_comes_in_between_reads_are_right_and_the_move_can_end(start: State) -> None:
    after = reachable(start, steps, require_sound)
    assert not stuck(after, is_over)
    ends = {state.phase for state in after if is_over(state)}
    assert ends == {DONE, ABORTED}


def test_a_move_that_is_not_aborted_can_still_be_done() -> None:
    def without_abort(state: State) -> Iterator[tuple[str, State]]:
        return ((name, one) for name, one in steps(state) if name != "abort")

    after = reachable(first(crashes=1, losses=1, batches=0), without_abort, require_sound)
    assert not stuck(after, lambda state: state.phase == DONE and is_over(state))


def hasty(state: State) -> Iterator[tuple[str, State]]:
    """Ends double writes before both markers name the new map."""
    yield from steps(state)
    if state.phase == FLIPPED:
        yield "clean too early", replace(state, phase=CLEANING)


def credulous(state: State) -> Iterator[tuple[str, State]]:
    """Takes an acknowledgement for a copy."""
    yield from steps(state)
    if state.phase == MOVING and all(len(shard.targets) == 2 for shard in state.shards):
        yield "flip too early", replace(state, phase=FLIPPED)


def forgetful(state: State) -> Iterator[tuple[str, State]]:
    """Starts again as a shard that writes to the old node only, and counts the report of before."""
    yield from steps(state)
    shard = state.shards[0]
    if shard.crashes:
        again = Shard((0,), shard.version, frozenset((0,)), shard.confirmed, reported=shard.reported)
        yield "start without the plan", replace(state, shards=(again, state.shards[1]))


def impatient(state: State) -> Iterator[tuple[str, State]]:
    """Renews markers, and goes on, before every shard has followed the flip: one that has not may end a repair with the old marker."""
    yield from steps(state)
    if state.phase == FLIPPED and {shard.reported for shard in state.shards} != {FLIPPED}:
        yield "renew early", replace(state, markers=(1, 1))
        if state.markers == (1, 1):
            yield "clean early", replace(state, phase=CLEANING)


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "losses"),
    [(hasty, 0), (credulous, 0), (forgetful, 0), (impatient, 1)],
    ids=["hasty", "credulous", "forgetful", "impatient"],
)
def test_the_search_finds_what_is_wrong_with_lesser_protocols(wrong: Steps, losses: int) -> None:
    with pytest.raises((WrongReadError, AssertionError)) as found:
        reachable(first(crashes=1, losses=losses), wrong, require_sound)
    assert "plan" in found.value.__notes__[0]


@pytest.mark.full
def test_the_search_finds_reads_that_go_back_where_the_node_that_the_map_does_not_name_is_always_written_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def second_first(shard: Shard) -> int:
        return min(shard.pending) if shard.seen == FLIPPED else max(shard.pending)

    monkeypatch.setattr(slot_move, "writes_first", second_first)
    with pytest.raises(WrongReadError, match="read before"):
        reachable(first(), steps, require_sound)


@pytest.mark.full
def test_the_search_finds_reads_that_go_back_where_a_repair_leaves_out_the_batch_that_is_being_written() -> None:
    def by_the_index_alone(state: State) -> Iterator[tuple[str, State]]:
        for name, after in steps(state):
            number = int(name[6]) if "restore on node" in name else None
            if number is None or not state.shards[number].pending:
                yield name, after
                continue
            node, shard = int(name[-1]), state.shards[number]
            rows = [list(one) for one in after.rows]
            rows[node][number] = shard.version - 1
            restored = shard._replace(restored=shard.restored | {node}, pending=shard.pending | {node})
            both = (restored, state.shards[1]) if number == 0 else (state.shards[0], restored)
            yield name, replace(after, rows=((rows[0][0], rows[0][1]), (rows[1][0], rows[1][1])), shards=both)

    with pytest.raises(WrongReadError, match="read before"):
        reachable(first(losses=1), by_the_index_alone, require_sound)
