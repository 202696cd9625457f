"""The faults that a chaos run draws from: each does something bad to a running ledger and undoes it. Recovery is the product's business.

What must not live here: when which fault happens (`__main__`), what it costs (`__main__`), whether the promise was kept (ledger).
"""

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from chaos import processes, storage
from chaos.cluster import FaultyCluster
from chaos.cluster_node_moves import ClusterOperator
from chaos.followers import FOLLOWERS, Followers
from chaos.node_moves import MOVE_KINDS
from chaos.proxy import DOWN, UP, FaultProxy, Flow
from chaos.run import LedgerRun
from chaos.shard_operator import ShardOperator
from chaos.table_operator import TableOperator
from chaos.trainer import REST_S
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import KINDS

_REDIS_KINDS = ("valkey", "redis", "redis-cluster")
_OWN_MAP_KINDS = MOVE_KINDS
_SNAPSHOT_KINDS = ("valkey", "redis")
_SHARD_GRACE_S = 40.0
_GOODBYE_S = 60.0
IDLE_STREAM_S = 2.0
"""Shards of a chaos run end a stream of pushes through which nothing has gone for so long; others do after a minute."""


@dataclass(frozen=True)
class Scene:
    """What a fault works on: the run, what follows it, its own source of chance, and a clock that a stop ends early."""

    run: LedgerRun
    followers: Followers
    random: random.Random
    stopping: threading.Event

    def hold(self, least_s: float, most_s: float) -> None:
        """Let the fault last."""
        self.stopping.wait(self.random.uniform(least_s, most_s))

    def node(self) -> int:
        """Choose a node."""
        return self.random.randrange(len(self.run.cluster.servers))

    def shard(self) -> int:
        """Choose a shard."""
        return self.random.choice(self.run.cluster.shard_numbers)

    def proxy(self) -> FaultProxy:
        """Choose a node's or a shard's proxy."""
        return self.random.choice(self.run.cluster.proxies)


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        name: for reports.
        act: does it, and undoes it before it returns.
        kinds: the storage kinds on which it makes sense.
        beside: whether it may happen beside another one: of the network, and of what follows the run.
        alone: whether none of these may happen beside it: it has something to say to all that must be heard.
        needs: abilities of the product: "journal", "takeover", "repair".
    """

    name: str
    act: Callable[[Scene], None]
    kinds: tuple[str, ...] = tuple(KINDS)
    beside: bool = False
    alone: bool = False
    needs: frozenset[str] = frozenset()


def node_hangs(scene: Scene) -> None:
    """SIGSTOP, and SIGCONT a moment later."""
    with processes.paused(scene.run.cluster.servers[scene.node()].process):
        scene.hold(0.3, 4)


def node_full(scene: Scene) -> None:
    """No room for one more record."""
    with storage.full(scene.run.cluster.servers[scene.node()], record_bytes=12 + 4 * 16):
        scene.hold(0.5, 2)


def node_flushed(scene: Scene) -> None:
    """FLUSHALL or flush_all while everybody works."""
    storage.flush(scene.run.cluster.servers[scene.node()])


def node_lost(scene: Scene) -> None:
    """SIGKILL, and a restart that brings nothing back."""
    node = scene.node()
    processes.kill(scene.run.cluster.servers[node].process)
    scene.hold(0, 2)
    scene.run.cluster.restart_nodes(node)


def node_rolled_back(scene: Scene) -> None:
    """SIGKILL, and a restart that brings an old snapshot back."""
    node = scene.node()
    storage.snapshot(scene.run.cluster.servers[node])
    scene.hold(0.5, 2)
    scene.run.cluster.restart_nodes(node, snapshot=True)


def node_rolled_far_back(scene: Scene) -> None:
    """The same with the snapshot of an earlier time: slots have moved since, perhaps."""
    node = scene.node()
    if not storage.has_snapshot(scene.run.cluster.servers[node]):
        storage.snapshot(scene.run.cluster.servers[node])
    scene.hold(0.5, 2)
    scene.run.cluster.restart_nodes(node, snapshot=True)


def node_goes_back(scene: Scene) -> None:
    """SWAPDB, and once more a moment later: its process has an earlier state again."""
    server = scene.run.cluster.servers[scene.node()]
    storage.swap_databases(server)
    scene.hold(0.5, 6)
    storage.swap_databases(server)


def node_lost_beside_a_hung_one(scene: Scene) -> None:
    """FLUSHALL or flush_all while another node does not answer."""
    hung, lost = scene.random.sample(scene.run.cluster.servers, 2)
    with processes.paused(hung.process):
        scene.hold(0, 3)
        storage.flush(lost)
        scene.hold(1, 5)


def nodes_swapped(scene: Scene) -> None:
    """Two nodes' addresses lead to each other's servers, for a while."""
    first, second = scene.random.sample(scene.run.cluster.node_proxies, 2)
    for _ in range(2):
        first.target, second.target = second.target, first.target
        first.reset_all()
        second.reset_all()
        scene.hold(1, 2)


def shard_hangs(scene: Scene) -> None:
    """SIGSTOP, and SIGCONT a moment later."""
    with processes.paused(scene.run.cluster.shards[scene.shard()]):
        scene.hold(0.3, 3)


def shard_ends(scene: Scene) -> None:
    """SIGTERM under load, and a restart."""
    shard = scene.shard()
    processes.terminate(scene.run.cluster.shards[shard], _SHARD_GRACE_S)
    scene.run.cluster.start_shard(shard)


def shards_roll(scene: Scene) -> None:
    """SIGTERM and a restart of one shard after the other."""
    for shard in scene.run.cluster.shard_numbers:
        processes.terminate(scene.run.cluster.shards[shard], _SHARD_GRACE_S)
        scene.run.cluster.start_shard(shard)


def shard_killed(scene: Scene) -> None:
    """SIGKILL, and a restart."""
    shard = scene.shard()
    processes.kill(scene.run.cluster.shards[shard])
    scene.hold(0, 1)
    scene.run.cluster.start_shard(shard)


def shard_replaced(scene: Scene) -> None:
    """A shard hangs at any point of its work, another process takes over, the first goes on."""
    cluster, shard = scene.run.cluster, scene.shard()
    old = cluster.shards[shard]
    processes.pause(old)
    scene.hold(0, 1)
    cluster.move_shard(shard)
    cluster.start_shard(shard, "--take-over")
    cluster.shard_proxies[shard].reset_all()  # trainers find the new one behind the same address
    processes.resume(old)
    scene.hold(0.5, 2)
    processes.kill(old)


def trainer_killed(scene: Scene) -> None:
    """SIGKILL in the middle of a push, and a restart under the same name."""
    trainer = scene.random.randrange(len(scene.run.trainers))
    processes.kill(scene.run.trainers[trainer])
    scene.run.start_trainer(trainer)


def trainer_hangs(scene: Scene) -> None:
    """SIGSTOP, and SIGCONT a moment later."""
    with processes.paused(scene.random.choice(scene.run.trainers)):
        scene.hold(0.3, 2)


def trainer_rests(scene: Scene) -> None:
    """It pushes nothing for longer than shards keep its streams, and goes on; or closes in order: then the others go on without it."""
    run, trainer = scene.run, scene.random.randrange(len(scene.run.trainers))
    run.trainers[trainer].signal(signal.SIGUSR1)
    scene.hold(IDLE_STREAM_S + 1, REST_S - 0.5)
    if scene.random.random() < 0.5:
        return
    code = processes.terminate(run.trainers[trainer], _GOODBYE_S)
    if code:
        raise TimeoutError(f"trainer {trainer} was told to close in order and ended with exit code {code}")
    others = [other for other in range(len(run.trainers)) if other != trainer]
    run.wait_for_acks(4, Deadline.after(_GOODBYE_S), others)
    run.start_trainer(trainer)


def _follower_killed(name: str) -> Callable[[Scene], None]:
    """SIGKILL, and a restart."""

    def act(scene: Scene) -> None:
        processes.kill(scene.followers.process(name))
        scene.hold(0, 3)
        scene.followers.start(name)

    return act


def _follower_hangs(name: str) -> Callable[[Scene], None]:
    """SIGSTOP, and SIGCONT a moment later."""

    def act(scene: Scene) -> None:
        with processes.paused(scene.followers.process(name)):
            scene.hold(0.3, 4)

    return act


def target_flushed(scene: Scene) -> None:
    """FLUSHALL while the publisher works."""
    storage.flush(scene.followers.target)


def operators_of(cluster: FaultyCluster, chance: random.Random) -> tuple[ShardOperator | ClusterOperator, ShardOperator]:
    """Return the operators that change the nodes of a cluster of its storage kind, and its shards."""
    shards = ShardOperator(cluster, chance)
    return (shards if cluster.store in MOVE_KINDS else ClusterOperator(cluster, chance)), shards


def _asked(what: str, most_s: float = 2) -> Callable[[Scene], None]:
    """A fault that has an operator ask for something, and leaves it going on."""

    def act(scene: Scene) -> None:
        nodes, shards = operators_of(scene.run.cluster, scene.random)
        getattr(nodes if hasattr(nodes, what) else shards, what)()
        scene.hold(0, most_s)

    return act


def _asked_of_shards(what: str) -> Callable[[Scene], None]:
    """The same about shards, whose moves take a moment only: at times one of them is killed in it."""
    ask = _asked(what, 0.5)

    def act(scene: Scene) -> None:
        ask(scene)
        if scene.random.random() < 0.4:
            shard_killed(scene)

    return act


def shard_emptied(scene: Scene) -> None:
    """A shard loses its slots and stays, or gets some back; steps go on that it does not hear of, and a trainer is killed."""
    _asked("empty_shard")(scene)
    scene.run.wait_for_acks(5, Deadline.after(_GOODBYE_S))
    if scene.random.random() < 0.5:
        trainer_killed(scene)


def _table(what: str) -> Callable[[Scene], None]:
    """A verb of the table that closes, at times with a shard or a trainer killed in its middle."""

    def act(scene: Scene) -> None:
        errors: list[BaseException] = []

        def verb() -> None:
            try:
                getattr(TableOperator(scene.run.cluster, scene.random), what)()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=verb, name=f"chaos-{what}")
        thread.start()
        scene.hold(0, 1)
        if scene.random.random() < 0.6:
            scene.random.choice((shard_killed, shard_killed, trainer_killed))(scene)
        thread.join()
        if errors:
            raise errors[0]

    return act


def _flows(*flows: Flow, way: str | None = None) -> Callable[[Scene], None]:
    """A fault that sets one of these flows on one proxy for a while."""

    def act(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.set(scene.random.choice(flows), UP if way == "up" else DOWN if way == "down" else None)
        scene.hold(0.3, 3)
        proxy.heal()

    return act


def connections_reset(scene: Scene) -> None:
    """Every connection of a proxy is reset, several times."""
    proxy = scene.proxy()
    for _ in range(scene.random.randrange(1, 5)):
        proxy.reset_all()
        scene.hold(0, 0.3)


def connections_half_closed(scene: Scene) -> None:
    """One direction of every connection of a proxy ends."""
    scene.proxy().half_close(scene.random.choice((UP, DOWN)))


def connections_refused(scene: Scene) -> None:
    """Open connections are reset and new ones too, for a while."""
    proxy = scene.proxy()
    proxy.refuse()
    proxy.reset_all()
    scene.hold(0.3, 2)
    proxy.heal()


def _cut(scene: Scene) -> None:
    """Connections end in the middle of a value."""
    proxy = scene.proxy()
    for _ in range(4):
        how = scene.random.choice(("reset", "eof"))
        proxy.set(Flow(cut_after_bytes=scene.random.randrange(1, 20_000), cut=how), scene.random.choice((UP, DOWN)))  # type: ignore[arg-type]
        scene.hold(0.1, 0.4)
    proxy.heal()


def _needs(*what: str) -> frozenset[str]:
    return frozenset(what)


FAULTS = (
    Fault("node hangs", node_hangs),
    Fault("node full", node_full, needs=_needs("full")),
    Fault("node flushed", node_flushed, needs=_needs("repair")),
    Fault("node lost", node_lost, needs=_needs("repair")),
    Fault("node rolled back", node_rolled_back, _REDIS_KINDS, needs=_needs("repair")),
    Fault("node rolled far back", node_rolled_far_back, _SNAPSHOT_KINDS, needs=_needs("repair")),
    Fault("node goes back", node_goes_back, _SNAPSHOT_KINDS, needs=_needs("repair")),
    Fault("lost beside a hung one", node_lost_beside_a_hung_one, _OWN_MAP_KINDS, needs=_needs("repair")),
    Fault("nodes swapped", nodes_swapped, _OWN_MAP_KINDS, needs=_needs("swap")),
    Fault("nodes added", _asked("add"), needs=_needs("moves")),
    Fault("node removed", _asked("remove"), needs=_needs("moves")),
    Fault("node exchanged", _asked("exchange"), needs=_needs("moves")),
    Fault("dead node replaced", _asked("replace_dead"), needs=_needs("moves")),
    Fault("nodes rebalanced", _asked("rebalance"), needs=_needs("moves")),
    Fault("shards added", _asked_of_shards("add_shards"), needs=_needs("moves")),
    Fault("shard removed", _asked_of_shards("remove_shard"), needs=_needs("moves")),
    Fault("shards rebalanced", _asked_of_shards("rebalance_shards"), needs=_needs("moves")),
    Fault("shard emptied", shard_emptied, needs=_needs("moves")),
    Fault("table altered", _table("alter")),
    Fault("table dropped", _table("drop")),
    Fault("table loaded", _table("load"), needs=_needs("time")),  # minutes on a busy machine: by name only
    Fault("policies changed", _table("change_policies")),
    Fault("shard hangs", shard_hangs),
    Fault("shard ends", shard_ends),
    Fault("shards roll", shards_roll),
    Fault("shard killed", shard_killed, needs=_needs("journal")),
    Fault("shard replaced", shard_replaced, needs=_needs("takeover")),
    Fault("trainer killed", trainer_killed),
    Fault("trainer hangs", trainer_hangs),
    Fault("trainer rests", trainer_rests, alone=True),
    *(Fault(f"{name} killed", _follower_killed(name), beside=True) for name in FOLLOWERS),
    *(Fault(f"{name} hangs", _follower_hangs(name), beside=True) for name in FOLLOWERS),
    Fault("target flushed", target_flushed, beside=True),
    Fault("slow network", _flows(Flow(delay_s=0.02, jitter_s=0.08), Flow(bytes_per_s=300_000)), beside=True),
    Fault("tiny packets", _flows(Flow(slice_bytes=1), Flow(slice_bytes=7, jitter_s=0.01)), beside=True),
    Fault("partition", _flows(Flow(swallow=True)), beside=True),
    Fault("one-way partition", _flows(Flow(swallow=True), way="up"), beside=True),
    Fault("one-way partition back", _flows(Flow(swallow=True), way="down"), beside=True),
    Fault("late writes", _flows(Flow(hold=True), way="up"), beside=True),
    Fault("late replies", _flows(Flow(hold=True), way="down"), beside=True),
    Fault("resets", connections_reset, beside=True),
    Fault("half-closed", connections_half_closed, beside=True),
    Fault("refused", connections_refused, beside=True),
    Fault("cut in mid-value", _cut, beside=True),
)
