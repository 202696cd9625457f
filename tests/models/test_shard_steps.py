"""How the shards of a sync job stop at one step, every interleaving: at the flip all have had the same steps, and training goes on."""

from collections.abc import Callable, Iterator

import pytest
from matrix import named

from paramserver.ingest.sync_steps import UNKNOWN
from tests.models.search import reachable, stuck
from tests.models.shard_steps import (
    ABORTED,
    DRAINING,
    FLIPPED,
    GIVER,
    HOLDING,
    NONE,
    OTHER,
    TAKER,
    THERE,
    State,
    Trainer,
    is_over,
    require_sound,
    shards_of,
    steps,
)

Steps = Callable[[State], Iterator[tuple[str, State]]]


def first(*, giver: int = 0, other: int = 0, trainers: int = 2, n_steps: int = 1, phase: str = NONE) -> State:
    return State(phase, shards=shards_of(trainers, phase, giver, other), trainers=(Trainer(),) * trainers, n_steps=n_steps)


STARTS = {
    "two trainers": first(),
    "two trainers, the giver dies": first(giver=1),
    "two trainers, another dies": first(other=1),
    "two steps": first(trainers=1, n_steps=2),
    "two steps, the giver dies": first(trainers=1, n_steps=2, giver=1),
}
TWICE_TWO = pytest.param(first(n_steps=2), id="two trainers, two steps", marks=pytest.mark.long)  # 181,000 states


@pytest.mark.parametrize("start", [*named(STARTS, full=[name for name in STARTS if "," in name]), TWICE_TWO])
def test_at_the_flip_all_have_had_the_same_steps_and_training_can_go_on(start: State) -> None:
    after = reachable(start, steps, require_sound)
    assert not stuck(after, is_over)
    assert {state.phase for state in after if is_over(state)} == {FLIPPED, ABORTED}


def nodes_move(n_steps: int, *, by_nodes: bool = False) -> State:
    """Slots move between nodes, and none between shards."""
    return first(n_steps=n_steps, phase=ABORTED)._replace(n_node_moves=1, by_nodes=by_nodes)


def test_training_goes_on_through_a_move_of_nodes_with_two_pushes_of_each_trainer_on_their_way() -> None:
    assert not stuck(reachable(nodes_move(2), steps, require_sound), is_over)


@pytest.mark.full
@pytest.mark.parametrize("n_steps", [1, 2])
def test_the_search_finds_that_trainers_wait_for_each_other_where_shards_refuse_what_other_nodes_routed(n_steps: int) -> None:
    after = reachable(nodes_move(n_steps, by_nodes=True), steps, require_sound)
    waiting = [state for state in stuck(after, is_over) if after[state] == []]
    assert waiting
    for state in waiting:
        assert all(trainer.waits for trainer in state.trainers)


def flip_anywhere(state: State) -> Iterator[tuple[str, State]]:
    """No shard holds: the flip comes where the giver is."""
    yield from steps(state)
    if state.phase == NONE:
        yield "flip at once", state._replace(phase=FLIPPED, last=state.shards[GIVER].journaled)


def last_of_the_giver(state: State) -> Iterator[tuple[str, State]]:
    """The giver's step is the last one of the old map, not the largest of all."""
    for name, after in steps(state):
        told = [step for number, phase, step in state.reports if (number, phase) == (GIVER, HOLDING)]
        yield name, after._replace(last=told[0]) if name == "draining" else after


def flip_for_the_giver(state: State) -> Iterator[tuple[str, State]]:
    """The flip comes when the giver has come to the last step, wherever the others are."""
    yield from steps(state)
    if state.phase == DRAINING and any((number, phase) == (GIVER, DRAINING) for number, phase, _ in state.reports):
        yield "flip too early", state._replace(phase=FLIPPED)


def unknown_is_none(state: State) -> Iterator[tuple[str, State]]:
    """A restarted process says that it has handed out no step."""
    yield from steps(state)
    for number in THERE:
        shard = state.shards[number]
        unknown = shard.steps.held.phase == UNKNOWN
        if unknown and shard.saw == HOLDING and not any(one[:2] == (number, HOLDING) for one in state.reports):
            yield "report too little", state._replace(reports=state.reports | {(number, HOLDING, 0)})
        if unknown and shard.saw == DRAINING and state.last == 0:
            yield "report too early", state._replace(reports=state.reports | {(number, DRAINING, 0)})


LESSER = [flip_anywhere, last_of_the_giver, flip_for_the_giver, unknown_is_none]


@pytest.mark.full
@pytest.mark.parametrize("wrong", LESSER)
def test_the_search_finds_what_is_wrong_with_lesser_ways_to_stop(wrong: Steps) -> None:
    with pytest.raises(AssertionError) as found:
        reachable(first(trainers=1, n_steps=2, giver=1), wrong, require_sound)
    assert found.value.__notes__[0].startswith("after: ")


def test_a_shard_that_was_started_anew_hands_out_nothing_until_all_go_on() -> None:
    state = first(n_steps=2)
    for phase, last in ((HOLDING, 0), (DRAINING, 2)):
        anew = state.shards[GIVER]._replace(saw=phase, journaled=1).started_anew(last)
        shards = (anew, state.shards[OTHER], state.shards[TAKER])
        now = state._replace(phase=phase, last=last, trainers=(Trainer(pushed=2),) * 2, shards=shards)
        for trainer in range(2):
            (now,) = (after for name, after in steps(now) if name == f"trainer {trainer}: step 2 comes in at shard {GIVER}")
        assert not [name for name, _ in steps(now) if name.startswith("giver: ") and "see" not in name]
