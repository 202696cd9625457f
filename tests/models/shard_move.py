"""The hand-over of a slot from one shard to another as a state machine, for an exhaustive search. The protocol is docs/adr/0062.

Two shards; row A is of the slot that moves, row B of one that stays with the giver. A trainer pushes to both, one push after the other.
Every step below is one that some process takes alone; between any two of them any other process may go on, a shard may die and start
again, a message may come again and late, the node may lose all its rows. The promises of stores and journals are assumed: one writer is
fenced by its successor, and a batch in the journal is applied again by version.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvemb.schema.move_plan import ABORTING, DRAINING, FLIPPED, MOVING, SERVING, SHARDS
from tests.models.carried import ABORTED, DONE, NONE, OVER, Plan, carried, maps_of, taken_back

PLAN = Plan(SHARDS, 2)
OLD, NEW = 1, 2  # serials of the map, which give the writer of row A
GIVER, TAKER = 0, 1
A, B = "A", "B"

Pushes = tuple[int, ...]  # that a row has, in order: stands for its version, too


class Part(NamedTuple):
    """A part of a push on its way; it may arrive any number of times, however late.

    Args:
        to: the shard.
        sequence: at that shard.
        serial: of the map that it was routed by.
        push: which one.
        rows: that it changes.
    """

    to: int
    sequence: int
    serial: int
    push: int
    rows: str


class Shard(NamedTuple):
    """One shard. A new start keeps its durable fields, which are all but `advance`.

    Args:
        saw: the phase of the newest map that it has seen, which its folder holds.
        journal: parts that it accepted.
        n_applied: how many of them storage has.
        index: of each row that it knows, the pushes that it has; A before B.
        advance: the taker's copy of row A, read ahead of time.
        crashes: how often it may still die.
    """

    saw: str = NONE
    journal: tuple[Part, ...] = ()
    n_applied: int = 0
    index: tuple[Pushes | None, Pushes | None] = (None, None)
    advance: Pushes | None = None
    crashes: int = 0

    @property
    def serial(self) -> int:
        """Of the map that it has seen."""
        return maps_of(PLAN)[self.saw].serial


@dataclass(frozen=True)
class State:
    """Everything that processes, nodes and connections hold.

    Args:
        phase: of the plan, as shard 0 has it in its folder: one value, changed by it alone.
        shards: giver and taker.
        reports: (shard, phase) of reports that shards wrote; none is ever taken back.
        rows: in storage, of A and B; None: lost, and to be repaired.
        lost: which shards have not yet restored their rows in the repair that goes on; None: the node's marker is there.
        sent: parts that may arrive, again and again.
        waiting: the parts of the push under way that the trainer has no answer for.
        sequences: the last that the trainer has used at each shard.
        knows: the trainer's map.
        n_pushed: pushes begun.
        n_pushes: that will be made.
        losses: how often the node may still lose everything.
    """

    phase: str = NONE
    shards: tuple[Shard, Shard] = (Shard(index=((), ())), Shard())
    reports: frozenset[tuple[int, str]] = frozenset()
    rows: tuple[Pushes | None, Pushes | None] = ((), ())
    lost: frozenset[int] | None = None
    sent: frozenset[Part] = frozenset()
    waiting: frozenset[Part] = frozenset()
    sequences: tuple[int, int] = (0, 0)
    knows: int = OLD
    n_pushed: int = 0
    n_pushes: int = 2
    losses: int = 0


class LostRowError(AssertionError):
    """A row is not in storage as its owner knows it, and no process repairs it."""


def steps(state: State) -> Iterator[tuple[str, State]]:
    """Yield every step that a process can take, with its name."""
    yield from carrier_steps(state)
    for number in (GIVER, TAKER):
        yield from ((f"{('giver', 'taker')[number]}: {name}", after) for name, after in shard_steps(state, number))
    yield from trainer_steps(state)
    yield from node_steps(state)


def is_over(state: State) -> bool:
    """Whether the plan came to its end, and nothing is under way."""
    settled = all(shard.n_applied == len(shard.journal) and shard.saw == state.phase for shard in state.shards)
    return state.phase in OVER and settled and not state.waiting and state.n_pushed == state.n_pushes and state.lost is None


def require_sound(state: State) -> None:
    """Refuse a state in which a push was taken twice, an acknowledged one is nowhere, or a row is unknown to its writer."""
    taken = [(part.push, row) for shard in state.shards for part in shard.journal for row in part.rows]
    assert len(taken) == len(set(taken)), f"a push was taken twice: {state}"
    open_parts = {(part.push, row) for part in state.waiting for row in part.rows}
    for push in range(1, state.n_pushed + 1):
        for row in (A, B):
            assert (push, row) in taken or (push, row) in open_parts, f"push {push} of row {row} is nowhere: {state}"
    owners = [shard for shard in state.shards if may_write(shard, A)]
    assert len(owners) <= 1, f"two shards may write row A: {state}"
    if owners:
        assert owners[0].index[0] is not None, f"row A is unknown to the shard that writes it: {state}"
    if state.lost is None:
        for at in (0, 1):
            known = {shard.index[at] for shard in state.shards} - {None}
            if known != {state.rows[at]}:  # a shard that knows it otherwise would restore it so, or stop
                raise LostRowError(f"row {'AB'[at]} in storage is not what its shards know: {state}")


def may_write(shard: Shard, row: str) -> bool:
    """Whether a shard takes parts with this row now."""
    if row == B:
        return shard.index[1] is not None
    if shard.index[1] is not None:  # the giver
        return shard.saw in (NONE, MOVING, ABORTED)
    return shard.saw in (SERVING, DONE)


# --- shard 0 carries the plan --------------------------------------------------------------------------------------------------


def carrier_steps(state: State) -> Iterator[tuple[str, State]]:
    """Steps of shard 0's process, by the product's own transitions. It may die between any two of them: its decisions are in its folder,
    the reports are on the nodes."""
    if state.phase == NONE:
        yield "plan", replace(state, phase=MOVING)
    if back := taken_back(PLAN, state.phase):
        yield "abort", replace(state, phase=back)
    told = {shard for shard, phase in state.reports if phase == state.phase}
    if state.phase in (MOVING, SERVING):  # the giver has nothing to do then: that it is waited for only takes states away
        told.add(GIVER)
    following = carried(PLAN, state.phase, frozenset(told))
    if following is not None:
        yield following.phase, replace(state, phase=following.phase)


# --- the shards ----------------------------------------------------------------------------------------------------------------


def shard_steps(state: State, number: int) -> Iterator[tuple[str, State]]:
    shard = state.shards[number]
    if shard.saw != state.phase and may_look(state, number):
        yield f"see {state.phase}", _with(state, number, looked(shard, number, state.phase))
    yield from _apply(state, number)
    yield from _take_over(state, number)
    for phase in _to_report(shard, number):
        if (number, phase) not in state.reports:
            yield f"report {phase}", replace(state, reports=state.reports | {(number, phase)})
    if state.lost is not None and number in state.lost:
        rows = tuple(mine if mine is not None else there for mine, there in zip(shard.index, state.rows, strict=True))
        yield "restore", replace(state, rows=rows, lost=state.lost - {number})
    if shard.crashes:
        yield "crash and start", _with(state, number, shard._replace(advance=None, crashes=shard.crashes - 1))


def may_look(state: State, number: int) -> bool:
    """The giver drops the row between two batches, and not while a node is repaired: the taker may have reported without the row."""
    shard = state.shards[number]
    drops = number == GIVER and state.phase in (FLIPPED, SERVING, DONE) and shard.index[0] is not None
    return not (drops and (state.lost is not None or shard.n_applied < len(shard.journal)))


def looked(shard: Shard, number: int, phase: str) -> Shard:
    """The shard once it has seen a phase: the giver drops the row with the flip, the taker with an abort."""
    gives = number == GIVER and phase in (FLIPPED, SERVING, DONE)
    forgets = number == TAKER and phase in (ABORTING, ABORTED)
    index = (None, shard.index[1]) if gives or forgets else shard.index
    return shard._replace(saw=phase, index=index, advance=None if phase not in (MOVING, DRAINING) else shard.advance)


def _to_report(shard: Shard, number: int) -> Iterator[str]:
    if number == GIVER:
        if shard.saw == DRAINING and shard.n_applied == len(shard.journal):
            yield DRAINING
        if shard.saw == FLIPPED:
            yield FLIPPED
        return
    if shard.saw == MOVING and shard.advance is not None:
        yield MOVING
    if shard.saw == DRAINING and shard.index[0] is not None:
        yield DRAINING
    if shard.saw in (SERVING, ABORTING):
        yield shard.saw


def _apply(state: State, number: int) -> Iterator[tuple[str, State]]:
    """The next batch of the journal: each row that it changes must be in storage as the index says."""
    shard = state.shards[number]
    if shard.n_applied == len(shard.journal) or state.lost is not None:  # a node in repair takes nothing else
        return
    part = shard.journal[shard.n_applied]
    index, rows = list(shard.index), list(state.rows)
    for at, row in enumerate((A, B)):
        if row in part.rows:
            if rows[at] != index[at]:
                raise LostRowError(f"batch of push {part.push}, row {row}: {rows[at]} in storage, the index has {index[at]}: {state}")
            index[at] = rows[at] = (*(index[at] or ()), part.push)
    applied = shard._replace(index=(index[0], index[1]), n_applied=shard.n_applied + 1)
    yield f"apply push {part.push}", _with(replace(state, rows=(rows[0], rows[1])), number, applied)


def _take_over(state: State, number: int) -> Iterator[tuple[str, State]]:
    """The taker reads the row ahead, and again what changed since once the giver has drained."""
    taker, giver = state.shards[TAKER], state.shards[GIVER]
    if number != TAKER:
        return
    if taker.saw == MOVING and taker.advance is None and state.lost is None:
        yield "read ahead", _with(state, TAKER, taker._replace(advance=state.rows[0]))
    drained = giver.saw == DRAINING and giver.n_applied == len(giver.journal)  # it answers for itself, as it is now
    reads_nothing = taker.advance == giver.index[0]
    if taker.saw == DRAINING and taker.index[0] is None and drained and (reads_nothing or state.lost is None):
        ready = giver.index[0] if reads_nothing else state.rows[0]
        if ready != giver.index[0]:
            raise LostRowError(f"the taker reads {ready} where the giver's entry says {giver.index[0]}: {state}")
        yield "take the rest", _with(state, TAKER, taker._replace(index=(ready, None)))


# --- the trainer ---------------------------------------------------------------------------------------------------------------


def trainer_steps(state: State) -> Iterator[tuple[str, State]]:
    if not state.waiting and state.n_pushed < state.n_pushes:
        push = state.n_pushed + 1
        yield f"push {push}", replace(_send(state, push, A + B), n_pushed=push)
    if not state.waiting and state.knows == OLD and state.phase in (FLIPPED, SERVING, DONE):
        yield "the trainer reads the map", replace(state, knows=NEW)
    for part in sorted(state.sent):
        yield from _arrives(state, part)


def _send(state: State, push: int, rows: str) -> State:
    """Route rows of a push by the map that the trainer knows; the parts get the next sequences."""
    routed = {GIVER: "".join(row for row in rows if state.knows == OLD or row == B), TAKER: "A" if state.knows == NEW and A in rows else ""}
    parts = [Part(to, state.sequences[to] + 1, state.knows, push, routed[to]) for to in (GIVER, TAKER) if routed[to]]
    used = (state.sequences[0] + bool(routed[GIVER]), state.sequences[1] + bool(routed[TAKER]))
    return replace(state, sent=state.sent | set(parts), waiting=state.waiting | set(parts), sequences=used)


def _arrives(state: State, part: Part) -> Iterator[tuple[str, State]]:
    """A part comes in, for the first time or again: taken, answered as a duplicate, held, or refused whole. Each answer may be lost."""
    shard = state.shards[part.to]
    if part.sequence <= len(shard.journal):  # every accepted part is one entry
        known = shard.journal[part.sequence - 1]
        if part in state.waiting and known == part:
            yield f"{part} is acknowledged", replace(state, waiting=state.waiting - {part})
    elif part.serial > shard.serial or (part.serial == shard.serial and not all(may_write(shard, row) for row in part.rows)):
        return  # held until the shard has seen the map, or the hand-over has ended
    elif part.serial < shard.serial:
        if part in state.waiting:  # `moved`: the trainer reads the map again, and splits the part by it
            freed = tuple(last - (to == part.to) for to, last in enumerate(state.sequences))
            again = replace(state, waiting=state.waiting - {part}, sequences=(freed[0], freed[1]), knows=shard.serial)
            yield f"{part} is refused, and split", _send(again, part.push, part.rows)
    elif part.sequence == len(shard.journal) + 1:
        yield f"{part} is taken", _with(state, part.to, shard._replace(journal=(*shard.journal, part)))


# --- the node ------------------------------------------------------------------------------------------------------------------


def node_steps(state: State) -> Iterator[tuple[str, State]]:
    if state.lost is None and state.losses:
        yield "the node loses everything", replace(state, rows=(None, None), lost=frozenset((GIVER, TAKER)), losses=state.losses - 1)
    if state.lost == frozenset():
        yield "the repair ends", replace(state, lost=None)


def _with(state: State, number: int, shard: Shard) -> State:
    return replace(state, shards=(shard, state.shards[TAKER]) if number == GIVER else (state.shards[GIVER], shard))
