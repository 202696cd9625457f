"""Faults of operators: shards added, removed, rebalanced, beside those of nodes. A shard joins as a process that was started before and
waits; one that has left, or was to join in a move that was taken back, is ended by a later fault, its data folder deleted.

What must not live here: what a move does (the product's), and whether it came to its end (`__main__`).
"""

from collections.abc import Callable

import numpy as np

from chaos.node_moves import MOVE_KINDS, Operator
from kvemb.scaling.slot_moves import MoveState, ShardScaling
from kvemb.schema.slot_dealing import SlotPlan

_FEWEST, _MOST = 1, 4
_SHARES = (0.0, 0.0, 1.0, 2.0)


class ShardOperator(Operator):
    """Asks for moves of nodes and of shards, one at a time; on a Redis Cluster of shards only."""

    def add_shards(self) -> None:
        """One or two shards join."""

        def plan(shards: ShardScaling, state: MoveState) -> SlotPlan | None:
            n = min(self._random.choice((1, 1, 2)), _MOST - len(state.map.shard_numbers))
            return shards.add(*map(self._waiting, state.map.free_shards(n))) if n > 0 else None

        self._move_shards(plan)

    def remove_shard(self) -> None:
        """A shard leaves; it is never shard 0."""

        def plan(shards: ShardScaling, state: MoveState) -> SlotPlan | None:
            there = state.map.shard_numbers
            return shards.remove(self._address(self._random.choice(there[1:]))) if len(there) > _FEWEST else None

        self._move_shards(plan)

    def rebalance_shards(self) -> None:
        """Shards get other shares; some none."""

        def plan(shards: ShardScaling, state: MoveState) -> SlotPlan | None:
            return shards.rebalance({self._address(shard): self._random.choice(_SHARES) for shard in state.map.shard_numbers})

        self._move_shards(plan)

    def empty_shard(self) -> None:
        """A shard keeps no slots, and stays; where one has none, all have the same share again."""

        def plan(shards: ShardScaling, state: MoveState) -> SlotPlan | None:
            there = state.map.shard_numbers
            all_write = len(there) == len(state.map.writing_shards)
            return shards.rebalance({self._address(self._random.choice(there)): 0.0} if all_write else {})

        self._move_shards(plan)

    def state(self) -> MoveState:
        """The same; the ledger is told the writers of each slot so far."""
        state, known = super().state(), self._cluster.slot_shards
        if not any(np.array_equal(state.map.slot_shards, one) for one in known):
            known.append(state.map.slot_shards)
        return state

    def _move_shards(self, plan: Callable[[ShardScaling, MoveState], SlotPlan | None]) -> None:
        def begin(shards: ShardScaling, state: MoveState) -> None:
            planned = plan(shards, state)
            if planned is not None and (planned.n_slots or planned.join or planned.leave):
                print(f"          {planned.n_slots} slots to other shards; join {len(planned.join)}, leave {planned.leave}", flush=True)
                shards.begin(planned)

        self._when_quiet(ShardScaling, begin)

    def _waiting(self, number: int) -> str:
        """A process that waits to be taken in under that number: one that was asked for in vain before, or a new one."""
        if number == len(self._cluster.shards) or number not in self._cluster.shard_numbers:
            self._cluster.add_shard(number)
        elif self._cluster.shards[number].poll() is not None:  # it did not start: whatever else was broken then is not any more
            self._cluster.start_shard(number)
        return self._address(number)

    def _address(self, shard: int) -> str:
        return self._cluster.shard_proxies[shard].address

    def _tidy(self, state: MoveState) -> None:
        """The same of shards."""
        if self._cluster.store in MOVE_KINDS:
            super()._tidy(state)
        if state.map.plan is not None:
            return
        present = state.map.shard_numbers
        for shard in [shard for shard in self._cluster.shard_numbers if shard < state.map.n_shards and shard not in present]:
            self._cluster.drop_shard(shard)
        if self._random.random() < 0.5:
            self._cluster.write_config(shards=[self._address(shard) for shard in present])
