"""Shards that join, leave and take other shares while training goes on: what is asked of shard 0. Rows stay where they are.

A shard that is to join runs already: `kvemb shard --shard N --listen ADDR` with the lowest number that the map does not have. What must
not live here: how slots are handed over (`paramserver.handover`), and printing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.client.resizing.slot_moves import MoveState, SlotMoves, state_of
from kvemb.client.shard_channel import ShardChannel
from kvemb.errors import InvalidInputError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.tls_files import TlsFiles
from kvemb.protocol.messages import DescribeReply, Empty
from kvemb.protocol.move_messages import MoveRequest
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slot_dealing import deal
from kvemb.schema.slots import runs_of

_ANSWER_S = 5.0  # of a shard that runs already
INDEX_BYTES = 16  # of a row, which the shard that takes it is told


@dataclass(frozen=True, eq=False)
class ShardMovePlan:
    """What a move would do; `ShardScaling.begin` does it.

    Args:
        map: that it was worked out from.
        slot_shards: uint16 [16384], who is to write each slot.
        join: addresses.
        leave: numbers.
        n_slots, n_rows: that move; of the rows `INDEX_BYTES` each go to another shard.
    """

    map: ClusterMap
    slot_shards: NDArray[np.uint16]
    join: tuple[str, ...]
    leave: tuple[int, ...]
    n_slots: int
    n_rows: int


class ShardScaling(SlotMoves):
    """The shards of a cluster, and who writes which slots. Thread-safe.

    Args: those of `SlotMoves`.
    """

    def addresses(self) -> dict[int, str]:
        """Address by number of the shards that there are."""
        self._servers.ask_map(Deadline.after(self._timeout_s))
        return {shard: channel.address for shard, channel in self._servers.channels.items()}

    def add(self, *addresses: str, weights: Mapping[str, float] | None = None) -> ShardMovePlan:
        """Work out a move by which shards join.

        Args:
            addresses: where they are, in the order of their numbers.
            weights: shares by address; 1 of those that it does not name.

        Raises:
            InvalidInputError: a shard of that address is there already, or does not have the next number; or a weight names none.
            ShardUnavailableError: it does not answer.
        """
        return self._plan(join=addresses, weights=weights)

    def remove(self, *addresses: str, weights: Mapping[str, float] | None = None) -> ShardMovePlan:
        """Work out a move by which shards leave: they have no rows when it is done, and may be stopped. Shard 0 stays."""
        return self._plan(leave=addresses, weights=weights)

    def rebalance(self, weights: Mapping[str, float] | None = None) -> ShardMovePlan:
        """Work out a move that gives every shard its share, by the bytes of the rows there are."""
        return self._plan(weights=weights)

    def begin(self, plan: ShardMovePlan) -> MoveState:
        """Begin a move; it goes on without this process.

        Raises:
            MoveRefusedError: another is under way.
            MapChangedError: the map has changed since it was worked out.
        """
        runs = runs_of(plan.slot_shards)
        request = MoveRequest(plan.map.version, b"", [], [], 0, runs, list(plan.join), list(plan.leave))
        return state_of(self._ask("MoveSlots", request))

    def _plan(self, *, join: Sequence[str] = (), leave: Sequence[str] = (), weights: Mapping[str, float] | None = None) -> ShardMovePlan:
        there, now, sizes = self.addresses(), self.state().map, self.sizes()
        named = f"which are {', '.join(f'{shard} ({address})' for shard, address in there.items())}"
        joining = dict(zip(now.free_shards(len(join)), join, strict=True))
        shards = {**there, **joining}
        for address in [*leave, *(weights or {})]:
            if address not in shards.values():
                raise InvalidInputError(f"shard {address}: is none of the cluster's, {named}")
        if len({*there.values(), *join}) < len(shards):
            raise InvalidInputError(f"shard {', '.join(join)}: is one of the cluster's already, {named}")
        if there[0] in leave:
            raise InvalidInputError(f"shard {there[0]}: is shard 0, which carries moves and stays")
        shares = {shard: (weights or {}).get(address, 1.0) for shard, address in shards.items() if address not in leave}
        if not any(share > 0 for share in shares.values()):
            raise InvalidInputError("no shard would be left that has slots; a cluster needs one")
        ours = self._servers.call(0, "Describe", Empty(), DescribeReply, Deadline.after(self._timeout_s))
        for number, address in joining.items():
            self._require_next(address, number, ours)
        owners = deal(now.slot_shards, sizes.record_bytes, shares)
        moving = owners != now.slot_shards
        leaving = tuple(shard for shard, address in there.items() if address in leave)
        return ShardMovePlan(now, owners, tuple(join), leaving, int(np.count_nonzero(moving)), int(sizes.rows[moving].sum()))

    def _require_next(self, address: str, number: int, ours: DescribeReply) -> None:
        """Refuse a server that is no shard of this cluster with the number that it is to have."""
        deadline, tls = Deadline.after(min(self._timeout_s, _ANSWER_S)), self._servers.tls
        channel = ShardChannel(number, address, None, None if tls is None else TlsFiles(tls, "parameter_servers.tls"))
        try:
            theirs = channel.call("Describe", Empty(), DescribeReply, deadline)
        except ShardUnavailableError as error:
            raise ShardUnavailableError(
                f"{error}. Nothing was changed. Start the shard there, and ask again: kvemb shard --config kvemb.yaml --shard {number} "
                f"--listen {address}"
            ) from error
        finally:
            channel.close()
        got, expected = ((one.shard, one.cluster, one.cluster_id.hex(), one.mode) for one in (theirs, ours))
        if got != (number, *expected[1:]):
            raise InvalidInputError(
                f"shard {address}: answers as (shard, cluster, cluster id, mode) {got}, expected {(number, *expected[1:])}. Start it with "
                f"--shard {number} and the kvemb.yaml of this cluster; nothing was changed."
            )
