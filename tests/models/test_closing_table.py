"""Tables that are altered, dropped and loaded under pushes, every interleaving: no push is taken by half, and training goes on."""

from functools import partial

import pytest

from tests.models.closing_table import ALTER, DROP, LOAD, SENT, State, first, is_over, rows_are_whole, settled, steps
from tests.models.search import reachable, stuck

STARTS = {
    "async, two pushes, a shard dies": first(DROP, sync=False, crashes=(0, 1)),
    "async, altered": first(ALTER, sync=False, crashes=(1, 0)),
    "sync, dropped, two trainers": first(DROP, sync=True, names=(True, True), n_steps=1, crashes=(0, 1)),
    "sync, altered, two steps, the one that hears dies": first(ALTER, sync=True, crashes=(0, 1)),
    "sync, altered, two steps, the first one dies": first(ALTER, sync=True, crashes=(1, 0)),
    "sync, altered, two trainers": first(ALTER, sync=True, names=(True, True), n_steps=1, crashes=(0, 1)),
    "async, loaded, a shard dies": first(LOAD, sync=False, crashes=(0, 1)),
    "sync, loaded, two steps, a shard dies": first(LOAD, sync=True, crashes=(0, 1)),
    "sync, loaded, two trainers": first(LOAD, sync=True, names=(True, True), n_steps=1),
}
ONE_OF_TWO = first(DROP, sync=True, names=(True, False), n_steps=2)  # 100,000 states


@pytest.mark.parametrize("start", [*STARTS.values(), pytest.param(ONE_OF_TWO, marks=pytest.mark.long)], ids=[*STARTS, "one of two"])
def test_every_push_is_taken_whole_or_refused_whole_and_training_goes_on(start: State) -> None:
    after = reachable(start, steps, rows_are_whole)
    assert any(map(is_over, after))
    assert not stuck(after, is_over)


def at_its_first_refusal(state: State, trainer: int, step: int) -> str | None:
    """A push fails with the first part that is refused, whatever others have taken: so it was."""
    return "failed"


def when_all_is_answered(state: State, trainer: int, step: int) -> str | None:
    """A push is decided when every push of its trainer has its answers."""
    every = [part.state for parts in state.trainers[trainer] for part in parts]
    return None if SENT in every else settled(state, trainer, step)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_the_search_finds_pushes_by_half_where_they_fail_at_their_first_refusal(start: State) -> None:
    with pytest.raises(AssertionError, match="has failed, and shard") as found:
        reachable(start, partial(steps, rule=at_its_first_refusal), rows_are_whole)
    assert found.value.__notes__[0].startswith("after: ")


@pytest.mark.long
def test_the_search_finds_trainers_that_wait_for_each_other_where_all_answers_are_waited_for() -> None:
    after = reachable(ONE_OF_TWO, partial(steps, rule=when_all_is_answered), rows_are_whole)
    assert stuck(after, is_over)


def with_all_its_rows(state: State, trainer: int, step: int) -> str | None:
    """What is refused goes anew as it was, whatever others had taken before they loaded."""
    return None if settled(state, trainer, step) is None else "whole"


@pytest.mark.parametrize("start", [one for one in STARTS.values() if one.verb == LOAD], ids=[name for name in STARTS if "loaded" in name])
def test_the_search_finds_rows_on_one_shard_where_a_load_has_taken_away_what_the_other_had(start: State) -> None:
    with pytest.raises(AssertionError, match="rows of a push are on one shard"):
        reachable(start, partial(steps, rule=with_all_its_rows), rows_are_whole)
