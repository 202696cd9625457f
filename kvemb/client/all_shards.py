"""All shards of a cluster together: one call to each, concurrently, and the checks that they are the shards we mean.

Not fork-safe, and it says so: gRPC's threads and sockets do not exist in a forked child.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from kvemb.client.shard_channel import ShardChannel
from kvemb.config import Config, ServersConfig
from kvemb.errors import ClosedError, ConfigError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.net.tls_files import TlsFiles
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import DescribeReply, Empty
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.cluster_map import ClusterMap
from kvemb.tls_config import TlsConfig

"""For every verb that goes through the shards, unless the caller says otherwise."""

M = TypeVar("M", bound=Message)


class MapReader(MapSource, Protocol):
    """Who can read the cluster map again: a store."""

    def refresh_map(self, deadline: Deadline) -> bool:
        """Read it from the nodes; return whether it is another."""


class AllShards:
    """The channels to all shards of a cluster, in order, for requests that go to each. Thread-safe.

    Args:
        addresses: "host:port" of each shard.
        last_words: the file in which a shard that ended in trouble says why, where that is known; of this machine.
        maps: knows the cluster map, which says what goes to which shard; None: they have equal runs of slots, as in a new cluster.
        tls: how the connections are encrypted.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        last_words: Callable[[int], Path] | None = None,
        tls: TlsConfig | None = None,
        maps: MapReader | None = None,
    ) -> None:
        self._maps, self.tls = maps, tls
        files = None if tls is None else TlsFiles(tls, "parameter_servers.tls")
        self.channels = tuple(
            ShardChannel(shard, address, None if last_words is None else last_words(shard), files)
            for shard, address in enumerate(addresses)
        )
        self._pid = os.getpid()
        self._closed = False

    @staticmethod
    def of(servers: ServersConfig, maps: MapReader | None = None) -> "AllShards":
        """Return the shards of a kvemb.yaml."""
        return AllShards(servers.shards, servers.last_words, servers.tls, maps)

    def __len__(self) -> int:
        return len(self.channels)

    @property
    def cluster_map(self) -> ClusterMap:
        """The map in force; ask anew for every push."""
        return ClusterMap.first(0, len(self)) if self._maps is None else self._maps.cluster_map

    def refresh_map(self, deadline: Deadline) -> None:
        """Read the cluster map again, where there is storage to read it from."""
        if self._maps is not None:
            self._maps.refresh_map(deadline)

    def describe(self, config: Config, deadline: Deadline) -> DescribeReply:
        """Ask every shard who it is; return shard 0's answer.

        Raises:
            ConfigError: an address answers as another shard, another cluster or another number of shards.
            ShardUnavailableError: a shard did not answer.
        """
        replies = self.call_each("Describe", [Empty()] * len(self), DescribeReply, deadline)
        for channel, reply in zip(self.channels, replies, strict=True):
            got = (reply.cluster, reply.shard, reply.n_shards, reply.cluster_id, reply.mode)
            expected = (config.cluster, channel.shard, len(self), replies[0].cluster_id, config.servers.mode)
            if got != expected:
                raise ConfigError(
                    f"{channel}: answers as (cluster, shard, number of shards, cluster id, mode) {got!r}, expected {expected!r}. "
                    "Start the shards and connect with the same kvemb.yaml."
                )
        return replies[0]

    def call(self, shard: int, method: str, request: Message, reply_type: type[M], deadline: Deadline) -> M:
        """Call one shard; see `ShardChannel.call`."""
        self.check_usable()
        return self.channels[shard].call(method, request, reply_type, deadline)

    def call_each(self, method: str, requests: Sequence[Message | None], reply_type: type[M], deadline: Deadline) -> list[M]:
        """Call every shard that has a request, concurrently; raise the first failure once all have answered.

        Returns:
            The answers of the shards that were called, in order.
        """
        results = self.try_each(method, requests, reply_type, deadline)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def try_each(self, method: str, requests: Sequence[Message | None], reply_type: type[M], deadline: Deadline) -> list[M | Exception]:
        """The same, with a shard's failure in the place of its answer."""
        self.check_usable()
        pairs = zip(self.channels, requests, strict=True)
        pending = [channel.start(method, request, deadline) for channel, request in pairs if request is not None]
        results: list[M | Exception] = []
        for call in pending:
            try:
                results.append(call.result(reply_type))
            except Exception as error:  # an answer among others: the caller decides
                results.append(error)
        return results

    def check_usable(self) -> None:
        """Raise unless this process may use the channels.

        Raises:
            ClosedError: closed, or opened by the parent of this forked process.
        """
        if self.forked:
            raise ClosedError(
                f"this cluster was opened by process {self._pid}, and its connections to the parameter servers do not "
                "survive fork(). Pulls work here; to push, flush, assign or erase, call kvemb.connect() in this process "
                "(or start it with the 'spawn' or 'forkserver' method)."
            )
        if self._closed:
            raise ClosedError("this cluster was closed")

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the channels."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Close every channel; in a forked child only forget them. Idempotent."""
        if self._closed or self.forked:
            return
        self._closed = True
        for channel in self.channels:
            channel.close()


def require_one_cluster(expected: bytes, got: bytes) -> None:
    """Refuse parameter servers that write to other storage than the one this process reads.

    Raises:
        ParameterServerError: the ids differ.
    """
    if expected != got:
        raise ParameterServerError(
            f"the storage nodes belong to cluster {expected.hex()}, the parameter servers to {got.hex()}. One of the two was "
            "set up anew, or kvemb.yaml mixes two clusters."
        )
