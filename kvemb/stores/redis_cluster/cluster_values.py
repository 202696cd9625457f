"""Small values of a Redis Cluster: one copy of each, read and written wherever its slot is."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvemb.coordination.replicated_values import Change, ValueCell
from kvemb.errors import DeadlineExceededError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.pool import LinkPool
from kvemb.schema.slots import text_slot
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_cluster.primary_links import exchange
from kvemb.stores.redis_cluster.slot_map import ClusterTopology
from kvemb.stores.redis_server import compare_and_set
from kvemb.stores.redis_server.redis_commands import REDIRECTS, redirect_target
from kvemb.stores.server_errors import server_error
from kvemb.stores.store import StoreValues
from kvemb.wire.replies import BlobReply, CodeReply, LineReply, Step
from kvemb.wire.resp.resp_codec import RespCodec, command

_PAUSE_S = 0.02  # between tries while the cluster says "not now"


class ClusterValues(StoreValues):
    """The facet `values` of a cluster that moves its own slots, one copy of each; methods without a docstring: see `StoreValues`."""

    def __init__(self, topology: ClusterTopology, pool: LinkPool, retry: ReadRetry) -> None:
        self._topology, self._pool, self._retry = topology, pool, retry
        self._codec = RespCodec()

    def get(self, name: str, deadline: Deadline) -> list[bytes | None]:
        return [self.one(name, deadline)]

    def one(self, name: str, deadline: Deadline) -> bytes | None:
        """Read the one copy; None where there is none."""
        return self._retry(lambda: self.look(name, deadline), deadline)

    def look(self, name: str, deadline: Deadline) -> bytes | None:
        """The same, without waiting for a primary that is down."""
        reply = self._run(name, lambda: self._codec.get_step(name.encode()), deadline)
        assert isinstance(reply, BlobReply)
        return reply.value

    def put(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._run(name, lambda: self._codec.put_step(name.encode(), value), deadline)

    def update(self, name: str, change: Change, deadline: Deadline) -> None:
        self.cell(name, deadline).update(change)

    def copies_on(self, name: str) -> tuple[str, ...]:
        return (self._topology.holder_of(name),)

    def mend(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        if damaged[0]:
            self.cell(name, deadline).mend(copies[0], value)

    def drop(self, name: str, deadline: Deadline) -> None:
        """Delete a value; one that is not there is fine."""

        def make() -> tuple[Step, CodeReply]:
            reply = CodeReply((b":1\r\n", b":0\r\n"), np.zeros(1, dtype=np.uint8))
            return Step(memoryview(command(b"DEL", name.encode())), reply), reply

        self._run(name, make, deadline)

    def swap(self, name: str, old: bytes | None, new: bytes, deadline: Deadline) -> bool:
        """Replace a value if it is `old` (None: if there is none), in one step; return whether it was."""
        request = command(*compare_and_set.swap_words((name.encode(), old, new)))
        codes = (b"+OK\r\n", b"$-1\r\n") if old is None else (b":1\r\n", b":0\r\n")

        def make() -> tuple[Step, CodeReply]:
            reply = CodeReply(codes, np.zeros(1, dtype=np.uint8))
            return Step(memoryview(request), reply), reply

        reply = self._run(name, make, deadline)
        assert isinstance(reply, CodeReply)
        return not reply.out[0]

    def cell(self, name: str, deadline: Deadline) -> ValueCell:
        """The one copy of a value, to be changed on a condition."""
        holder = self._topology.holder_of(name)
        return ValueCell(holder, name, lambda: self.look(name, deadline), lambda old, new: self.swap(name, old, new, deadline))

    def _run(self, name: str, make: Callable[[], tuple[Step, BlobReply | CodeReply]], deadline: Deadline) -> BlobReply | CodeReply:
        """Run one command at the primary that holds a value, following redirections."""
        asking: str | None = None
        while True:
            step, reply = make()
            try:
                asking, done = self._once(name.encode(), step, reply, asking, deadline)
            except (NodeUnavailableError, DeadlineExceededError):
                self._topology.doubt()  # it may have been replaced: a reader of small values alone would never hear of it
                raise
            if done:
                return reply

    def _once(
        self, key: bytes, step: Step, reply: BlobReply | CodeReply, asking: str | None, deadline: Deadline
    ) -> tuple[str | None, bool]:
        """Run one command at its slot's node, or at the importing node; return the importing node to ask next, and whether it is done."""
        address = asking or self._topology.slot_map(deadline).address_of(text_slot(key))
        steps = [Step(memoryview(command(b"ASKING")), LineReply()), step] if asking else [step]
        exchange(self._pool, {address: steps}, [], deadline)
        line = reply.error if isinstance(reply, BlobReply) else reply.errors[0][1] if reply.errors else None
        if line is not None and line.startswith(b"-ASK ") and not deadline.expired:
            return redirect_target(line, address), False
        return None, not self._try_again(key, line, address, deadline)

    def _try_again(self, key: bytes, line: bytes | None, address: str, deadline: Deadline) -> bool:
        """Whether a single command was redirected or refused for now; the map has been corrected then."""
        if line is None:
            return False
        if deadline.expired and line.startswith((b"-MOVED ", b"-ASK ")):
            text = line.decode("ascii", "replace")
            raise DeadlineExceededError(f"the cluster redirected a small value for {deadline.timeout_s:g} s without an end; last: {text}")
        if not line.startswith(REDIRECTS) or deadline.expired:
            raise server_error(address, line)
        time.sleep(min(_PAUSE_S, deadline.remaining_s()))
        if line.startswith(b"-MOVED "):
            self._topology.follow({text_slot(key): redirect_target(line, address)}, deadline)
        else:
            self._topology.refreshed(deadline)
        return True
