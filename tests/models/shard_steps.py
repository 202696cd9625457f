"""How the shards of a sync job stop at one step before slots move, as a state machine, for an exhaustive search. docs/adr/0062.

Two shards that are there, the giver and another one; one that joins and takes. Trainers push step after step, a part to each shard; a
shard hands a step out when it has all of its parts, and then writes it to its journal. What else a hand-over is made of is in `shard_move`:
here it is one phase more, and the flip.

Slots may move between nodes, too. Nobody stops then: shards and trainers see it one after the other, at any time.
"""

from collections.abc import Iterator
from typing import NamedTuple

NONE, HOLDING, DRAINING, FLIPPED, ABORTED = "none", "holding", "draining", "flipped", "aborted"
OVER = (FLIPPED, ABORTED)
GIVER, OTHER, TAKER = 0, 1, 2
THERE = (GIVER, OTHER)
WINDOW = 2  # steps that a trainer has on their way


class Shard(NamedTuple):
    """One shard. A new start keeps what it saw and what it journaled.

    Args:
        saw: the phase of the newest map that it has seen, which its folder holds.
        got: of each trainer, its last step that came in.
        released: the last step handed out by this process.
        journaled: the last one in its journal.
        unknown: whether steps were handed out by a process before this one, and by this one none.
        crashes: how often it may still die.
        nodes: how many moves of nodes it has seen.
    """

    saw: str = NONE
    got: tuple[int, ...] = (0, 0)
    released: int = 0
    journaled: int = 0
    unknown: bool = False
    crashes: int = 0
    nodes: int = 0


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
    shards: tuple[Shard, ...] = (Shard(), Shard(), Shard())
    reports: frozenset[tuple[int, str, int]] = frozenset()
    trainers: tuple[Trainer, ...] = (Trainer(), Trainer())
    n_steps: int = 3
    nodes: int = 0
    n_node_moves: int = 0
    by_nodes: bool = False


def steps(state: State) -> Iterator[tuple[str, State]]:
    """Yield every step that somebody can take, with its name."""
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
    """What shard 0's process does. A shard that cannot say its step makes it abort; so may an operator."""
    if state.phase == NONE:
        yield "hold", state._replace(phase=HOLDING)
    if state.phase in (HOLDING, DRAINING):
        yield "abort", state._replace(phase=ABORTED)
    if all_reported(state, HOLDING) and state.phase == HOLDING:
        yield "drain", state._replace(phase=DRAINING, last=max(step for _, phase, step in state.reports if phase == HOLDING))
    if all_reported(state, DRAINING) and state.phase == DRAINING:
        yield "flip", state._replace(phase=FLIPPED)


def all_reported(state: State, phase: str) -> bool:
    """Whether every shard that is there has done its part of a phase."""
    return {number for number, of, _ in state.reports if of == phase} == set(THERE)


# --- the shards ----------------------------------------------------------------------------------------------------------------


def shard_steps(state: State, number: int) -> Iterator[tuple[str, State]]:
    shard = state.shards[number]
    if shard.saw != state.phase:
        yield f"see {state.phase}", _with(state, number, looked(shard, state.phase))
    if shard.nodes != state.nodes and number in THERE:
        yield "see the nodes", _with(state, number, shard._replace(nodes=state.nodes))
    if number in THERE and not shard.unknown:
        if shard.saw == HOLDING:
            yield from _told(state, number, HOLDING, shard.released)
        if shard.saw == DRAINING and shard.journaled == shard.released >= state.last:
            yield from _told(state, number, DRAINING, shard.released)
    following = due(state, number)
    if all(got >= following for got in shard.got) and may_hand_out(state, shard, following):
        yield f"hand out step {following}", _with(state, number, shard._replace(released=following, unknown=False))
    if shard.journaled < shard.released:
        yield f"journal step {shard.released}", _with(state, number, shard._replace(journaled=shard.released))
    if shard.crashes:
        at = shard.journaled
        again = shard._replace(got=(at,) * len(shard.got), released=at, unknown=at > 0, crashes=shard.crashes - 1)
        yield "crash and start", _with(state, number, again)


def looked(shard: Shard, phase: str) -> Shard:
    """The shard once it has seen a phase: with the flip it refuses what waits for its step."""
    at = shard.released
    return shard._replace(saw=phase, got=(at,) * len(shard.got) if phase == FLIPPED else shard.got)


def due(state: State, number: int) -> int:
    """The next step of a shard; the taker's first one is what its trainers send first."""
    shard = state.shards[number]
    if number in THERE or shard.released:
        return shard.released + 1
    first = {one.bases[TAKER] + 1 for one in state.trainers if one.bases is not None}
    assert len(first) <= 1, f"trainers begin at different steps at the taker: {state}"
    assert first <= {state.last + 1}, f"the taker begins at step {first}, the giver ended at step {state.last}: {state}"
    return state.last + 1


def may_hand_out(state: State, shard: Shard, step: int) -> bool:
    """Whether a shard that has a whole step hands it out."""
    if shard.saw == DRAINING:
        return not shard.unknown and step <= state.last
    return shard.saw != HOLDING


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
    """A trainer that sees a newer map pushes nothing until all that it sent by the old one has an answer; only who writes rows matters."""
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
    """Whether a shard has accepted or refused all that went there by older nodes: what waits for the others of its step has no answer."""
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
        yield f"step {step} comes in at shard {to}", _with(state, to, shard._replace(got=got))


def _with(state: State, number: int, shard: Shard) -> State:
    return state._replace(shards=(*state.shards[:number], shard, *state.shards[number + 1 :]))


def _now(state: State, number: int, trainer: Trainer) -> State:
    return state._replace(trainers=(*state.trainers[:number], trainer, *state.trainers[number + 1 :]))
