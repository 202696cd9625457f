"""Faults of operators: storage nodes added, removed, exchanged, replaced when dead, rebalanced. Each begins a move and leaves it going on
beside the faults that follow; servers that no map names any more are ended by a later one.

What must not live here: what a move does (the product's), and whether it came to its end (`__main__`).
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from chaos import processes
from chaos.cluster import FaultyCluster
from kvemb.client.all_shards import AllShards
from kvemb.config import load
from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline
from kvemb.scaling.slot_moves import MoveState, NodeMoves, SlotMoves
from kvemb.schema.slot_dealing import SlotPlan

MOVE_KINDS = ("valkey", "redis", "memcached")
_ASK_S = 20.0
_ANSWER_S = 60.0  # of a cluster in which something else has just been broken
_FEWEST, _MOST = 2, 5
_MB_PER_S = (0.0, 0.05, 0.5)  # a ledger has a megabyte or so: a move takes as long as a few other faults
M = TypeVar("M", bound=SlotMoves)


class Operator:
    """Asks for moves, one at a time.

    Args:
        cluster: under a map of ours.
        chance: of what is chosen.
    """

    def __init__(self, cluster: FaultyCluster, chance: random.Random) -> None:
        self._cluster, self._random = cluster, chance

    def add(self) -> None:
        """One or two empty nodes join."""

        def plan(nodes: NodeMoves, state: MoveState) -> SlotPlan | None:
            n = min(self._random.choice((1, 1, 2)), _MOST - len(state.nodes))
            return nodes.add(*[self._cluster.add_node() for _ in range(n)]) if n > 0 else None

        self._move(plan)

    def remove(self) -> None:
        """A node leaves."""

        def plan(nodes: NodeMoves, state: MoveState) -> SlotPlan | None:
            return nodes.remove(self._one_of(state)) if len(state.nodes) > _FEWEST else None

        self._move(plan)

    def exchange(self) -> None:
        """A node gives all that it has to a new one."""
        self._move(lambda nodes, state: nodes.exchange(self._one_of(state), self._cluster.add_node()))

    def rebalance(self) -> None:
        """Nodes get other shares."""

        def plan(nodes: NodeMoves, state: MoveState) -> SlotPlan | None:
            return nodes.rebalance({address: self._random.choice((0.5, 1.0, 2.0)) for address in state.nodes.values()})

        self._move(plan)

    def replace_dead(self) -> None:
        """A node dies for good, and an empty one takes its place."""
        state = self.state()
        self._tidy(state)
        if state.map.plan is not None:
            return
        dead, new = self._one_of(state), self._cluster.add_node()
        processes.kill(self._cluster.servers[self._cluster.node_at(dead)].process)
        self._ask(NodeMoves, lambda nodes: nodes.replace_dead(dead, new))
        if dead in self.state().nodes.values():  # it was not asked for in vain only if something else was in the way
            self._cluster.restart_nodes(self._cluster.node_at(dead))
        self._tidy(self.state())

    def abort(self) -> None:
        """Take back the move under way, if it can be."""
        self._ask(SlotMoves, lambda moves: moves.abort("chaos"))

    def state(self) -> MoveState:
        """Ask until there is an answer."""
        deadline = Deadline.after(_ANSWER_S)
        while True:
            try:
                with self._asking(SlotMoves) as moves:
                    return moves.state()
            except KvembError:
                if deadline.expired:
                    raise

    def wait(self, timeout_s: float) -> str:
        """Wait until nothing moves; return "", or the move that is stuck: it has not gone on for so long."""
        deadline, before = Deadline.after(timeout_s), ("", 0, 0, 0)
        while (state := self.state()).map.plan is not None:
            if (now := (state.phase, state.map.version, state.rows, state.n_rows)) != before:
                deadline, before = Deadline.after(timeout_s), now
            if deadline.expired:
                told = f"map version {state.map.version}, {state.rows} of {state.n_rows} rows, silent {state.silent}, {state.troubles}"
                return f"a move is stuck in phase {state.phase}: {told}"
        return ""

    def _move(self, plan: Callable[[NodeMoves, MoveState], SlotPlan | None]) -> None:
        def begin(nodes: NodeMoves, state: MoveState) -> None:
            planned = plan(nodes, state)
            if planned is not None:
                nodes.begin(planned, max_mb_per_s=self._random.choice(_MB_PER_S))

        self._when_quiet(NodeMoves, begin)

    def _when_quiet(self, kind: type[M], begin: Callable[[M, MoveState], None]) -> None:
        """Begin something if nothing moves; a move under way is aborted, at times."""
        state = self.state()
        self._tidy(state)
        if state.map.plan is None:
            self._ask(kind, lambda moves: begin(moves, state))
        elif self._random.random() < 0.5:
            self.abort()

    def _ask(self, kind: type[M], what: Callable[[M], object]) -> None:
        """Ask once: a request that is refused, or fails because of another fault, must not leave anything half done either."""
        try:
            with self._asking(kind) as moves:
                what(moves)
        except KvembError as error:
            print(f"          asked in vain: {type(error).__name__}: {str(error)[:300]}", flush=True)

    @contextmanager
    def _asking(self, kind: type[M]) -> Iterator[M]:
        """A request needs the shards alone: a storage node may be dead."""
        servers = AllShards.of(load(self._cluster.config_path, os.environ).servers)
        try:
            yield kind(servers, timeout_s=_ASK_S)
        finally:
            servers.close()

    def _one_of(self, state: MoveState) -> str:
        return self._random.choice(list(state.nodes.values()))

    def _tidy(self, state: MoveState) -> None:
        """End the servers that are none of the cluster's any more; at times have kvemb.yaml say the present truth."""
        if state.map.plan is not None:
            return
        present = set(state.nodes.values())
        for address in [proxy.address for proxy in self._cluster.node_proxies if proxy.address not in present]:
            self._cluster.drop_node(address)
        if self._random.random() < 0.5 or not present & set(self._cluster.named):
            self._cluster.write_config(sorted(present))
