"""Moves slots from a node to another by the cluster's own commands; nothing is lost when a party dies on the way.

While a slot stands open, its source answers for keys that it has and sends clients to its target for the others. Two keys show afterwards
that nothing was lost meanwhile:

    the slot's marker   travels first. A target that loses its keys loses it too: the shards compare the slot's rows.
    a witness           a key that the source is given before, and that travels last. If it is gone, the source has lost keys on the way:
                        the marker is deleted, and the shards compare the slot's rows.
"""

import re
import time
from collections.abc import Sequence
from functools import cache

import numpy as np

from kvemb.errors import DeadlineExceededError, NodeFullError, NodeLostError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.slots import slot_tags
from kvemb.stores.redis_cluster.scaling.admin_links import AdminLinks, keys_in
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterNode, OpenSlot
from kvemb.stores.redis_cluster.scaling.key_migration import KeyMigration, MigrationPace
from kvemb.stores.redis_cluster.slot_map import marker_keys
from kvemb.stores.redis_server.redis_commands import Word
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.server_errors import server_error
from kvemb.wire.resp.resp_value import ErrorLine, Value

_KEYS_AT_ONCE = 64
_PAUSE_S = 0.01


def witness_key(slot: int) -> bytes:
    """The key whose presence says that a slot's source has lost nothing."""
    return _witness_keys()[slot]


@cache
def _witness_keys() -> list[bytes]:
    return [b"kvemb:moving:{" + tag + b"}" for tag in slot_tags()]


class RedisSlotMover:
    """Moves slots, one after the other."""

    def __init__(self, links: AdminLinks, access: RedisAccess, pace: MigrationPace) -> None:
        self._links, self._timeout_s = links, access.config.timeout_s
        self._migration = KeyMigration(links, access, pace)
        self._silent: set[str] = set()  # nodes that need not hear of it, and did not answer

    # --- whole moves ------------------------------------------------------------------------------------------------------------

    def move(
        self,
        slots: Sequence[int],
        source: ClusterNode,
        target: ClusterNode,
        everybody: Sequence[ClusterNode],
        state: OpenSlot | None = None,
    ) -> None:
        """Move slots.

        Raises:
            NodeLostError: the source has lost a slot's keys; nothing was moved.
        """
        self._await_epoch(source, target)
        if state is None or not state.leaving:
            self._open(slots, source, target, stale=state is not None)
        else:
            self._migration.end_late(target)
            self._do_all(target, slots, "IMPORTING", source.name)
        try:
            self._carry(slots, source, target)
        except (NodeFullError, ProtocolError):
            for slot in slots:
                self.close_unused(slot, source, target)
            raise
        arrived = self._links.run(target.address, _asking([("EXISTS", witness_key(slot)) for slot in slots]), self._timeout_s)[1::2]
        if robbed := [("DEL", marker_keys()[slot]) for slot, there in zip(slots, arrived, strict=True) if there != 1]:
            self._links.run(target.address, _asking(robbed), self._timeout_s)
        self.settle(slots, target, [source, *everybody])

    def settle(self, slots: Sequence[int], owner: ClusterNode, others: Sequence[ClusterNode]) -> None:
        """Tell the owner of slots that it is their owner, then the other nodes. All keys are there."""
        self._do_all(owner, slots, "NODE", owner.name)
        told = {
            node.name: node for node in others if node.name != owner.name
        }  # each once: a node that gave its last slot away may be a replica now
        for index, node in enumerate(told.values()):
            if node.address in self._silent:
                continue
            try:
                self._do_all(node, slots, "NODE", owner.name)
            except (NodeUnavailableError, DeadlineExceededError):
                if index == 0:
                    raise
                self._silent.add(node.address)  # it learns it from the others

    def claim(self, slots: Sequence[int], owner: ClusterNode, others: Sequence[ClusterNode]) -> None:
        """Let a node have the slots of one that is dead, without their keys and markers.

        Its claim is made later than the dead one's first: told of an older one by another node it would give the slots back, follow the
        dead node as its replica, and take no slots any more.
        """
        for other in others:
            if other.name != owner.name:
                self._await_epoch(other, owner, "cluster_current_epoch")
        self._do(owner, "CLUSTER", "BUMPEPOCH")
        self._do_all(owner, slots, "NODE", owner.name)
        self.settle(slots, owner, others)

    def close_unused(self, slot: int, source: ClusterNode, target: ClusterNode) -> bool:
        """Close an open slot of which the target holds no key: its source serves it alone, as before. Return False where it holds one.

        A target's keys cannot be sent back: while a slot stands open, its source takes no key that it does not have, and closed, it would
        call rows missing that the target has. Such a slot is moved to its end, and then back.
        """
        self._do(target, "CLUSTER", "SETSLOT", slot, "STABLE")  # from now on no client can put a key there
        if self._do(target, "CLUSTER", "COUNTKEYSINSLOT", slot):
            self._do(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source.name)
            return False
        self._do(source, "CLUSTER", "SETSLOT", slot, "STABLE")
        return True

    def give_up(self, slots: Sequence[int], source: ClusterNode) -> None:
        """Close open slots whose target is dead, with all keys that it had got.

        Which rows are gone is not known, so the source vouches for none: all of its markers are deleted first. The shards compare every
        row there with what they know and bring back those missing; no client reads meanwhile.
        """
        mine = np.flatnonzero(source.slots).tolist()
        self._links.run(source.address, [("DEL", marker_keys()[other]) for other in mine], self._timeout_s)
        self._do_all(source, slots, "STABLE")

    def drop_witnesses(self, slots: Sequence[int], owner: ClusterNode) -> None:
        """Delete the witnesses of `move` in slots that are not on their way any more."""
        if slots:
            self._links.run(owner.address, [("DEL", witness_key(slot)) for slot in slots], self._timeout_s)

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _await_epoch(self, source: ClusterNode, target: ClusterNode, claim_of: str = "cluster_my_epoch") -> None:
        """Wait until the target has heard of the source's claim to its slots: its own is to be later.

        A slot that goes there and back within milliseconds is otherwise claimed by both, each sending clients to the other for good.
        """
        deadline = Deadline.after(self._timeout_s)
        claim = _epoch(source, self._do(source, "CLUSTER", "INFO"), claim_of)
        while _epoch(target, self._do(target, "CLUSTER", "INFO"), "cluster_current_epoch") < claim:
            if deadline.expired:
                raise DeadlineExceededError(
                    f"node {target.address}: has not heard of what node {source.address} says on the cluster's bus for "
                    f"{deadline.timeout_s:g} s. Are the ports of their bus open between them? Nothing was begun there."
                )
            time.sleep(_PAUSE_S)

    def _open(self, slots: Sequence[int], source: ClusterNode, target: ClusterNode, *, stale: bool) -> None:
        if stale:  # no client was sent to the target: its keys are of a source that has failed over since
            for slot in slots:
                self._forget_keys(slot, target)
        looks = [words for slot in slots for words in (("EXISTS", marker_keys()[slot]), ("SET", witness_key(slot), b"1"))]
        found = self._links.run(source.address, looks, self._timeout_s)
        for answer in found:
            if isinstance(answer, ErrorLine):
                raise server_error(source.address, answer.line)
        if lost := [slot for slot, there in zip(slots, found[::2], strict=True) if there != 1]:
            self._links.run(source.address, [("DEL", witness_key(slot)) for slot in slots], self._timeout_s)
            raise NodeLostError(
                f"node {source.address}: slot {lost[0]} has no marker: the node has lost rows. Nothing of it was moved. The shards bring "
                "the rows back by themselves (`kvemb status`); then `kvemb moves resume`."
            )
        self._do_all(target, slots, "IMPORTING", source.name)
        self._do_all(source, slots, "MIGRATING", target.name)

    def _carry(self, slots: Sequence[int], source: ClusterNode, target: ClusterNode) -> None:
        """Move all keys, of each slot the marker first and the witness last."""
        left, first = list(slots), True
        while left:
            listed = self._links.run(source.address, [("CLUSTER", "GETKEYSINSLOT", slot, _KEYS_AT_ONCE) for slot in left], self._timeout_s)
            runs: list[list[bytes]] = []
            for slot, answer in zip(left, listed, strict=True):
                keys, ends = keys_in(source.address, answer), (marker_keys()[slot], witness_key(slot))
                rows = [key for key in keys if key not in ends]
                last = len(keys) < _KEYS_AT_ONCE
                runs.append([*([ends[0]] if first else []), *rows, *([ends[1]] if last else [])])
            left = [slot for slot, keys in zip(left, runs, strict=True) if keys[-1] != witness_key(slot)]
            self._migration.run(runs, source, target)
            first = False

    def _forget_keys(self, slot: int, target: ClusterNode) -> None:
        """Delete a target's keys of a slot; no client is sent there for it."""
        while keys := self._keys(slot, target):
            for answer in self._links.run(target.address, _asking([("DEL", key) for key in keys]), self._timeout_s):
                if isinstance(answer, ErrorLine):
                    raise server_error(target.address, answer.line)

    def _keys(self, slot: int, node: ClusterNode) -> list[bytes]:
        return keys_in(node.address, self._do(node, "CLUSTER", "GETKEYSINSLOT", slot, _KEYS_AT_ONCE))

    def _do_all(self, node: ClusterNode, slots: Sequence[int], *words: Word) -> None:
        """CLUSTER SETSLOT of several slots at once: a server writes its file of nodes once for all of them."""
        for answer in self._links.run(node.address, [("CLUSTER", "SETSLOT", slot, *words) for slot in slots], self._timeout_s):
            if isinstance(answer, ErrorLine):
                raise server_error(node.address, answer.line)

    def _do(self, node: ClusterNode, *words: Word) -> Value:
        return self._links.ask(node.address, *words)


def _epoch(node: ClusterNode, answer: Value, name: str) -> int:
    found = re.search(rb"\b%s:(\d{1,19})\b" % name.encode(), answer) if isinstance(answer, bytes) else None
    if found is None:
        raise ProtocolError(f"node {node.address}: CLUSTER INFO without {name}; is this a Redis or Valkey server?")
    return int(found[1])


def _asking(commands: Sequence[Sequence[Word]]) -> list[Sequence[Word]]:
    """The same commands, each allowed at the target of an open slot: every second answer is theirs."""
    return [words for command in commands for words in (("ASKING",), command)]
