"""A table that is altered, dropped or loaded under pushes of two shards, for an exhaustive search. docs/adr/0122.

Shard 0 knows of each phase at once, shard 1 hears of it. Every push has a part on both shards, and perhaps rows of the table. In a sync job
each shard's steps are the product's `SyncSteps`: which step is handed out, and when none is, is decided there. A trainer does as
`PushSession` does: a push of which a part is accepted goes anew where it was refused; one that all have refused has failed, and its caller
pushes it again. So at the end every push is in every journal once, or a push that had failed was in one of them.

A load is a start anew of each shard, behind which rows of before are gone. A shard refuses what was made before its load, and lets what was
made behind one wait until it has carried that out. Of a push that is taken by half the rest goes without the table's rows. So at the end
both shards have a push's rows of the table, or none has.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from paramserver.ingest.sync_steps import COMING, Membership, SyncSteps
from tests.models.shard_steps import TIMEOUT_S, Known, joined, known, members, push

ALTER, DROP, LOAD = "alter", "drop", "load"
OPEN, ALTERING, CLOSED = "open", "altering", "closed"
SENT, ACCEPTED, REFUSED = "sent", "accepted", "refused"
SHARDS = (0, 1)
WINDOW = 2


class Part(NamedTuple):
    """A part of a push, as its trainer knows it; `now`: whether it goes by the definition in force, or without the table, or was made
    behind the load; `rows`: whether it has the rows of a table that is loaded."""

    state: str = SENT
    now: bool = False
    rows: bool = True


Push = tuple[Part, Part]


class Shard(NamedTuple):
    """One shard: the phase that it has seen, of each trainer its last step that came in, and those in its journal; how often it may die.
    `kept`: of each trainer the steps whose rows of the table it has taken behind the load."""

    saw: str
    taken: tuple[int, ...]
    journaled: tuple[frozenset[int], ...]
    known: Known | None = None
    crashes: int = 0
    kept: tuple[frozenset[int], ...] = ()


class State(NamedTuple):
    """Everything that processes hold.

    Args:
        verb: what is done to the table.
        phase: in the registry.
        last: the step behind which shards are asked to hold.
        shards: both.
        trainers: of each its pushes so far.
        names: whether each trainer's pushes have rows of the table.
        n_steps: that each will push.
    """

    verb: str
    shards: tuple[Shard, Shard]
    trainers: tuple[tuple[Push, ...], ...]
    names: tuple[bool, ...]
    n_steps: int = 2
    phase: str = OPEN
    last: int = 0


Rule = Callable[[State, int, int], str | None]
"""(state, trainer, step) -> what becomes of a push with refused parts: "anew" (what others have taken being kept, or gone), "whole" (as if
nobody had taken any), "failed", or None for not yet."""


def first(verb: str, *, sync: bool, names: tuple[bool, ...] = (True,), n_steps: int = 2, crashes: tuple[int, int] = (0, 0)) -> State:
    n = len(names)
    there = known(joined(SyncSteps.first(n, TIMEOUT_S), n)) if sync else None
    none = (frozenset[int](),) * n
    shards = (Shard(OPEN, (0,) * n, none, there, crashes[0], none), Shard(OPEN, (0,) * n, none, there, crashes[1], none))
    return State(verb, shards, ((),) * n, names, n_steps)


def settled(state: State, trainer: int, step: int) -> str | None:
    """As the product decides."""
    states = [part.state for part in state.trainers[trainer][step - 1]]
    if ACCEPTED in states:
        return "anew"
    return None if set(states) != {REFUSED} else "whole" if state.verb == LOAD else "failed"


def steps(state: State, rule: Rule = settled) -> Iterator[tuple[str, State]]:
    """Yield every step that a process can take, with its name."""
    yield from _verb_steps(state)
    for at in SHARDS:
        yield from ((f"shard {at}: {name}", after) for name, after in _shard_steps(state, at))
    for trainer in range(len(state.trainers)):
        yield from ((f"trainer {trainer}: {name}", after) for name, after in _trainer_steps(state, trainer, rule))


def is_over(state: State) -> bool:
    """Whether the verb has ended, and every push is accepted everywhere."""
    pushes = [one for trainer in state.trainers for one in trainer]
    whole = len(pushes) == state.n_steps * len(state.trainers) and all(part.state == ACCEPTED for one in pushes for part in one)
    return whole and all(shard.saw == CLOSED for shard in state.shards)


def rows_are_whole(state: State) -> None:
    """Both shards have a push's rows of a loaded table, or none does."""
    if is_over(state):
        assert state.shards[0].kept == state.shards[1].kept, "rows of a push are on one shard"


# --- the verb ------------------------------------------------------------------------------------------------------------------


def _verb_steps(state: State) -> Iterator[tuple[str, State]]:
    if state.phase == OPEN and state.verb == LOAD:
        yield "decide", state._replace(phase=CLOSED)  # each shard loads when it hears of it, or is started
    elif state.phase == OPEN:
        yield "begin", _seen(state._replace(phase=ALTERING if state.verb == ALTER else CLOSED), 0)
    elif state.phase == ALTERING and all(shard.saw == ALTERING for shard in state.shards):
        held = [shard.known.steps.held for shard in state.shards if shard.known is not None]
        furthest = max((one.last for one in held), default=0)
        if furthest > state.last:
            after = state._replace(last=furthest)
            for at in SHARDS:
                after = _with(after, at, _held(after.shards[at], furthest))
            yield "ask to go on", after
        elif all(one.phase != COMING for one in held) and all(_is_journaled(shard) for shard in state.shards):
            yield "switch", _seen(state._replace(phase=CLOSED), 0)


def _is_journaled(shard: Shard) -> bool:
    return shard.known is None or all(max(one, default=0) >= shard.known.steps.released for one in shard.journaled)


def _held(shard: Shard, last: int) -> Shard:
    return shard if shard.known is None else shard._replace(known=known(shard.known.steps.hold_behind(last)))


def _seen(state: State, at: int) -> State:
    """A shard sees the phase in force: it holds its steps, or refuses all that wait where one has rows of the closed table."""
    shard = state.shards[at]._replace(saw=state.phase)
    if state.verb == LOAD:
        return _with(state, at, _started_anew(state, shard._replace(crashes=shard.crashes + 1)))
    if state.phase == ALTERING:
        return _with(state, at, _held(shard, state.last))
    if shard.known is None:
        return _with(state, at, shard)
    waiting = sorted((int(one.trainer), one.step) for one in shard.known.steps.waiting)
    if any(_is_old(state, trainer, step, at) for trainer, step in waiting):
        first_of = dict(reversed(waiting))
        taken = tuple(first_of[trainer] - 1 if trainer in first_of else last for trainer, last in enumerate(shard.taken))
        shard = shard._replace(taken=taken, known=known(shard.known.steps.clear()))
        for trainer, step in first_of.items():
            state = _refuse_from(state, trainer, step, at)
    assert shard.known is not None
    return _with(state, at, shard._replace(known=known(shard.known.steps.go_on())))


def _is_old(state: State, trainer: int, step: int, at: int) -> bool:
    return (state.names[trainer] or state.verb == LOAD) and not state.trainers[trainer][step - 1][at].now


def _refuse_from(state: State, trainer: int, step: int, at: int) -> State:
    """A shard refuses a trainer's part, and with it those behind."""
    for number in range(step, len(state.trainers[trainer]) + 1):
        if state.trainers[trainer][number - 1][at].state == SENT:
            state = _told(state, trainer, number, at, REFUSED)
    return state


# --- the shards ----------------------------------------------------------------------------------------------------------------


def _shard_steps(state: State, at: int) -> Iterator[tuple[str, State]]:
    shard = state.shards[at]
    if shard.saw != state.phase:
        yield f"hear of {state.phase}", _seen(state, at)
    if shard.known is not None and shard.known.next[1] is not None:
        step, after = shard.known.next
        yield f"hand out step {step}", _with(state, at, shard._replace(known=after))
    if shard.known is not None and not _is_journaled(shard):
        step = shard.known.steps.released
        after = state
        for trainer in range(len(state.trainers)):
            for number in range(1, step + 1):
                after = _journaled(after, trainer, number, at)
        yield f"journal up to step {step}", after
    if shard.crashes:
        yield "crash and start", _with(state, at, _started_anew(state, shard))
    for trainer in range(len(state.trainers)):
        yield from _arrives(state, trainer, at)


def _journaled(state: State, trainer: int, step: int, at: int) -> State:
    """A push is in a shard's journal, for good."""
    shard = state.shards[at]
    if step in shard.journaled[trainer]:
        return state
    part = state.trainers[trainer][step - 1][at] if step <= len(state.trainers[trainer]) else Part(rows=False)
    if state.verb == LOAD and shard.saw == CLOSED and state.names[trainer] and part.rows:
        shard = shard._replace(kept=_added(shard.kept, trainer, step))
    return _with(state, at, shard._replace(journaled=_added(shard.journaled, trainer, step)))


def _added(steps: tuple[frozenset[int], ...], trainer: int, step: int) -> tuple[frozenset[int], ...]:
    return (*steps[:trainer], steps[trainer] | {step}, *steps[trainer + 1 :])


def _started_anew(state: State, shard: Shard) -> Shard:
    """Its registry is as new as the nodes'; what is in no journal comes in again."""
    n, crashes = len(shard.taken), shard.crashes - 1
    if shard.known is None:
        return shard._replace(saw=state.phase, crashes=crashes)
    new = joined(SyncSteps.first(n, TIMEOUT_S, Membership(n, members(n), complete=True)), n)
    steps = new.hold_behind(0) if state.phase == ALTERING else new
    journaled = tuple(max(one, default=0) for one in shard.journaled)
    return shard._replace(saw=state.phase, taken=journaled, known=known(steps), crashes=crashes)


def _arrives(state: State, trainer: int, at: int) -> Iterator[tuple[str, State]]:
    shard, pushes = state.shards[at], state.trainers[trainer]
    sent = [step for step, parts in enumerate(pushes, 1) if parts[at].state == SENT and step not in shard.journaled[trainer]]
    next_step = next((step for step in sent if shard.known is None or step > shard.taken[trainer]), 0)
    if not next_step:
        return
    old = _is_old(state, trainer, next_step, at)
    if state.verb == LOAD and shard.saw == OPEN and pushes[next_step - 1][at].now:
        return  # until this shard has loaded, too
    if old and shard.saw == CLOSED:
        behind = state if shard.known is None else _refuse_from(state, trainer, next_step, at)
        yield f"refuse step {next_step} of {trainer}", _told(behind, trainer, next_step, at, REFUSED)
    elif shard.known is None:
        if not (old and shard.saw == ALTERING):
            yield f"take push {next_step} of {trainer}", _journaled(state, trainer, next_step, at)
    elif next_step == shard.taken[trainer] + 1:
        taken = (*shard.taken[:trainer], next_step, *shard.taken[trainer + 1 :])
        steps = shard.known.steps.add(push(trainer, next_step))
        yield f"take step {next_step} of {trainer}", _with(state, at, shard._replace(taken=taken, known=known(steps)))


# --- the trainers --------------------------------------------------------------------------------------------------------------


def _trainer_steps(state: State, trainer: int, rule: Rule) -> Iterator[tuple[str, State]]:
    pushes = state.trainers[trainer]
    refused = [step for step, parts in enumerate(pushes, 1) if REFUSED in (part.state for part in parts)]
    n_waiting = sum(any(part.state == SENT for part in parts) for parts in pushes)
    if not refused and len(pushes) < state.n_steps and n_waiting < WINDOW:
        heard = state.verb == LOAD and any(shard.saw == CLOSED for shard in state.shards)
        for now in (False, True) if heard else (False,):
            yield f"push {len(pushes) + 1}, {now}", _pushes(state, trainer, (*pushes, (Part(now=now), Part(now=now))))
    for step, parts in enumerate(pushes, 1):
        for at in SHARDS:
            if parts[at].state == SENT and step in state.shards[at].journaled[trainer]:
                yield f"hear that shard {at} has accepted push {step}", _told(state, trainer, step, at, ACCEPTED)
    if refused and (fate := rule(state, trainer, refused[0])) is not None:
        yield f"push {refused[0]} {fate}", _settle(state, trainer, refused[0], fate)


def _settle(state: State, trainer: int, step: int, fate: str) -> State:
    for at in SHARDS:
        part = state.trainers[trainer][step - 1][at]
        if fate == "failed":
            assert step not in state.shards[at].journaled[trainer], f"push {step} of trainer {trainer} has failed, and shard {at} has it"
            state = _part(state, trainer, step, at, Part(SENT, now=True))  # its caller connects again, and pushes it again
        elif part.state == REFUSED:
            gone = fate == "anew" and not part.now  # what another shard had taken of them
            state = _part(state, trainer, step, at, Part(SENT, now=True, rows=part.rows and not gone))
    return state


def _told(state: State, trainer: int, step: int, at: int, answer: str) -> State:
    return _part(state, trainer, step, at, state.trainers[trainer][step - 1][at]._replace(state=answer))


def _part(state: State, trainer: int, step: int, at: int, part: Part) -> State:
    pushes = state.trainers[trainer]
    parts = (part, pushes[step - 1][1]) if at == 0 else (pushes[step - 1][0], part)
    return _pushes(state, trainer, (*pushes[: step - 1], parts, *pushes[step:]))


def _pushes(state: State, trainer: int, pushes: tuple[Push, ...]) -> State:
    return state._replace(trainers=(*state.trainers[:trainer], pushes, *state.trainers[trainer + 1 :]))


def _with(state: State, at: int, shard: Shard) -> State:
    return state._replace(shards=(shard, state.shards[1]) if at == 0 else (state.shards[0], shard))
