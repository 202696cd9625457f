"""Sends keys of a slot from its source to its target by MIGRATE, in pieces of bounded size and at a bounded pace.

A MIGRATE that ran into a time-out may land late and put an old value over a newer one: before anything else is sent to the target, the
connections that it may come by are ended there.
"""

import time
from collections.abc import Mapping, Sequence

from kvemb.errors import NodeUnavailableError, ProtocolError, StorageError
from kvemb.stores.redis_cluster.scaling.admin_links import AdminLinks, key_bytes
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterNode
from kvemb.stores.redis_server.redis_commands import Word, shown
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.server_errors import server_error
from kvemb.wire.resp.resp_value import ErrorLine

_BYTES_AT_ONCE = 256 << 10  # in one MIGRATE, during which both servers do nothing else; a larger key goes alone
_PIPELINED = 4  # that a source runs without looking at its other clients; each waits for the target
_IDLE_MS = 1000  # that a server waits for the other in a MIGRATE, and serves no client meanwhile
_SLOWEST_BYTES_PER_S = 20e6  # of one large key
_MIGRATING = frozenset({"restore-asking", "NULL", "auth", "select", "restore"})
_TARGET_SAYS = b"-ERR Target instance replied with error: "
_TRIES = 3


class MigrationPace:
    """The pace of keys: so many bytes a second, or else half of the time, so that servers have the other half for their clients."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s

    def after(self, size_bytes: int, took_s: float) -> None:
        """Wait after a MIGRATE of that size."""
        time.sleep(max(0.0, size_bytes / self._bytes_per_s - took_s) if self._bytes_per_s else took_s)


class KeyMigration:
    """Sends keys from node to node."""

    def __init__(self, links: AdminLinks, access: RedisAccess, pace: MigrationPace) -> None:
        self._links, self._access, self._pace = links, access, pace
        self._timeout_s = access.config.timeout_s

    def run(self, runs: Sequence[Sequence[bytes]], source: ClusterNode, target: ClusterNode) -> None:
        """Migrate keys, of each slot in their order, in pieces of bounded size."""
        keys = [key for run in runs for key in run]
        usage: list[Sequence[Word]] = [("MEMORY", "USAGE", key) for key in keys]
        sizes = dict(zip(keys, key_bytes(self._links.run(source.address, usage, self._timeout_s)), strict=True))
        pieces = [piece for run in runs for piece in _pieces(run, sizes)]
        while pieces:
            n, n_bytes = 1, pieces[0][1]
            while n < len(pieces) and n < _PIPELINED and n_bytes + pieces[n][1] <= _BYTES_AT_ONCE:
                n_bytes += pieces[n][1]
                n += 1
            self._migrate_pieces(pieces[:n], n_bytes, source, target)
            pieces = pieces[n:]

    def _migrate_pieces(self, pieces: Sequence["_Piece"], n_bytes: int, source: ClusterNode, target: ClusterNode) -> None:
        begun_s, idle_ms = time.monotonic(), _idle_ms(n_bytes)
        commands = [self._command(keys, idle_ms, target) for keys, _ in pieces]
        answers = self._links.run(source.address, commands, self._timeout_s + 2 * len(pieces) * idle_ms / 1000)
        self._pace.after(n_bytes, time.monotonic() - begun_s)
        for (keys, size_bytes), answer in zip(pieces, answers, strict=True):
            if isinstance(answer, ErrorLine):
                self.end_late(target)
                self._migrate(keys, size_bytes, source, target)

    def _migrate(self, keys: Sequence[bytes], size_bytes: int, source: ClusterNode, target: ClusterNode) -> None:
        """Run one MIGRATE until it has succeeded or is refused for good."""
        option: tuple[Word, ...] = ()
        for attempt in range(_TRIES):
            begun_s, idle_ms = time.monotonic(), _idle_ms(size_bytes)
            answer = self._links.run(source.address, [self._command(keys, idle_ms, target, option)], self._timeout_s + 2 * idle_ms / 1000)[
                0
            ]
            self._pace.after(size_bytes, time.monotonic() - begun_s)
            if not isinstance(answer, ErrorLine):
                return
            if b"BUSYKEY" in answer.line and attempt < _TRIES - 1:
                # An unanswered try may have put a copy there. The owner's key is the one that counts, all along.
                option = ("REPLACE",)
            elif not answer.line.startswith(b"-IOERR") or attempt:  # the server's clients wait meanwhile: tried once more, not for ever
                raise self._refused(answer.line, source, target)
            self.end_late(target)

    def _command(self, keys: Sequence[bytes], idle_ms: int, target: ClusterNode, option: tuple[Word, ...] = ()) -> tuple[Word, ...]:
        return ("MIGRATE", target.host, target.port, "", 0, idle_ms, *option, *self._credentials(), "KEYS", *keys)

    def end_late(self, node: ClusterNode) -> None:
        """End the connections by which another node's MIGRATE may still come."""
        address = node.address
        (listing,) = self._links.run(address, [("CLIENT", "LIST")], self._timeout_s)
        if not isinstance(listing, bytes):
            raise ProtocolError(f"node {address}: CLIENT LIST answered {shown(listing)}, expected text")
        ids = []
        for line in listing.decode("utf-8", "replace").splitlines():
            words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
            if words.get("cmd") in _MIGRATING and not words.get("name") and words.get("id", "").isdigit():
                ids.append(words["id"])
        if ids:
            self._links.run(address, [("CLIENT", "KILL", "ID", one) for one in ids], self._timeout_s)

    def _credentials(self) -> tuple[Word, ...]:
        config = self._access.config
        if config.password is None:
            return ()
        return ("AUTH2", config.username, config.password) if config.username else ("AUTH", config.password)

    def _refused(self, line: bytes, source: ClusterNode, target: ClusterNode) -> StorageError:
        if line.startswith(_TARGET_SAYS):
            error = server_error(target.address, b"-" + line.removeprefix(_TARGET_SAYS))
        elif line.startswith(b"-IOERR"):
            error = NodeUnavailableError(
                f"node {target.address}: does not answer node {source.address}, which has keys for it "
                f"({line.decode('ascii', 'replace')}). No row is lost. Start it again, then `kvemb moves resume`, or `kvemb moves abort`."
            )
        else:
            error = server_error(source.address, line)
        return error if isinstance(error, StorageError) else ProtocolError(str(error))


_Piece = tuple[list[bytes], int]
"""Keys of one slot, and how many bytes they are."""


def _pieces(keys: Sequence[bytes], sizes: Mapping[bytes, int]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for key in keys:
        if pieces and pieces[-1][1] + sizes[key] <= _BYTES_AT_ONCE:
            pieces[-1] = ([*pieces[-1][0], key], pieces[-1][1] + sizes[key])
        else:
            pieces.append(([key], sizes[key]))
    return pieces


def _idle_ms(size_bytes: int) -> int:
    return _IDLE_MS + int(1000 * size_bytes / _SLOWEST_BYTES_PER_S)
