"""A local cluster whose trainer and shards reach storage over an emulated network, each from a host of its own.

Every host has a kvemb.yaml in which the storage nodes' addresses are where that host's routes begin. Trainer and shards talk to each other
directly: only the way to storage is emulated.
"""

import yaml

from benchmarks.network import Network, NetworkSpec
from kvemb.local_cluster import LocalCluster

TRAINER = "trainer"


class NetworkedCluster(LocalCluster):
    """A LocalCluster behind an emulated network; a context manager. Not for Redis Cluster, whose nodes tell addresses of their own.

    Args:
        network: between the hosts: the trainer's, each shard's, each node's.
        store, nodes, shards, mode, trainers, durability, memory_mb: see `LocalCluster`.
    """

    def __init__(
        self,
        network: NetworkSpec,
        store: str,
        nodes: int = 1,
        *,
        shards: int,
        mode: str,
        trainers: int,
        durability: str,
        memory_mb: int = 1024,
        cache_mb: int | None = None,
    ) -> None:
        super().__init__(
            store, nodes, shards=shards, mode=mode, trainers=trainers, durability=durability, memory_mb=memory_mb, cache_mb=cache_mb
        )
        self._spec = network
        self._network: Network | None = None

    @property
    def network_pid(self) -> int:
        """The process that emulates the network."""
        return self._running().pid

    def _running(self) -> Network:
        if self._network is None:
            hosts = [TRAINER, *(_shard(index) for index in range(self._n_shards))]
            routes = [(host, _node(index), server.address) for host in hosts for index, server in enumerate(self.servers)]
            self._network = Network(self._spec, routes)
        return self._network

    def _addresses_from(self, host: str) -> list[str]:
        addresses = self._running().addresses
        return [addresses[host, _node(index)] for index in range(len(self.servers))]

    def _node_addresses(self) -> list[str]:
        return self._addresses_from(TRAINER)

    def _shard_command(self, index: int) -> list[str]:
        """The same with a file of the shard's own."""
        path = self.folder / f"{_shard(index).replace(' ', '-')}.yaml"
        tree = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        tree["storage"]["nodes"] = self._addresses_from(_shard(index))
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return [str(path) if word == str(self.config_path) else word for word in super()._shard_command(index)]

    def _stop(self) -> None:
        super()._stop()
        if self._network is not None:
            self._network.close()


def _shard(index: int) -> str:
    return f"shard {index}"


def _node(index: int) -> str:
    return f"node {index}"
