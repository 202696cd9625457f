"""Searches every state that a model can reach."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


def reachable(first: S, steps: Callable[[S], Iterator[tuple[str, S]]], check: Callable[[S], None]) -> dict[S, list[S]]:
    """Return every state that can be reached, with the states that follow each.

    Raises:
        AssertionError: as `check` or a step does, with the steps that led there.
    """
    came_from: dict[S, tuple[S, str] | None] = {first: None}
    after: dict[S, list[S]] = {}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        try:
            check(state)
            following = list(steps(state))
        except AssertionError as error:
            error.add_note("after: " + "; ".join(_path(state, came_from)))
            raise
        after[state] = [one for _, one in following]
        for name, one in following:
            if one not in came_from:
                came_from[one] = state, name
                waiting.append(one)
    return after


def stuck(after: dict[S, list[S]], is_end: Callable[[S], bool]) -> list[S]:
    """Return the states from which no end can be reached any more."""
    before: dict[S, list[S]] = {}
    for state, following in after.items():
        for one in following:
            before.setdefault(one, []).append(state)
    can = {state for state in after if is_end(state)}
    waiting = deque(can)
    while waiting:
        for state in before.get(waiting.popleft(), []):
            if state not in can:
                can.add(state)
                waiting.append(state)
    return [state for state in after if state not in can]


def _path(state: S, came_from: dict[S, tuple[S, str] | None]) -> list[str]:
    names: list[str] = []
    step = came_from[state]
    while step is not None:
        names.append(step[1])
        step = came_from[step[0]]
    return names[::-1]
