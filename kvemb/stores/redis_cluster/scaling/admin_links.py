"""Administrators' connections to the nodes of a cluster, one each, open while slots move.

They ask which node has which slot, and what each slot weighs. One thread."""

from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import DeadlineExceededError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterView, merged_view, parse_nodes
from kvemb.stores.redis_server.redis_commands import Word, ask_all, text_of
from kvemb.stores.redis_server.redis_login import RedisAccess, log_in
from kvemb.stores.server_errors import server_error
from kvemb.wire.resp.resp_value import ErrorLine, Value

_MEASURED_KEYS = 8  # of a slot: tables' buckets are about as large as each other, and a slot has one of most tables
_SLOTS_AT_ONCE = 1024
LEAST_LOAD = 256
"""Bytes of a slot that holds its marker alone: empty slots are shared out too, for tables to come."""
_ANSWER_S = 2.0  # for a node that may be dead while others are there to ask


class AdminLinks:
    """Connections by address; a context manager that closes them."""

    def __init__(self, access: RedisAccess) -> None:
        self._access = access
        self._links: dict[str, Link] = {}

    def __enter__(self) -> "AdminLinks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def run(self, address: str, commands: Sequence[Sequence[Word]], timeout_s: float) -> list[Value]:
        """Run commands in one round trip; errors are values. After an error of the connection they may have run, or may run later."""
        deadline = Deadline.after(timeout_s)
        link = self._links.pop(address, None)
        if link is None:
            link = log_in(address, self._access, deadline, "kvemb-nodes")
        try:
            values = ask_all(link, commands, deadline)
        except BaseException:
            link.close()
            raise
        self._links[address] = link
        return values

    def ask(self, address: str, *words: Word, timeout_s: float | None = None) -> Value:
        """Run one command."""
        (value,) = self.run(address, [words], timeout_s or self._access.config.timeout_s)
        if isinstance(value, ErrorLine):
            raise server_error(address, value.line)
        return value

    def view(self, candidates: Sequence[str]) -> ClusterView:
        """Return the cluster as its primaries see it, each of itself; those that do not answer, as another sees them."""
        failures = []
        for first in dict.fromkeys(candidates):
            try:
                told = parse_nodes(self._told(first), first)
            except (NodeUnavailableError, DeadlineExceededError) as error:
                failures.append(str(error))
                continue
            if not any(node.slots.any() for node in told):
                failures.append(f"node {first}: knows of no slot; it has left the cluster, or was never in one")
                continue
            answers = [told]
            for node in told:
                if node.is_primary and node.known and "myself" not in node.flags:
                    try:
                        answers.append(parse_nodes(self._told(node.address), node.address))
                    except (NodeUnavailableError, DeadlineExceededError):
                        continue
            return merged_view(answers)
        raise NodeUnavailableError("no node of the cluster answers: " + "; ".join(failures))

    def _told(self, address: str) -> str:
        timeout_s = min(_ANSWER_S, self._access.config.timeout_s)
        answer = self.ask(address, "CLUSTER", "NODES", timeout_s=timeout_s)
        return text_of(self._links[address], answer, "CLUSTER NODES")


def slot_loads(links: AdminLinks, view: ClusterView, timeout_s: float) -> NDArray[np.uint64]:
    """Return about how many bytes lie in each slot: uint64 [16384], at least LEAST_LOAD.

    A slot whose node does not answer in time is an error of `AdminLinks.run`; commands that the user may not run count as nothing.
    """
    loads = np.full(N_SLOTS, LEAST_LOAD, np.uint64)
    for node in view.primaries:
        mine = np.flatnonzero(node.slots)
        for start in range(0, len(mine) if not node.failed else 0, _SLOTS_AT_ONCE):
            slots = mine[start : start + _SLOTS_AT_ONCE].tolist()
            loads[slots] = np.maximum(_loads(links, node.address, slots, timeout_s), LEAST_LOAD)
    return loads


def key_bytes(values: Sequence[Value]) -> list[int]:
    """Read the answers to MEMORY USAGE; a key that is gone weighs nothing."""
    return [value if isinstance(value, int) else 0 for value in values]


def keys_in(address: str, value: Value) -> list[bytes]:
    """Read an answer to CLUSTER GETKEYSINSLOT."""
    if not isinstance(value, list) or not all(isinstance(key, bytes) for key in value):
        raise ProtocolError(f"node {address}: CLUSTER GETKEYSINSLOT answered {value!r:.80}, expected keys")
    return [key for key in value if isinstance(key, bytes)]


def _loads(links: AdminLinks, address: str, slots: Sequence[int], timeout_s: float) -> NDArray[np.uint64]:
    counts = links.run(address, [("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in slots], timeout_s)
    listed = links.run(address, [("CLUSTER", "GETKEYSINSLOT", slot, _MEASURED_KEYS) for slot in slots], timeout_s)
    keys = [keys_in(address, value) for value in listed]
    sizes = key_bytes(links.run(address, [("MEMORY", "USAGE", key) for some in keys for key in some] or [("PING",)], timeout_s))
    loads, at = np.zeros(len(slots), np.uint64), 0
    for index, (some, count) in enumerate(zip(keys, counts, strict=True)):
        measured = sum(sizes[at : at + len(some)])
        at += len(some)
        if some and isinstance(count, int):
            loads[index] = measured * count // len(some)
    return loads
