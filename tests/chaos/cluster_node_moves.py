"""Faults of operators of a Redis Cluster: its nodes added, removed, exchanged, replaced when dead, rebalanced, with the commands of
redis-cli that `kvemb nodes` prints. They run beside the faults that follow; some are killed, and then open slots are fixed.

What must not live here: what the commands are (the product's), and whether a change came to its end (`__main__`).
"""

import os
import random
import subprocess
import time
from collections.abc import Sequence

from chaos import processes
from chaos.cluster import FaultyCluster
from kvemb.config import load
from kvemb.errors import KvembError
from kvemb.local_cluster.processes import LocalProcess
from kvemb.net.deadline import Deadline
from kvemb.net.tls_link import connector_of
from kvemb.stores.redis_cluster.node_commands import node_commands
from kvemb.stores.redis_cluster.slot_map import ClusterTopology, SlotMap, bus_port_of
from kvemb.stores.redis_server.redis_login import RedisAccess

_ANSWER_S = 60.0  # of a cluster in which something else has just been broken
_FEWEST, _MOST = 3, 5  # with slots: two of three can call the third failed
_PAUSE_S = 0.2


def typed(lines: Sequence[str], there: str) -> str:
    """The commands as a patient operator types them: one that fails is tried again, with open slots fixed. They die with their shell."""
    fix = f"setpriv --pdeathsig KILL redis-cli --cluster fix {there} --cluster-replace --cluster-yes"
    tries = [f"done=; for n in 1 2 3 4 5; do setpriv --pdeathsig KILL {line} && done=1 && break; sleep 2; {fix}; done" for line in lines]
    return "".join(f"{one}; [ $done ] || exit 1\n" for one in tries)


def slot_map_of(config_path: str | os.PathLike[str]) -> SlotMap:
    """Ask a cluster where its slots are until there is an answer."""
    deadline = Deadline.after(_ANSWER_S)
    while True:
        try:
            config = load(config_path, os.environ).storage
            return ClusterTopology(RedisAccess(config, connector_of(config.tls))).refreshed(Deadline.after(config.timeout_s))
        except KvembError:
            if deadline.expired:
                raise


def name_of(address: str) -> str:
    """The name by which a cluster knows the server at an address."""
    host, _, port = address.rpartition(":")
    return subprocess.run(
        ["redis-cli", "-h", host, "-p", port, "cluster", "myid"], capture_output=True, text=True, check=True
    ).stdout.strip()


def require_failed(dead: str, other: str) -> None:
    """Wait until another node of its cluster calls one failed."""
    deadline = Deadline.after(_ANSWER_S)
    host, _, port = other.rpartition(":")
    asked = ["redis-cli", "-h", host, "-p", port, "cluster", "nodes"]
    while not any(
        dead in line and "fail" in line.split()[2].split(",")
        for line in subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    ):
        assert not deadline.expired, f"the cluster does not call its dead node {dead} failed"
        time.sleep(_PAUSE_S)


class ClusterOperator:
    """Changes the nodes of a Redis Cluster; one change at a time.

    Args:
        cluster: a Redis Cluster.
        chance: of what is chosen.
    """

    def __init__(self, cluster: FaultyCluster, chance: random.Random) -> None:
        self._cluster, self._random = cluster, chance

    def add(self) -> None:
        """An empty node joins."""
        slot_map = self._free()
        if slot_map is not None and len(slot_map.addresses) < _MOST:
            self._start("add", self._cluster.add_node())

    def remove(self) -> None:
        """A node leaves."""
        slot_map = self._free()
        if slot_map is not None and len(slot_map.addresses) > _FEWEST:
            self._start("remove", self._random.choice(slot_map.addresses))

    def exchange(self) -> None:
        """A node gives its place to a new one."""
        if (slot_map := self._free()) is not None:
            self._start("replace", self._random.choice(slot_map.addresses), self._cluster.add_node())

    def rebalance(self) -> None:
        """Nodes get other shares."""
        if (slot_map := self._free()) is not None:
            self._start("rebalance", weights={address: self._random.choice((0.5, 1.0, 2.0)) for address in slot_map.addresses})

    def replace_dead(self) -> None:
        """A node dies for good, and an empty one takes its place once the others call it failed."""
        slot_map = self._free()
        if slot_map is None or len(slot_map.addresses) < _FEWEST:
            return
        dead, new = self._random.choice(slot_map.addresses), self._cluster.add_node()
        processes.kill(self._cluster.servers[self._cluster.node_at(dead)].process)
        require_failed(dead, next(address for address in slot_map.addresses if address != dead))
        self._start("replace", dead, new, dead=True)
        self._end(Deadline.after(2 * _ANSWER_S))
        if dead in slot_map_of(self._cluster.config_path).addresses:  # the change did not go through
            self._cluster.restart_nodes(self._cluster.node_at(dead))

    def wait(self, timeout_s: float) -> str:
        """Wait until nothing moves, and fix slots that nobody moves any more; return "", or why they stand open.

        Commands that take longer are killed: they may, and rows are right wherever they are.
        """
        self._end(Deadline.after(timeout_s))
        if self._cluster.command is not None:
            self._cluster.command.kill()
        deadline = Deadline.after(timeout_s)
        while self._fix():
            if deadline.expired:
                return f"slots stand open:\n{self._said()}"
            time.sleep(_PAUSE_S)
        return ""

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _free(self) -> SlotMap | None:
        """The cluster, if nothing moves there. Otherwise the commands are killed, perhaps, and what they left open is fixed."""
        running = self._cluster.command
        if running is not None and running.poll() is None:
            if self._random.random() < 0.5:
                return None
            processes.kill(running)
        if self._fix():
            return None
        slot_map = slot_map_of(self._cluster.config_path)
        self._cluster.drop_left()
        if self._random.random() < 0.5 or not set(slot_map.addresses) & set(self._cluster.named):
            self._cluster.write_config(slot_map.addresses)  # at times kvemb.yaml says the present truth
        return slot_map

    def _start(self, action: str, *addresses: str, weights: dict[str, float] | None = None, dead: bool = False) -> None:
        """Begin the commands of a change; one that fails because of another fault is tried a few times, after a fix."""
        try:
            slot_map, config = slot_map_of(self._cluster.config_path), load(self._cluster.config_path, os.environ).storage
            access = RedisAccess(config, connector_of(config.tls))
            bus_port = bus_port_of(slot_map.source, access, Deadline.after(config.timeout_s)) if dead else 0
            lines = node_commands(action, addresses, weights or {}, slot_map, config, bus_port=bus_port)
        except KvembError as error:  # the cluster has changed since it was chosen
            print(f"          {action}: {error}", flush=True)
            return
        print(f"          nodes {action} {' '.join(addresses)}", flush=True)
        script = ["bash", "-c", typed(lines, slot_map_of(self._cluster.config_path).source)]
        self._cluster.command = LocalProcess(f"nodes {action}", script, self._cluster.folder / "operator.log")

    def _end(self, deadline: Deadline) -> None:
        """Wait for the commands that run, if any."""
        running = self._cluster.command
        while running is not None and running.poll() is None and not deadline.expired:
            time.sleep(_PAUSE_S)

    def _fix(self) -> bool:
        """Close slots that stand open, where nothing moves; return whether some stand open, or the cluster does not say."""
        slot_map = slot_map_of(self._cluster.config_path)
        told = subprocess.run(["redis-cli", "--cluster", "check", slot_map.source], capture_output=True, text=True, check=False)
        if told.returncode == 0:
            return False
        fix = ["redis-cli", "--cluster", "fix", slot_map.source, "--cluster-replace", "--cluster-yes"]
        subprocess.run(fix, capture_output=True, check=False, timeout=_ANSWER_S)
        return True

    def _said(self) -> str:
        return "" if self._cluster.command is None else f"{self._cluster.command.name}:\n{self._cluster.command.log_tail()}"
