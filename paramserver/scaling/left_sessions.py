"""The sessions of shards that leave, kept in shard 0's folder: for trainers whose answers were still on their way.

Shard 0 asks for them when the shard has drained, and they are durable before the map says that it has left. From then on it takes nothing.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgpack

from kvemb.client.all_shards import AllShards
from kvemb.errors import KvembError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.scaling.move_messages import WATERMARKS, WatermarksRequest

from ..ingest.sessions import pack_sessions, sessions_in
from ..recovery.shard_parts import ShardParts

FILE = "left-sessions"
log = logging.getLogger("paramserver")


def _together(older: bytes, newer: bytes) -> bytes:
    """Add to a shard's sessions those of its number's owner before, for trainers that slept meanwhile."""
    found = {
        trainer: (trainer, incarnation, sequence) for packed in (older, newer) for trainer, incarnation, sequence in sessions_in(packed)
    }
    return pack_sessions(sorted(found.values(), key=lambda session: session[1:]))


class LeftSessions:
    """The sessions of every shard that has left. `keep` is for one thread, `find` for any."""

    def __init__(self, parts: ShardParts, shards: AllShards) -> None:
        self._data, self._still_ours, self._shards = parts.data, parts.claim.require, shards

    def keep(self, shards: Sequence[int], version: int, deadline: Deadline) -> bool:
        """Have the sessions of shards that are about to leave, by the map of this version; return whether all are here, durably."""
        kept = self._kept()
        for shard in shards:
            if kept.get(shard, [0])[0] == version:
                continue
            try:
                reply = self._shards.call(shard, WATERMARKS, WatermarksRequest(version), deadline)
            except KvembError as error:
                log.warning("shard %d does not say yet what it has taken of trainers: %s", shard, error)
                return False
            if not reply.ready:
                return False
            kept[shard] = [version, _together(kept[shard][1], reply.sessions) if shard in kept else reply.sessions]
            self._data.write(FILE, [msgpack.packb(kept)], check=self._still_ours)
        return True

    def find(self, shard: int, trainer: str, incarnation: int) -> int:
        """Return the last part that a shard which has left had taken of a trainer, 0 for none.

        Raises:
            ParameterServerError: nothing was kept of that shard.
        """
        kept = self._kept()
        if shard not in kept:
            raise ParameterServerError(f"nothing is known of what shard {shard} had taken of trainers: it has not left")
        return next((last for *session, last in sessions_in(kept[shard][1]) if session == [trainer, incarnation]), 0)

    def all_of(self, shard: int) -> bytes:
        """Return the sessions of a shard that has left, for its number's next owner; of one that never had a slot there are none."""
        kept = self._kept()
        return bytes(kept[shard][1]) if shard in kept else pack_sessions(())

    def _kept(self) -> dict[int, list[Any]]:
        raw = self._data.read(FILE)
        return {} if raw is None else msgpack.unpackb(raw, strict_map_key=False)
