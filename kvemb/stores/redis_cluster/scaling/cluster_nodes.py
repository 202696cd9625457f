"""CLUSTER NODES, read from one node and from all together: the nodes, the holder of each slot, and the open slots. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.schema.slots import N_SLOTS

_ADDRESS = re.compile(r"(?P<host>[^@,]*):(?P<port>\d{1,5})@(?P<bus>\d{1,5})")
_OPEN = re.compile(r"\[(\d{1,5})-([<>])-([0-9a-f]{40})\]")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_LEAST_WORDS = 8


@dataclass(frozen=True, eq=False)
class ClusterNode:
    """A line of CLUSTER NODES.

    Args:
        name: the 40 hex digits that the cluster knows the node by.
        host, port, bus_port: where it is, as the cluster says.
        flags: "myself", "master", "fail", "handshake" and the like.
        primary: the name of the one that it follows, "" for a primary.
        epoch: of its claim to its slots.
        slots: bool [16384], those that it holds.
        leaving: slots that are on their way from it, and the nodes they go to (only in the line "myself").
        coming: slots that are on their way to it, and the nodes they come from (only there).
    """

    name: str
    host: str
    port: int
    bus_port: int
    flags: frozenset[str]
    primary: str
    epoch: int
    slots: NDArray[np.bool_]
    leaving: dict[int, str]
    coming: dict[int, str]

    @property
    def address(self) -> str:
        """Where clients find it: "host:port"."""
        return f"{self.host}:{self.port}"

    @property
    def is_primary(self) -> bool:
        """Whether it is no replica."""
        return "master" in self.flags

    @property
    def known(self) -> bool:
        """Whether its name is settled: two nodes that have just met do not know each other's yet."""
        return not {"handshake", "noaddr"} & self.flags

    @property
    def failed(self) -> bool:
        """Whether the cluster has given it up."""
        return "fail" in self.flags


@dataclass(frozen=True)
class OpenSlot:
    """A slot between two nodes.

    Args:
        slot: its number.
        source, target: names of the nodes.
        leaving: whether the source says so: only then does it send clients on.
        coming: whether the target says so.
    """

    slot: int
    source: str
    target: str
    leaving: bool
    coming: bool


@dataclass(frozen=True, eq=False)
class ClusterView:
    """A cluster as its primaries see it, each of itself.

    Args:
        nodes: by name, replicas among them.
        owners: by slot, its holder's name, "" for none.
        open_slots: in the order of their numbers.
    """

    nodes: dict[str, ClusterNode]
    owners: tuple[str, ...]
    open_slots: tuple[OpenSlot, ...]

    @property
    def primaries(self) -> list[ClusterNode]:
        """In the order of their addresses, also those that hold nothing."""
        return sorted((node for node in self.nodes.values() if node.is_primary), key=lambda node: (node.host, node.port))

    def n_slots(self, name: str) -> int:
        """How many slots a node holds."""
        return self.owners.count(name)

    def replicas_of(self, name: str) -> list[ClusterNode]:
        """The replicas that follow a node."""
        return [node for node in self.nodes.values() if node.primary == name]

    def at(self, address: str) -> ClusterNode | None:
        """The node at an address as the cluster says it."""
        return next((node for node in self.nodes.values() if node.address == address), None)


def parse_nodes(text: str, asked: str) -> list[ClusterNode]:
    """Read an answer to CLUSTER NODES."""
    return [_node(line, asked) for line in text.splitlines() if line]


def merged_view(answers: Sequence[Sequence[ClusterNode]]) -> ClusterView:
    """Put the nodes' answers together: each is believed about itself; of two that claim a slot, the one with the later epoch."""
    nodes = {node.name: node for answer in reversed(answers) for node in answer if node.known}
    nodes |= {node.name: node for answer in answers for node in answer if "myself" in node.flags}
    owners = [""] * N_SLOTS
    for node in sorted(nodes.values(), key=lambda node: (node.epoch, node.name)):
        for slot in np.flatnonzero(node.slots).tolist() if node.is_primary else ():
            owners[slot] = node.name
    return ClusterView(nodes, tuple(owners), tuple(_open_slots(nodes.values(), owners)))


def _open_slots(nodes: Iterable[ClusterNode], owners: Sequence[str]) -> list[OpenSlot]:
    leaving = {(slot, node.name, to) for node in nodes for slot, to in node.leaving.items()}
    coming = {(slot, source, node.name) for node in nodes for slot, source in node.coming.items()}
    found = []
    for slot, source, target in sorted(leaving | coming):
        key = (slot, source, target)
        found.append(OpenSlot(*key, leaving=key in leaving, coming=key in coming))
    return found


def _node(line: str, asked: str) -> ClusterNode:
    words = line.split()
    address = _ADDRESS.match(words[1]) if len(words) >= _LEAST_WORDS else None
    if address is None or not words[6].isdigit():
        raise ProtocolError(f"node {asked}: CLUSTER NODES answered {line[:80]!r}, expected a line for each node")
    slots = np.zeros(N_SLOTS, dtype=bool)
    leaving: dict[int, str] = {}
    coming: dict[int, str] = {}
    for word in words[8:]:
        if found := _OPEN.fullmatch(word):
            (leaving if found[2] == ">" else coming)[int(found[1])] = found[3]
        elif found := _RANGE.fullmatch(word):
            slots[int(found[1]) : int(found[2] or found[1]) + 1] = True
    host = address["host"] or asked.rpartition(":")[0]
    flags, primary = frozenset(words[2].split(",")), "" if words[3] == "-" else words[3]
    return ClusterNode(words[0], host, int(address["port"]), int(address["bus"]), flags, primary, int(words[6]), slots, leaving, coming)
