"""Connections to the primaries of a Redis Cluster, its slot map, and small values wherever their slots are.

Two pools: one leads to primaries that are known to be whole, for rows; the other to primaries in any state, for markers, small values and
repair. Both name themselves on the server and look for a newer owner of the shard before anything else.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.markers import Identity
from kvemb.coordination.replicated_values import DamagedCopyError
from kvemb.coordination.shard_owners import newest_owner, owner_name, require_not_fenced
from kvemb.errors import NodeSuspectError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import Doubts, LinkPool
from kvemb.schema.keys import N_SLOTS, RowKeys, text_slot
from kvemb.stores.node_batch import NodeSteps, server_error, unexpected_value
from kvemb.stores.read_retry import retries, retry_read
from kvemb.stores.redirects import REDIRECTS, redirect_target
from kvemb.stores.redis_cluster.cluster_members import MEMBERS, decode_members, process_of
from kvemb.stores.redis_cluster.slot_map import SlotMap, fetch_slot_map
from kvemb.stores.redis_server import compare_and_set, redis_admin
from kvemb.stores.store import Store
from kvemb.wire.replies import BlobReply, CodeReply, LineReply, Step, UnexpectedValueError
from kvemb.wire.resp.resp_codec import RespCodec, command

log = logging.getLogger("kvemb")
_PAUSE_S = 0.02  # between rounds while the cluster says "not now"


class ClusterLinks(Store):
    """What is not about rows or markers."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        self.config = config
        self.role = role
        self._codec = RespCodec(multi_get=False)
        self._asking_codec = RespCodec(multi_get=False, asking=True)
        doubts = Doubts()
        self._pool = LinkPool(self._checked_link, self._dropped, doubts)
        self._plain_pool = LinkPool(self._plain_link, self._dropped, doubts)  # to primaries in any state
        self._in_doubt: dict[str, set[redis_admin.ConnectionId]] = {}
        self._own: set[redis_admin.ConnectionId] = set()
        self._map: SlotMap | None = None
        self._answered: tuple[str, ...] = ()  # the node that told the map last: one that hangs is not asked first again and again
        self._on_the_way: set[int] = set()  # slots whose marker was found to be moving
        self._numbers: dict[str, int] = {}  # of addresses, for `_vouched`
        self._next_number = itertools.count()
        self._vouched = np.full(N_SLOTS, -1, dtype=np.int64)  # the primary where each slot's marker was seen: slots may move without keys
        self._origin: Identity | None = None
        self._repairs: dict[int, str] = {}  # the nonces in the markers of slots that were repaired
        self._changed: set[str] = set()  # primaries whose markers were found to be renewed
        self._whole: frozenset[str] = frozenset()
        self._owner: tuple[int, int, bytes] | None = None
        self._still_ours: Callable[[], None] | None = None
        self._waits = retries(role, config.on_lost_node)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.config.nodes if self._map is None else self._map.addresses

    def close(self) -> None:
        self._pool.close()
        self._plain_pool.close()

    # --- who may write ----------------------------------------------------------------------------------------------------------

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._owner, self._still_ours = (shard, epoch, b""), still_ours
        copies = self.get_meta(owner_name(shard), deadline)
        require_not_fenced(copies, shard, epoch)
        owner = newest_owner(copies, shard)
        self._owner = (shard, epoch, owner.encode() if owner is not None and owner.epoch == epoch else b"")

    def kill_other_writers(self, deadline: Deadline) -> int:
        own = frozenset(self._own)
        self._refresh(deadline)
        return sum(redis_admin.kill_writers(address, self.config, self.role, own, deadline) for address in self.addresses)

    def _plain_link(self, address: str, deadline: Deadline) -> Link:
        """A connection to a primary in any state, as long as no newer owner of our shard stands in the cluster."""
        link = redis_admin.open_link(address, self.config, self.role, self._in_doubt.setdefault(address, set()), deadline)
        try:
            self._own.add((link.run_id, link.connection_id))
            if self._owner is not None:
                shard = self._owner[0]
                copy = compare_and_set.get_following(address, self.config, owner_name(shard).encode(), deadline)
                self._require_ours(copy)
        except BaseException:
            link.close()
            raise
        return link

    def _require_ours(self, copy: bytes | None) -> None:
        """Refuse to go on once another process owns the shard; the cluster has one copy of who does, and it may be damaged.

        Raises:
            FencedError: another process does.
            DamagedCopyError: the copy is damaged, and nothing else says that the shard is ours.
        """
        assert self._owner is not None
        shard, epoch, record = self._owner
        if copy == record:
            return
        require_not_fenced([copy], shard, epoch)
        try:
            newest_owner([copy], shard, self.copies_on(owner_name(shard)))
        except DamagedCopyError:
            if self._still_ours is None:
                raise
        if self._still_ours is not None:
            self._still_ours()

    def _dropped(self, link: Link) -> None:
        self._in_doubt.setdefault(link.address, set()).add((link.run_id, link.connection_id))
        self._own.discard((link.run_id, link.connection_id))

    # --- who holds which rows ---------------------------------------------------------------------------------------------------

    def _checked_link(self, address: str, deadline: Deadline) -> Link:
        """A new connection may lead to a primary that was a replica a moment ago, or was restarted: is it known to be whole?"""
        link = self._plain_link(address, deadline)
        try:
            if self._origin is not None:
                fields = redis_admin.info(address, self.config, deadline)
                if fields["run_id"] != link.run_id:
                    raise NodeUnavailableError(f"node {address}: was started again while a connection was made. Try again.")
                redis_admin.require_safe(address, fields, self.config)
                self._require_whole(address, fields, deadline)
        except BaseException:
            link.close()
            raise
        return link

    def _require_whole(self, address: str, fields: Mapping[str, Any], deadline: Deadline) -> None:
        """Refuse a primary that is not known to hold all of its rows. A replica holds none: it answers MOVED."""
        process = process_of(fields)
        if fields.get("role") != "master" or process in self._whole:
            return
        self._whole |= self._members(deadline)
        if process not in self._whole:
            raise NodeSuspectError(
                f"node {address}: this server process has not held these rows before: it was restarted, or was a replica that may have "
                "lagged behind. Its rows may be old until the parameter servers have compared them."
            )

    def _members(self, deadline: Deadline) -> frozenset[str]:
        (data,) = self.get_meta(MEMBERS, deadline)
        return decode_members(data)

    def _slot_map(self, deadline: Deadline) -> SlotMap:
        if self._map is None:
            self._refresh(deadline)
        assert self._map is not None
        return self._map

    def _refreshed(self, deadline: Deadline) -> SlotMap:
        self._refresh(deadline)
        return self._slot_map(deadline)

    def _refresh(self, deadline: Deadline) -> None:
        before = self._map
        asked = dict.fromkeys([*self._answered, *self.addresses, *self.config.nodes])
        after = fetch_slot_map(asked, self.config, deadline)
        self._vouched[self._vouched != self._owners(after)] = -1
        self._map = after
        self._answered = (after.source,)
        self._on_the_way = {slot for slot in self._on_the_way if before and before.address_of(slot) == after.address_of(slot)}

    def _number(self, address: str) -> int:
        return self._numbers.setdefault(address, next(self._next_number))  # unique even when two threads come at once

    def _owners(self, slot_map: SlotMap) -> NDArray[np.int64]:
        owners: NDArray[np.int64] = np.array([self._number(address) for address in slot_map.addresses], dtype=np.int64)[slot_map.nodes]
        return owners

    def node_of(self, keys: RowKeys) -> str:
        return "?" if self._map is None else self._map.address_of(int(keys.slots()[0]))

    def _slots_of(self, address: str) -> NDArray[np.bool_]:
        if self._map is None or address not in self._map.addresses:
            return np.zeros(N_SLOTS, dtype=bool)
        mine: NDArray[np.bool_] = self._map.nodes == self._map.addresses.index(address)
        return mine

    def _exchange(
        self, by_node: dict[str, list[Step]], plans: list[NodeSteps], deadline: Deadline, pool: LinkPool, run_id: str | None = None
    ) -> None:
        with pool.lease(by_node, deadline) as links:
            for link in links.values():
                if run_id is not None and link.address in by_node and link.run_id != run_id:
                    raise NodeSuspectError(f"node {link.address}: the server was started again while it was being repaired; begin again")
            try:
                run([Conversation(links[address], steps) for address, steps in by_node.items()], deadline)
            except UnexpectedValueError as error:
                raise unexpected_value(plans, error) from error

    # --- small values -----------------------------------------------------------------------------------------------------------

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        def get() -> BlobReply | CodeReply:
            return self._meta(name, lambda: self._codec.get_step(name.encode()), deadline)

        reply = retry_read(get, deadline) if self._waits else get()
        assert isinstance(reply, BlobReply)
        return [reply.value]

    def copies_on(self, name: str) -> tuple[str, ...]:
        return ("the cluster" if self._map is None else f"node {self._map.address_of(text_slot(name.encode()))}",)

    def mend_copies(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        if damaged[0] and self._swap_meta(name, copies[0], value, deadline):
            log.error("%s: the value under the key %s was damaged and has been put right", self.copies_on(name)[0], name)

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._meta(name, lambda: self._codec.put_step(name.encode(), value), deadline)

    def _drop_meta(self, name: str, deadline: Deadline) -> None:
        def drop() -> tuple[Step, CodeReply]:
            reply = CodeReply((b":1\r\n", b":0\r\n"), np.zeros(1, dtype=np.uint8))
            return Step(memoryview(command(b"DEL", name.encode())), reply), reply

        self._meta(name, drop, deadline)

    def _meta(self, name: str, make: Callable[[], tuple[Step, BlobReply | CodeReply]], deadline: Deadline) -> BlobReply | CodeReply:
        """Run one command at the primary that holds a small value, wherever it goes."""
        asking: str | None = None
        while True:
            step, reply = make()
            asking, done = self._single(name.encode(), step, reply, asking, deadline)
            if done:
                return reply

    def _swap_meta(self, name: str, old: bytes | None, new: bytes, deadline: Deadline) -> bool:
        slot_map = self._refreshed(deadline)
        address = slot_map.address_of(text_slot(name.encode()))
        run_id = str(redis_admin.info(address, self.config, deadline)["run_id"])
        return compare_and_set.swap(address, self.config, [(name.encode(), old, new)], run_id, deadline)[0]

    def _single(
        self, key: bytes, step: Step, reply: BlobReply | CodeReply, asking: str | None, deadline: Deadline
    ) -> tuple[str | None, bool]:
        """Run one command at its slot's node, or at the importing node; return the importing node to ask next, and whether it is done."""
        address = asking or self._slot_map(deadline).address_of(text_slot(key))
        steps = [Step(memoryview(command(b"ASKING")), LineReply()), step] if asking else [step]
        self._exchange({address: steps}, [], deadline, self._plain_pool)
        line = reply.error if isinstance(reply, BlobReply) else reply.errors[0][1] if reply.errors else None
        if line is not None and line.startswith(b"-ASK ") and not deadline.expired:
            return redirect_target(line, address), False
        return None, not self._try_again(line, deadline)

    def _try_again(self, line: bytes | None, deadline: Deadline) -> bool:
        """Whether a single command was redirected or refused for now; the map has been asked for anew then."""
        if line is None:
            return False
        if not line.startswith(REDIRECTS) or deadline.expired:
            raise server_error("of the cluster", line)
        time.sleep(min(_PAUSE_S, deadline.remaining_s()))
        self._refresh(deadline)
        return True
