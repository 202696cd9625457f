"""The other shards of the cluster, as a shard calls them: where they are by the map in force, and how the connections are encrypted."""

from collections.abc import Iterable
from contextlib import suppress

from kvemb.client.shard_channel import ShardChannel
from kvemb.config import ServersConfig
from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline
from kvemb.net.tls_files import TlsFiles
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import Empty
from kvemb.protocol.move_messages import LeftSessionsRequest, WatermarksReply, WatermarksRequest
from kvemb.protocol.shard_routing import MapSource

_NEWS_TIMEOUT_S = 1.0


class OtherShards:
    """Makes channels to them. Thread-safe.

    Args:
        maps: says which map is in force.
        servers: of kvemb.yaml.
    """

    def __init__(self, maps: MapSource, servers: ServersConfig) -> None:
        self._maps, self._in_file = maps, servers.shards
        self._tls = None if servers.tls is None else TlsFiles(servers.tls, "parameter_servers.tls")

    def address_of(self, shard: int) -> str:
        """Return where a shard is now."""
        return self._maps.cluster_map.shard_places(self._in_file)[shard]

    def channel(self, shard: int) -> ShardChannel:
        """Return a channel to where it is now, which the caller closes."""
        return ShardChannel(shard, self.address_of(shard), None, self._tls)

    def watermarks(self, shard: int, request: WatermarksRequest, deadline: Deadline) -> WatermarksReply:
        """Ask a shard that leaves what it has taken of each trainer."""
        return self._ask(shard, "Watermarks", request, deadline)

    def left(self, shard: int, deadline: Deadline) -> WatermarksReply:
        """Ask shard 0 what a shard that has left had taken of each trainer."""
        return self._ask(0, "LeftSessions", LeftSessionsRequest(shard), deadline)

    def _ask(self, shard: int, method: str, request: Message, deadline: Deadline) -> WatermarksReply:
        channel = self.channel(shard)
        try:
            return channel.call(method, request, WatermarksReply, deadline)
        finally:
            channel.close()


class MoveNews:
    """Has other shards look at once when the map, or a report, has changed. Nobody waits for them: without it they look a little later.

    The channels are kept while slots move. One thread.

    Args:
        others: makes channels to them.
    """

    def __init__(self, others: OtherShards) -> None:
        self._others = others
        self._channels: dict[int, ShardChannel] = {}

    def tell(self, shards: Iterable[int]) -> None:
        """Send them word."""
        for shard in shards:
            with suppress(KvembError):
                channel = self._channels.get(shard)
                if channel is None or channel.address != self._others.address_of(shard):
                    self.close(shard)
                    channel = self._channels[shard] = self._others.channel(shard)
                channel.start("MoveNews", Empty(), Deadline.after(_NEWS_TIMEOUT_S))

    def close(self, *shards: int) -> None:
        """Close the channels to these shards; to all where none is named."""
        for shard in shards or tuple(self._channels):
            if (channel := self._channels.pop(shard, None)) is not None:
                channel.close()
