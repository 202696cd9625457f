"""How the shards of a sync job stop at one step before slots move, for an exhaustive search that runs their own code. docs/adr/0062.

Two shards that are there, the giver and another one; one that joins and takes. Each has its steps as the product's `SyncSteps`, and every
event is one of its methods: which step is handed out, and when none is, is decided there and not here. Trainers push step after
step, a part to each shard; a shard that hands a step out then writes it to its journal. What else a hand-over is made of is in
`shard_move`: here it is one phase more, and the flip.

Slots may move between nodes, too. No process stops then: shards and trainers see it one after the other, at any time.
"""

from collections.abc import Iterator
from functools import cache, cached_property
from typing import NamedTuple

from kvemb.schema.move_plan import DRAINING, FLIPPED, HOLDING, SHARDS
from paramserver.ingest.sync_steps import AT_LAST, UNKNOWN, Membership, SyncSteps
from paramserver.model.batch import PartTicket, Push, ReceivedPart
from tests.models.carried import ABORTED, NONE, Plan, carried, taken_back

PLAN = Plan(SHARDS, 3, sync=True)
OVER = (FLIPPED, ABORTED)
GIVER, OTHER, TAKER = 0, 1, 2
THERE = (GIVER, OTHER)
WINDOW = 2  # steps that a trainer has on their way
TIMEOUT_S = 30.0  # no time passes here


@cache
def push(trainer: int, step: int) -> Push:
    """A trainer's push for a step; the same one whenever it is asked for, so that states that are alike are equal."""
    return Push(str(trainer), 1, step, (ReceivedPart((), PartTicket(step, 0, 0)),), 0.0)


def members(n_trainers: int) -> tuple[tuple[str, int], ...]:
    return tuple((str(trainer), 1) for trainer in range(n_trainers))


def by_map(steps: SyncSteps, phase: str, last: int) -> SyncSteps:
    """What a shard does once it has seen a phase, as `StepsByMap` says; with the flip it refuses what waits for its step."""
    if phase in (HOLDING, DRAINING):
        return steps.hold_behind(last if phase == DRAINING else 0)
    return steps.clear().go_on() if phase == FLIPPED else steps.go_on()


def joined(steps: SyncSteps, n_trainers: int) -> SyncSteps:
    """After the hellos of all trainers."""
    for name, incarnation in members(n_trainers):
        steps, _ = steps.join(name, incarnation)
    return steps


class Known:
    """What a process knows of its steps; one object for states of the product that are alike, so that a search compares them at once."""

    def __init__(self, steps: SyncSteps) -> None:
        self.steps = steps

    @cached_property
    def next(self) -> tuple[int, "Known | None"]:
        """The step that it hands out by now, and its knowledge then; (0, None) for none. Steps do not depend on outcomes."""
        after, step = self.steps.next_step()
        for one in step:
            after = after.settled(one, 0.0)
        return (after.released, known(after)) if step else (0, None)


def known(steps: SyncSteps) -> Known:
    return _known(steps, tuple(steps.places.items()))


@cache
def _known(steps: SyncSteps, places: tuple[object, ...]) -> Known:
    return Known(steps)


class Shard(NamedTuple):
    """One shard. A new start keeps the map that it saw and the steps that it journaled.

    Args:
        saw: the phase of the newest map that it has seen, which its folder holds.
        got: of each trainer, its last step that came in.
        known: this process's knowledge of steps.
        journaled: the last one in its journal.
        crashes: how often it may still die.
        nodes: how many moves of nodes it has seen.
    """

    saw: str
    got: tuple[int, ...]
    known: Known
    journaled: int = 0
    crashes: int = 0
    nodes: int = 0

    @property
    def steps(self) -> SyncSteps:
        return self.known.steps

    @property
    def released(self) -> int:
        """The last step handed out."""
        return max(self.steps.released, self.journaled)

    def started_anew(self, last: int) -> "Shard":
        """After a crash, when all trainers have said hello again; they send the pushes that are in no journal."""
        n = len(self.got)
        steps = by_map(SyncSteps.first(n, TIMEOUT_S, Membership(n, members(n), complete=True)), self.saw, last)
        return self._replace(got=(self.journaled,) * n, known=known(joined(steps, n)), crashes=max(0, self.crashes - 1))


def shards_of(n_trainers: int, phase: str = NONE, giver: int = 0, other: int = 0) -> tuple[Shard, ...]:
    """Giver, other and taker at the start of a job; the taker is not known yet."""
    got, new = (0,) * n_trainers, SyncSteps.first(n_trainers, TIMEOUT_S)
    there = known(joined(new, n_trainers))
    return Shard(phase, got, there, crashes=giver), Shard(phase, got, there, crashes=other), Shard(phase, got, known(new))


class Trainer(NamedTuple):
    """One trainer.

    Args:
        pushed: its last step.
        bases: once it knows the new map, of each shard the last step that went there by the old one.
        nodes: the moves of nodes by whose map its parts went out.
        waits: whether it knows a newer one, and pushes nothing until all that it sent has an answer.
    """

    pushed: int = 0
    bases: tuple[int, int, int] | None = None
    nodes: int = 0
    waits: bool = False


class State(NamedTuple):
    """Everything that processes and connections hold.

    Args:
        phase: of the plan, as shard 0 has it in its folder.
        last: the last step of the old map, once that is said.
        shards: giver, other, taker.
        reports: (shard, phase, step) of reports; none is ever taken back, though its process may have died since.
        trainers: all of them.
        n_steps: that each will push.
        nodes: how many moves of nodes there were.
        n_node_moves: that there will be.
        by_nodes: whether a shard refuses parts that were routed by other nodes, as it once did.
    """

    phase: str = NONE
    last: int = 0
    shards: tuple[Shard, ...] = shards_of(2)
    reports: frozenset[tuple[int, str, int]] = frozenset()
    trainers: tuple[Trainer, ...] = (Trainer(), Trainer())
    n_steps: int = 3
    nodes: int = 0
    n_node_moves: int = 0
    by_nodes: bool = False


def steps(state: State) -> Iterator[tuple[str, State]]:
    """Yield every step that a process can take, with its name."""
    yield from carrier_steps(state)
    if state.nodes < state.n_node_moves:
        yield "slots move between nodes", state._replace(nodes=state.nodes + 1)
    for number in (*THERE, TAKER):
        yield from ((f"{('giver', 'other', 'taker')[number]}: {name}", after) for name, after in shard_steps(state, number))
    for number in range(len(state.trainers)):
        yield from ((f"trainer {number}: {name}", after) for name, after in trainer_steps(state, number))


def is_over(state: State) -> bool:
    """Whether the plan came to its end, and every step is in every journal; in the taker's, those after the flip."""
    there = (*THERE, TAKER) if state.phase == FLIPPED and state.last < state.n_steps else THERE
    return state.phase in OVER and all(state.shards[one].journaled == state.n_steps for one in there)


def require_sound(state: State) -> None:
    """Refuse a flip at which shards have not all had the same steps."""
    if state.phase == FLIPPED:
        for number in THERE:
            shard = state.shards[number]
            assert shard.journaled >= state.last, f"shard {number} has not had step {state.last} of the old map: {state}"
            assert shard.saw == FLIPPED or shard.released == shard.journaled == state.last, f"shard {number} went on: {state}"


# --- shard 0 carries the plan --------------------------------------------------------------------------------------------------


def carrier_steps(state: State) -> Iterator[tuple[str, State]]:
    """What shard 0's process does, by the product's own transitions. A shard that cannot say its step has it abort, or an operator."""
    if state.phase == NONE:
        yield "hold", state._replace(phase=HOLDING)
    if state.phase not in (HOLDING, DRAINING):
        return
    if taken_back(PLAN, state.phase):
        yield "abort", state._replace(phase=ABORTED)
    told = {number: step for number, phase, step in state.reports if phase == state.phase}
    following = carried(PLAN, state.phase, frozenset([*told, TAKER]), tuple(told.get(number, 0) for number in (*THERE, TAKER)))
    if following is not None:
        yield following.phase, state._replace(phase=following.phase, last=following.last_step or state.last)


# --- the shards ----------------------------------------------------------------------------------------------------------------


def shard_steps(state: State, number: int) -> Iterator[tuple[str, State]]:
    shard = state.shards[number]
    if shard.saw != state.phase:
        yield f"see {state.phase}", _with(state, number, looked(state, number))
    if shard.nodes != state.nodes and number in THERE:
        yield "see the nodes", _with(state, number, shard._replace(nodes=state.nodes))
    held = shard.steps.held
    if number in THERE:
        if shard.saw == HOLDING and held.phase != UNKNOWN:
            yield from _told(state, number, HOLDING, held.last)
        if shard.saw == DRAINING and held.phase == AT_LAST and shard.journaled == shard.released:
            yield from _told(state, number, DRAINING, held.last)
    step, after = shard.known.next
    if after is not None:
        assert step == due(state, number), f"shard {number} hands out step {step}: {state}"
        yield f"hand out step {step}", _with(state, number, shard._replace(known=after))
    if shard.journaled < shard.released:
        yield f"journal step {shard.released}", _with(state, number, shard._replace(journaled=shard.released))
    if shard.crashes:
        yield "crash and start", _with(state, number, shard.started_anew(state.last))


def looked(state: State, number: int) -> Shard:
    """The shard once it has seen the phase in force; the taker was told of the job's members before the flip."""
    shard, n = state.shards[number], len(state.trainers)
    got = (shard.released,) * n if state.phase == FLIPPED else shard.got
    steps = shard.steps.expect(members(n)) if number == TAKER and state.phase == FLIPPED else shard.steps
    return shard._replace(saw=state.phase, got=got, known=known(by_map(steps, state.phase, state.last)))


def due(state: State, number: int) -> int:
    """The next step of a shard; the taker's first one is what its trainers send first."""
    shard = state.shards[number]
    if number in THERE or shard.released:
        return shard.released + 1
    first = {one.bases[TAKER] + 1 for one in state.trainers if one.bases is not None}
    assert len(first) <= 1, f"trainers begin at different steps at the taker: {state}"
    assert first <= {state.last + 1}, f"the taker begins at step {first}, the giver ended at step {state.last}: {state}"
    return state.last + 1


def _told(state: State, number: int, phase: str, step: int) -> Iterator[tuple[str, State]]:
    if not any(one[:2] == (number, phase) for one in state.reports):
        yield f"report {phase}, step {step}", state._replace(reports=state.reports | {(number, phase, step)})


# --- the trainers --------------------------------------------------------------------------------------------------------------


def trainer_steps(state: State, number: int) -> Iterator[tuple[str, State]]:
    trainer = state.trainers[number]
    there = THERE if trainer.bases is None else (*THERE, TAKER)
    accepted = min(max(state.shards[one].journaled, trainer.bases[one] if trainer.bases else 0) for one in there)
    if trainer.pushed < min(state.n_steps, accepted + WINDOW) and not trainer.waits:
        yield f"push step {trainer.pushed + 1}", _now(state, number, trainer._replace(pushed=trainer.pushed + 1))
    yield from _follow(state, number)
    for one in there:
        yield from _arrives(state, number, one)


def _follow(state: State, number: int) -> Iterator[tuple[str, State]]:
    """A trainer that sees a newer map pushes nothing until all pushes by the old one have an answer; only the writers of rows matter."""
    trainer = state.trainers[number]
    flipped, moved = trainer.bases is None and state.phase == FLIPPED, trainer.nodes != state.nodes
    if moved and not state.by_nodes:
        yield "sees the nodes", _now(state, number, trainer._replace(nodes=state.nodes))
    elif (flipped or moved) and not trainer.waits:
        yield "sees the new map", _now(state, number, trainer._replace(waits=True))
    elif moved and all(answered_by_nodes(state, number, one) for one in THERE):
        yield "routes by the new nodes", _now(state, number, trainer._replace(nodes=state.nodes, waits=False))
    elif flipped and all(answered(state, trainer, one) for one in THERE):
        had = [state.shards[one].journaled for one in THERE]
        yield "routes by the new map", _now(state, number, trainer._replace(bases=(had[0], had[1], min(had)), waits=False))


def answered_by_nodes(state: State, number: int, to: int) -> bool:
    """Whether a shard has accepted or refused all that went there by older nodes: a push that waits for its step has no answer."""
    trainer, shard = state.trainers[number], state.shards[to]
    return shard.journaled >= shard.got[number] and (shard.journaled >= trainer.pushed or shard.nodes > trainer.nodes)


def answered(state: State, trainer: Trainer, shard: int) -> bool:
    """Whether a shard has accepted or refused all that went there by the old map."""
    return state.shards[shard].saw == FLIPPED or state.shards[shard].journaled >= trainer.pushed


def _arrives(state: State, number: int, to: int) -> Iterator[tuple[str, State]]:
    """The next part of a trainer comes in at a shard by which it was not refused."""
    trainer, shard = state.trainers[number], state.shards[to]
    step = max(shard.got[number], trainer.bases[to] if trainer.bases else 0) + 1
    same_map = (shard.saw == FLIPPED) == (trainer.bases is not None)
    if step <= trainer.pushed and same_map and (not state.by_nodes or shard.nodes == trainer.nodes):
        got = (*shard.got[:number], step, *shard.got[number + 1 :])
        steps = shard.steps if str(number) in shard.steps.places else shard.steps.join(str(number), 1)[0]
        yield f"step {step} comes in at shard {to}", _with(state, to, shard._replace(got=got, known=known(steps.add(push(number, step)))))


def _with(state: State, number: int, shard: Shard) -> State:
    return state._replace(shards=(*state.shards[:number], shard, *state.shards[number + 1 :]))


def _now(state: State, number: int, trainer: Trainer) -> State:
    return state._replace(trainers=(*state.trainers[:number], trainer, *state.trainers[number + 1 :]))
