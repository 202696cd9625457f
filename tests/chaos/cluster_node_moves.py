"""Faults of operators of a Redis Cluster: its nodes added, removed, exchanged, replaced when dead, rebalanced. There the command drives the
change, so it runs beside the faults that follow, in a process of its own; some of them kill it, and another resumes it or takes it back.

What must not live here: what a change does (the product's), and whether it came to its end (`__main__`).
"""

import os
import random
import sys
import time
from dataclasses import dataclass

from chaos import processes
from chaos.cluster import FaultyCluster
from kvemb.config import load
from kvemb.errors import KvembError
from kvemb.local_cluster.processes import LocalProcess, python_env
from kvemb.net.deadline import Deadline
from kvemb.stores.redis_cluster.scaling.node_scaling import NodeScaling

_ANSWER_S = 60.0  # of a cluster in which something else has just been broken
_FEWEST, _MOST = 3, 5  # with slots: two of three can call the third failed, one of two cannot
_MB_PER_S = (1, 5, 50)  # a ledger has a few megabytes of slots with their markers
_PAUSE_S = 0.2


@dataclass(frozen=True)
class _Members:
    """Nodes of the cluster by address, how many slots each has, which are called failed, and whether a change was begun and not ended."""

    slots: dict[str, int]
    failed: frozenset[str]
    begun: bool


class ClusterOperator:
    """Changes the nodes of a Redis Cluster; one change at a time.

    Args:
        cluster: a Redis Cluster.
        chance: of what is chosen.
    """

    def __init__(self, cluster: FaultyCluster, chance: random.Random) -> None:
        self._cluster, self._random = cluster, chance

    def add(self) -> None:
        """An empty node joins: one whose command was killed when it had only met the others, or a new one."""
        if (members := self._free()) is None:
            return
        met = [address for address, n_slots in members.slots.items() if not n_slots]
        if met or len(members.slots) < _MOST:
            self._start("nodes", "add", met[0] if met else self._cluster.add_node())

    def remove(self) -> None:
        """A node leaves."""
        if (members := self._free()) is not None and len(members.slots) > _FEWEST:
            self._start("nodes", "remove", self._one_of(members))

    def exchange(self) -> None:
        """A node gives all that it has to a new one."""
        if (members := self._free()) is not None:
            self._start("nodes", "replace", self._one_of(members), self._cluster.add_node())

    def rebalance(self) -> None:
        """Nodes get other shares."""
        if (members := self._free()) is not None:
            weights = ",".join(f"{address}={self._random.choice((0.5, 1, 2))}" for address in members.slots)
            self._start("nodes", "rebalance", "--weights", weights)

    def replace_dead(self) -> None:
        """A node dies for good, and an empty one takes its place once the others call it failed."""
        members = self._free()
        if members is None or sum(n_slots > 0 for n_slots in members.slots.values()) < _FEWEST:
            return
        dead, new, deadline = self._one_of(members), self._cluster.add_node(), Deadline.after(_ANSWER_S)
        processes.kill(self._cluster.servers[self._cluster.node_at(dead)].process)
        while dead in (now := self._members()).slots and not deadline.expired:
            if dead in now.failed:
                self._start("nodes", "replace", dead, new)
                self._end(deadline)
            time.sleep(_PAUSE_S)
        if dead in now.slots:  # the change did not go through
            self._cluster.restart_nodes(self._cluster.node_at(dead))
        self._tidy(self._members())

    def wait(self, timeout_s: float) -> str:
        """Wait until nothing moves, and resume changes without a driver; return "", or the stuck ones."""
        deadline = Deadline.after(timeout_s)
        self._end(deadline)
        while self._members().begun:
            if deadline.expired:
                return f"a change of nodes is stuck:\n{self._said()}"
            self._start("moves", "resume")
            self._end(deadline)
        return ""

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _free(self) -> _Members | None:
        """The cluster, if nothing moves there. Otherwise the change gets another fate, perhaps: killed, resumed, or taken back."""
        running = self._cluster.command
        if running is not None and running.poll() is None:
            if self._random.random() < 0.5:
                return None
            processes.kill(running)
        members = self._members()
        if members.begun:
            self._start("moves", self._random.choice(("resume", "abort")))
            return None
        self._tidy(members)
        return members

    def _start(self, *words: str) -> None:
        """Begin a command: one that is refused, or fails because of another fault, must not leave anything half done either."""
        verb, action, *rest = words
        pace = ["--max-mb-per-s", str(self._random.choice(_MB_PER_S)), "--yes"] if verb == "nodes" else []
        command = [sys.executable, "-P", "-m", "kvemb.cli", verb, action, str(self._cluster.config_path), *rest, *pace]
        print(f"          {' '.join(words)}", flush=True)
        self._cluster.command = LocalProcess("kvemb " + " ".join(words), command, self._cluster.folder / "operator.log", python_env())

    def _end(self, deadline: Deadline) -> None:
        """Wait for the command that runs, if any."""
        running = self._cluster.command
        while running is not None and running.poll() is None and not deadline.expired:
            time.sleep(_PAUSE_S)

    def _said(self) -> str:
        return "" if self._cluster.command is None else f"{self._cluster.command.name}:\n{self._cluster.command.log_tail()}"

    def _members(self) -> _Members:
        """Ask until there is an answer."""
        deadline = Deadline.after(_ANSWER_S)
        while True:
            try:
                with NodeScaling(load(self._cluster.config_path, os.environ).storage) as nodes:
                    view = nodes.plans.view()
                    failed = frozenset(node.address for node in view.primaries if node.failed)
                    begun = bool(view.open_slots) or (not failed and nodes.plans.under_way() is not None)
                    return _Members({node.address: view.n_slots(node.name) for node in view.primaries}, failed, begun)
            except KvembError:
                if deadline.expired:
                    raise

    def _one_of(self, members: _Members) -> str:
        return self._random.choice(sorted(members.slots))

    def _tidy(self, members: _Members) -> None:
        """End the servers that are none of the cluster's any more; at times have kvemb.yaml say the present truth."""
        present = set(members.slots)
        for address in [proxy.address for proxy in self._cluster.node_proxies if proxy.address not in present]:
            self._cluster.drop_node(address)
        if self._random.random() < 0.5 or not present & set(self._cluster.named):
            self._cluster.write_config(sorted(present))
