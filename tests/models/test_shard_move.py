"""The protocol that hands a slot from one shard to another, every interleaving: each push once, no row lost, nothing stuck."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from matrix import named

from kvemb.schema.move_plan import DRAINING, FLIPPED, SERVING
from tests.models import shard_move
from tests.models.carried import ABORTED, DONE
from tests.models.search import reachable, stuck
from tests.models.shard_move import (
    GIVER,
    TAKER,
    Shard,
    State,
    is_over,
    require_sound,
    steps,
)

Steps = Callable[[State], Iterator[tuple[str, State]]]


def first(*, giver: int = 0, taker: int = 0, losses: int = 0, pushes: int = 1) -> State:
    return State(shards=(Shard(index=((), ()), crashes=giver), Shard(crashes=taker)), losses=losses, n_pushes=pushes)


STARTS = {
    "two pushes": first(pushes=2),
    "the giver dies": first(giver=1, pushes=2),
    "the taker dies": first(taker=1, pushes=2),
    "both die": first(giver=1, taker=2),
    "a lost node": first(losses=1, taker=1),
}


@pytest.mark.parametrize("start", named(STARTS, full=["a lost node"]))
def test_whatever_comes_in_between_each_push_is_taken_once_and_the_move_can_end(start: State) -> None:
    after = reachable(start, steps, require_sound)
    assert not stuck(after, is_over)
    assert {state.phase for state in after if is_over(state)} == {DONE, ABORTED}
    every = tuple(range(1, start.n_pushes + 1))
    assert {state.rows for state in after if is_over(state)} == {(every, every)}


@pytest.mark.full
def test_a_move_that_is_not_aborted_can_still_be_done() -> None:
    def without_abort(state: State) -> Iterator[tuple[str, State]]:
        return ((name, one) for name, one in steps(state) if name != "abort")

    after = reachable(first(giver=1, taker=1, losses=1), without_abort, require_sound)
    assert not stuck(after, lambda state: state.phase == DONE and is_over(state))


def without_serials(state: State) -> Iterator[tuple[str, State]]:
    """A part says nothing of its map: the giver takes what comes after the flip, too."""
    yield from steps(state)
    giver = state.shards[GIVER]
    for part in state.sent:
        if part.to == GIVER and giver.saw == FLIPPED and part.sequence == len(giver.journal) + 1:
            yield f"{part} is taken", replace(state, shards=(giver._replace(journal=(*giver.journal, part)), state.shards[TAKER]))


def without_hold(state: State) -> Iterator[tuple[str, State]]:
    """The giver takes parts on while it drains."""
    yield from steps(state)
    giver = state.shards[GIVER]
    for part in state.sent:
        if part.to == GIVER and giver.saw == DRAINING and part.sequence == len(giver.journal) + 1:
            yield f"{part} is taken", replace(state, shards=(giver._replace(journal=(*giver.journal, part)), state.shards[TAKER]))


def flip_on_promise(state: State) -> Iterator[tuple[str, State]]:
    """The flip comes when the giver has drained, even if the taker lacks rows."""
    yield from steps(state)
    if state.phase == DRAINING and (GIVER, DRAINING) in state.reports:
        yield "flip too early", replace(state, phase=FLIPPED)


def serve_at_once(state: State) -> Iterator[tuple[str, State]]:
    """The taker serves when it sees the flip, whether the giver has seen it or not."""
    yield from steps(state)
    if state.phase == FLIPPED:
        yield "let the taker serve too early", replace(state, phase=SERVING)


def take_ahead_only(state: State) -> Iterator[tuple[str, State]]:
    """The taker counts what it read ahead as the row."""
    yield from steps(state)
    taker = state.shards[TAKER]
    if taker.saw == DRAINING and taker.index[0] is None and taker.advance is not None:
        ready = taker._replace(index=(taker.advance, None))
        yield "take no rest", replace(state, shards=(state.shards[GIVER], ready))


def end_abort_early(state: State) -> Iterator[tuple[str, State]]:
    """The giver goes on with an abort before the taker has forgotten the row."""
    yield from steps(state)
    if state.phase == DRAINING:
        yield "abort at once", replace(state, phase=ABORTED)


def drop_in_repair(state: State) -> Iterator[tuple[str, State]]:
    """The giver drops the row while a node is repaired, for which the taker has reported without it."""
    yield from steps(state)
    giver = state.shards[GIVER]
    if state.phase == FLIPPED and giver.saw == DRAINING:
        dropped = shard_move.looked(giver, GIVER, FLIPPED)
        yield "drop in a repair", replace(state, shards=(dropped, state.shards[TAKER]))


LESSER = [without_serials, without_hold, flip_on_promise, serve_at_once, take_ahead_only, end_abort_early, drop_in_repair]


@pytest.mark.full
@pytest.mark.parametrize("wrong", LESSER)
def test_the_search_finds_what_is_wrong_with_lesser_protocols(wrong: Steps) -> None:
    with pytest.raises(AssertionError) as found:
        reachable(first(losses=1, pushes=2), wrong, require_sound)
    assert "plan" in found.value.__notes__[0]
