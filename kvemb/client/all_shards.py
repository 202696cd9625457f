"""All shards of a cluster together: one call to each, concurrently, and the checks that they are the shards we mean.

Not fork-safe, and it says so: gRPC's threads and sockets do not exist in a forked child.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvemb.client.shard_channel import ShardChannel
from kvemb.config import Config, ServersConfig
from kvemb.coordination.map_copies import decode_map
from kvemb.errors import (
    ClosedError,
    ConfigError,
    ParameterServerError,
    ShardStartingError,
    ShardUnavailableError,
    SlotsMovedError,
    StorageError,
)
from kvemb.net.deadline import Deadline
from kvemb.net.tls_config import TlsConfig
from kvemb.net.tls_files import TlsFiles
from kvemb.process import interrupts
from kvemb.protocol.messages import DESCRIBE, MOVE_STATUS, DescribeReply, Empty
from kvemb.protocol.shard_routing import MapSource
from kvemb.protocol.verb import Q, R, Verb
from kvemb.schema.cluster_map import ClusterMap

_LOOK_S, _LOOK_TIMEOUT_S = 0.02, 2.0
log = logging.getLogger("kvemb")


class MapReader(MapSource, Protocol):
    """A source of the cluster map that can read it again: the nodes of a store."""

    def refresh_map(self, deadline: Deadline) -> bool:
        """Read it from the nodes; return whether it has changed."""


class AllShards:
    """The channels to the shards of a cluster, by number, for requests that go to each. They follow the cluster map. Thread-safe.

    They are opened when one is first asked for: a shard that never calls another one needs no certificate that is good for that.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        last_words: Callable[[int], Path] | None = None,
        tls: TlsConfig | None = None,
        maps: MapReader | None = None,
    ) -> None:
        self._in_file, self._last_words, self._maps, self.tls = tuple(addresses), last_words, maps, tls
        self._files = None if tls is None else TlsFiles(tls, "parameter_servers.tls")
        self._lock = threading.Lock()
        self._told = ClusterMap.first(0, len(self._in_file))
        self._followed: ClusterMap | None = None
        self._by_number: dict[int, ShardChannel] = {}
        self._left: list[ShardChannel] = []
        self._pid = os.getpid()
        self._closed = False
        self.tables_serial = 0
        """The highest serial of the registry of tables that a shard has told this process."""
        self.load_serial = 0
        """The same of loads that shards have carried out."""

    @staticmethod
    def of(servers: ServersConfig, maps: MapReader | None = None) -> "AllShards":
        """Return the shards of a kvemb.yaml, for a client."""
        shards = AllShards(servers.shards, servers.last_words, servers.tls, maps)
        shards._follow(shards.cluster_map)
        return shards

    @property
    def cluster_map(self) -> ClusterMap:
        """The map in force; read it again for every push."""
        return self._told if self._maps is None else self._maps.cluster_map

    @property
    def channels(self) -> Mapping[int, ShardChannel]:
        """The channel to each shard that there is by the map in force."""
        cluster_map = self.cluster_map
        if cluster_map is not self._followed and not self.forked:
            with self._lock:
                self._follow(cluster_map)
        return self._by_number

    @property
    def numbers(self) -> tuple[int, ...]:
        """The shards that there are, ascending."""
        return tuple(self.channels)

    def heard(self, tables_serial: int, load_serial: int = 0) -> None:
        """Note how often tables and policies had changed when a shard answered, and which load it had carried out."""
        if tables_serial > self.tables_serial or load_serial > self.load_serial:
            with self._lock:
                self.tables_serial = max(self.tables_serial, tables_serial)
                self.load_serial = max(self.load_serial, load_serial)

    def follow(self, cluster_map: ClusterMap) -> None:
        """Follow a map that was read elsewhere, where there is no storage to read it from."""
        with self._lock:
            self._follow(cluster_map)
        self._told = cluster_map

    def ask_map(self, deadline: Deadline) -> None:
        """Follow the map of shard 0, which kvemb.yaml always names: read it from storage, or from that shard where there is none."""
        told = decode_map(self.call(0, MOVE_STATUS, Empty(), deadline).cluster_map)
        if self._maps is None:
            self.follow(told)
            return
        while self._maps.cluster_map.version < told.version and not deadline.expired:  # the nodes get it after shard 0 has it
            if not self._maps.refresh_map(deadline):
                time.sleep(_LOOK_S)

    def look(self, deadline: Deadline) -> None:
        """Find out which shards there are: with a map of long ago, one that has joined would not be asked, and its rows would be missed."""
        with suppress(StorageError):  # where no node answers, the known shards are asked
            self.refresh_map(deadline.within(min(_LOOK_TIMEOUT_S, deadline.remaining_s() / 4)))

    def refresh_map(self, deadline: Deadline) -> None:
        """Read the cluster map again, where there is storage to read it from."""
        if self._maps is not None:
            self._maps.refresh_map(deadline)

    def describe(self, config: Config, deadline: Deadline) -> DescribeReply:
        """Ask every shard to describe itself; return shard 0's answer. Another one that is away is named in the log: pulls go on."""
        channels = self.channels
        replies = self.try_each(DESCRIBE, dict.fromkeys(channels, Empty()), deadline)
        first = replies[0]
        if isinstance(first, Exception):
            raise first
        for shard, reply in replies.items():
            if isinstance(reply, ShardUnavailableError) and not isinstance(reply, ShardStartingError):
                log.warning("connected without a shard that is away; pulls go on, and pushes wait for it: %s", reply)
                continue
            if isinstance(reply, Exception):
                raise reply
            told = {
                "cluster": (reply.cluster, config.cluster),
                "shard": (reply.shard, shard),
                "cluster id": (reply.cluster_id.hex(), first.cluster_id.hex()),
                "mode": (reply.mode, config.servers.mode),
            }
            if wrong := [f"{what} {got!r}, expected {expected!r}" for what, (got, expected) in told.items() if got != expected]:
                raise ConfigError(
                    f"{channels[shard]}: answers as {'; '.join(wrong)}. Start the shards and connect with the same kvemb.yaml."
                )
        return first

    def call(self, shard: int, verb: Verb[Q, R], request: Q, deadline: Deadline) -> R:
        """Call one shard; see `ShardChannel.call`."""
        self.check_usable()
        channel = self.channels.get(shard)
        if channel is None:
            raise SlotsMovedError(f"shard {shard} is none of the cluster's any more, which are {', '.join(map(str, self.numbers))}")
        return channel.call(verb, request, deadline)

    def call_each(self, verb: Verb[Q, R], requests: Q | Mapping[int, Q], deadline: Deadline) -> dict[int, R]:
        """Call shards concurrently; raise the first failure once all have answered.

        Returns:
            The answer of each shard that was called.
        """
        results = self.try_each(verb, requests, deadline)
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return {shard: result for shard, result in results.items() if not isinstance(result, BaseException)}

    def try_each(self, verb: Verb[Q, R], requests: Q | Mapping[int, Q], deadline: Deadline) -> dict[int, R | Exception]:
        """The same, with a shard's failure in the place of its answer."""
        self.check_usable()
        if not isinstance(requests, Mapping):
            self.look(deadline)
        channels = self.channels
        wanted = requests if isinstance(requests, Mapping) else dict.fromkeys(channels, requests)
        pending = {shard: channels[shard].start(verb, request, deadline) for shard, request in wanted.items()}
        for call in pending.values():  # all shards that are away are named before the first is waited for
            with suppress(Exception):  # its result raises it, too
                call.say_who_is_away()
        results: dict[int, R | Exception] = {}
        for shard, call in pending.items():
            try:
                results[shard] = call.result()
            except Exception as error:  # an answer among others: the caller decides
                results[shard] = error
        return results

    def check_usable(self) -> None:
        """Raise unless this process may use the channels."""
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
        """Close every channel, also where Ctrl-C ends the wait for it; in a forked child only forget them. Idempotent."""
        if self._closed or self.forked:
            return
        self._closed = True
        interrupts.finish_off_main_thread(self._close_channels)

    def _close_channels(self) -> None:
        with self._lock:
            for channel in [*self._by_number.values(), *self._left]:
                channel.close()

    def _open(self, shard: int, address: str) -> ShardChannel:
        return ShardChannel(shard, address, None if self._last_words is None else self._last_words(shard), self._files)

    def _follow(self, cluster_map: ClusterMap) -> None:
        """Open channels to shards that joined, or are elsewhere. The others stay open: a call may still wait for an answer there."""
        if cluster_map is self._followed or self._closed:
            return
        before, now = self._by_number, dict[int, ShardChannel]()
        for shard, address in enumerate(cluster_map.shard_places(self._in_file)):
            if address:
                kept = before.get(shard)
                now[shard] = kept if kept is not None and kept.address == address else self._open(shard, address)
        self._left += [channel for shard, channel in before.items() if now.get(shard) is not channel]
        self._by_number, self._followed = now, cluster_map


def require_one_cluster(expected: bytes, got: bytes) -> None:
    """Refuse parameter servers that write to other storage than the one this process reads."""
    if expected != got:
        raise ParameterServerError(
            f"the storage nodes belong to cluster {expected.hex()}, the parameter servers to {got.hex()}. One of the two was "
            "set up again, or kvemb.yaml mixes two clusters."
        )
