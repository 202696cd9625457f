"""The move of a slot from one node to another as a state machine, for an exhaustive search. The protocol is docs/adr/0058.

Which phase follows, what comes before it, and where rows are written in it, the product's own transitions and maps say (`carried`).

One slot, two nodes, two shards with a row of that slot each, and a trainer that reads the first shard's row. Every step below is one that
some process takes alone; between any two of them anybody else may go on, a shard may die and start again, and a node may lose all it has.
What the stores and journals promise already (one writer, writes in doubt cannot land behind a restart, a batch is replayed) is assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from kvemb.schema.move_plan import ABORTING, CLEANING, FLIPPED, MOVING, NODES
from paramserver.scaling.move_phases import RENEW_MARKERS
from tests.models.carried import NONE, OVER, Plan, carried, maps_of, taken_back

OLD, NEW = 0, 1  # the nodes: where the slot was, where it goes to
PLAN = Plan(NODES, 2)


class Shard(NamedTuple):
    """One shard.

    Args:
        targets: the nodes that it writes the row to: (OLD,), (OLD, NEW) or (NEW,).
        version: of the last batch in its journal.
        pending: targets of that batch that were not written yet.
        confirmed: of the last batch that every target has.
        copied: whether it has copied its row since it began to write to both.
        restored: nodes in repair whose row it has rewritten.
        reported: the phase that its report names, "" after a new start: a report names the owner's epoch.
        seen: the phase of the map that it follows: its writes into a marker, at a repair, are of that map.
        crashes: how often it may still die.
    """

    targets: tuple[int, ...] = (OLD,)
    version: int = 1
    pending: frozenset[int] = frozenset()
    confirmed: int = 1
    copied: bool = False
    restored: frozenset[int] = frozenset()
    reported: str = ""
    seen: str = NONE
    crashes: int = 0


class Read(NamedTuple):
    """A trainer's read under way: the node that its map names, the repairs of it that the marker is to name, what was confirmed when it
    began, and the version that it was given, if any."""

    node: int
    repairs: int
    least: int
    got: int | None = None


@dataclass(frozen=True)
class State:
    """Everything that processes, nodes and connections hold.

    Args:
        phase: of the plan, one value changed by compare-and-swap. FLIPPED and later: the map names NEW.
        rows: by node, the version of each shard's row there; 0: it is not there.
        markers: by node the map that it names, OLD or NEW; None: the node has lost it.
        repairs: by node how often it was repaired, which its marker says too (the nonce).
        shards: both.
        read: the trainer's.
        seen: the newest version that the trainer was given, 0 once it is confirmed, and the node by whose map: it takes no older map then.
            No later read is older, unless a node is lost in the middle of the move: then only what is confirmed is sure.
        losses: how often a node may still lose everything.
        batches: how many more pushes may come.
    """

    phase: str = NONE
    rows: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (0, 0))
    markers: tuple[int | None, int | None] = (OLD, OLD)
    repairs: tuple[int, int] = (0, 0)
    shards: tuple[Shard, Shard] = (Shard(), Shard())
    read: Read | None = None
    seen: tuple[int, int] = (0, OLD)
    losses: int = 0
    batches: int = 0

    @property
    def home(self) -> int:
        """The node that the map in force names."""
        return home_of(self.phase)


@cache
def home_of(phase: str) -> int:
    """The node that the map of a phase names."""
    return int(maps_of(PLAN)[phase].slot_nodes[0])


class WrongReadError(AssertionError):
    """A read was accepted that is older than a version confirmed before it began, or given by one that had ended."""


def steps(state: State) -> Iterator[tuple[str, State]]:
    """Yield every step that a process can take, with its name."""
    yield from _plan_steps(state)
    for number in (0, 1):
        for name, after in _shard_steps(state, number):
            confirmed = after.seen[0] <= after.shards[0].confirmed
            yield f"shard {number}: {name}", replace(after, seen=(0, after.seen[1])) if confirmed and after.seen[0] else after
    yield from _trainer_steps(state)
    yield from _node_steps(state)


def is_over(state: State) -> bool:
    """Whether the plan came to its end, and nothing is under way."""
    settled = all(not shard.pending and shard.targets == (state.home,) for shard in state.shards)
    return state.phase in OVER and settled and state.read is None and None not in state.markers


def require_sound(state: State) -> None:
    """Refuse a state in which a row would be lost to readers: where the map says it is, and the marker vouches for it."""
    if state.markers[state.home] == (NEW if state.home == NEW else OLD):
        for number, shard in enumerate(state.shards):
            assert state.rows[state.home][number] >= shard.confirmed, f"row of shard {number} is behind what was confirmed: {state}"


def _plan_steps(state: State) -> Iterator[tuple[str, State]]:
    """What shard 0's process does, by the product's own transitions."""
    if state.phase == NONE:
        yield "plan", replace(state, phase=MOVING)
    if back := taken_back(PLAN, state.phase):
        yield "abort", replace(state, phase=back)
    following = carried(PLAN, state.phase, frozenset(number for number, shard in enumerate(state.shards) if shard.reported == state.phase))
    if following is None:
        return
    if RENEW_MARKERS in following.first:
        for node in (OLD, NEW):
            if state.markers[node] == OLD:
                yield f"renew marker of node {node}", replace(state, markers=_put(state.markers, node, NEW))
    if RENEW_MARKERS not in following.first or state.markers == (NEW, NEW):
        yield following.phase, replace(state, phase=following.phase)


def _shard_steps(state: State, number: int) -> Iterator[tuple[str, State]]:
    shard = state.shards[number]
    if state.batches and not shard.pending and state.phase not in OVER:
        pushed = shard._replace(version=shard.version + 1, pending=frozenset(shard.targets))
        yield "batch", replace(_with(state, number, pushed), batches=state.batches - 1)
    for node in shard.pending:
        if node != writes_first(shard):
            continue  # the other one is written before
        left = shard.pending - {node}
        written = shard._replace(pending=left, confirmed=shard.confirmed if left else shard.version)
        if state.markers[node] is not None:  # a node in repair takes nothing but the repair's writes
            yield f"write to node {node}", _with(_stored(state, node, number, shard.version), number, written)
    if shard.seen != state.phase and _may_follow(shard, state.phase):
        # The map is followed at any moment, between the two writes of a row too: the writes of the new map are made then.
        wanted = _targets(state.phase)
        pending = frozenset(wanted) if shard.pending else frozenset[int]()
        copied = shard.copied and state.phase == FLIPPED
        yield (
            f"follow the map: {state.phase}",
            _with(state, number, shard._replace(seen=state.phase, targets=wanted, pending=pending, copied=copied)),
        )
    if not shard.pending:  # between two batches
        yield from _do_its_part(state, number)
    for node in shard.targets:
        if state.markers[node] is None and node not in shard.restored:  # the repair writes what the index says, pending batch included
            left = shard.pending - {node}
            restored = shard._replace(restored=shard.restored | {node}, pending=left, confirmed=shard.confirmed if left else shard.version)
            yield f"restore on node {node}", _with(_stored(state, node, number, shard.version), number, restored)
    if shard.crashes:
        # Start: the plan is read before anything is written; batches of the journal are written again; reports of the old epoch are void.
        targets = _targets(state.phase)
        again = Shard(targets, shard.version, frozenset(targets), shard.confirmed, seen=state.phase, crashes=shard.crashes - 1)
        yield "crash and start", _with(state, number, again)


def writes_first(shard: Shard) -> int:
    """The one of the nodes that a row is written to next: who has read the old node may read the new one next, and not the other way."""
    return max(shard.pending)


def _may_follow(shard: Shard, phase: str) -> bool:
    """A shard that erased its rows at one node when it followed the end of the plan does so as its part, between two batches."""
    return phase in (MOVING, FLIPPED, CLEANING, ABORTING) and shard.reported != phase


def _do_its_part(state: State, number: int) -> Iterator[tuple[str, State]]:
    shard, wanted = state.shards[number], _targets(state.phase)
    if shard.seen != state.phase:
        return
    if state.phase == MOVING and not shard.copied and state.markers[NEW] is not None:
        copied = shard._replace(copied=True)
        yield "copy", _with(_stored(state, NEW, number, shard.version), number, copied)
    if state.phase == MOVING and shard.copied and shard.reported != MOVING:
        yield "report copy", _with(state, number, shard._replace(reported=MOVING))
    if state.phase == FLIPPED and shard.reported != FLIPPED:
        yield "report that the flip is followed", _with(state, number, shard._replace(reported=FLIPPED))
    if state.phase in (CLEANING, ABORTING) and shard.reported != state.phase:
        (away,) = {OLD, NEW} - set(wanted)
        ended = shard._replace(targets=wanted, reported=state.phase, copied=False)
        yield f"erase on node {away}", _with(_stored(state, away, number, 0), number, ended)


def _trainer_steps(state: State) -> Iterator[tuple[str, State]]:
    read = state.read
    if read is None:
        for node in {OLD, state.home}:  # a map that was read before the flip may be used long after it
            if state.phase not in OVER and node >= state.seen[1]:
                calm = state.phase == NONE or state.repairs == (0, 0)
                least = max(state.shards[0].confirmed, state.seen[0] if calm else 0)
                yield f"read begins at node {node}", replace(state, read=Read(node, state.repairs[node], least))
    elif read.got is None:
        yield "row is read", replace(state, read=read._replace(got=state.rows[read.node][0]))
    elif state.markers[read.node] == read.node and state.repairs[read.node] == read.repairs:  # the marker names the trainer's map
        if read.got < read.least:
            raise WrongReadError(f"got version {read.got} where {read.least} was confirmed, or read before: {state}")
        yield "read ends", replace(state, read=None, seen=(read.got * (read.got > state.shards[0].confirmed), read.node))
    else:
        yield "read is given up: map and marker are looked at again", replace(state, read=None)


def _node_steps(state: State) -> Iterator[tuple[str, State]]:
    for node in (OLD, NEW):
        if state.markers[node] is None:
            if all(node in shard.restored for shard in state.shards if node in shard.targets):
                shards = tuple(shard._replace(restored=shard.restored - {node}) for shard in state.shards)
                repairs = tuple(n + (node == at) for at, n in enumerate(state.repairs))
                for names in {home_of(shard.seen) for shard in state.shards}:  # any shard may end it
                    markers = _put(state.markers, node, names)
                    yield f"repair of node {node} ends", replace(state, markers=markers, repairs=repairs, shards=shards)
        elif state.losses:
            emptied = tuple((0, 0) if node == at else rows for at, rows in enumerate(state.rows))
            shards = tuple(shard._replace(restored=shard.restored - {node}) for shard in state.shards)
            lost = replace(state, rows=emptied, markers=_put(state.markers, node, None), shards=shards, losses=state.losses - 1)
            yield f"node {node} loses everything", lost


@cache
def _targets(phase: str) -> tuple[int, ...]:
    """Where a shard writes that knows the phase, by the product's map of it."""
    now = maps_of(PLAN)[phase]
    both = {int(owners[0]) for owners in (now.slot_nodes, now.second_nodes) if owners is not None}
    return tuple(sorted(both))


def _with(state: State, number: int, shard: Shard) -> State:
    return replace(state, shards=(shard, state.shards[1]) if number == 0 else (state.shards[0], shard))


def _stored(state: State, node: int, number: int, version: int) -> State:
    rows = [list(one) for one in state.rows]
    rows[node][number] = version
    return replace(state, rows=((rows[0][0], rows[0][1]), (rows[1][0], rows[1][1])))


def _put(pair: tuple[int | None, int | None], at: int, value: int | None) -> tuple[int | None, int | None]:
    return (value, pair[1]) if at == OLD else (pair[0], value)
