"""One trainer's session with all shards: its identity, its numbered pushes, and the failures not raised yet.

The trainer says hello at its first push (in sync mode it takes its place then): shard 0 issues the incarnation, the others are told. Pushes
go out one at a time, so that every shard sees them in the same order. Thread-safe; lives in the process that made it.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from kvemb.client.ack import DEFAULT_TIMEOUT_S, Ack, PartAck
from kvemb.client.all_shards import AllShards
from kvemb.client.introduction import Introduction
from kvemb.client.outbox import RefusedPush, put_together
from kvemb.client.part_numbering import PartNumbering, Serials, send, shares
from kvemb.client.push_sender import PushSender, ShardLeftError
from kvemb.client.push_waits import PushWaits
from kvemb.datapath.prefetched_rows import PrefetchedRows, route_prefetched
from kvemb.datapath.push import gradients_of_now
from kvemb.errors import FrozenTableError, KvembError, ShardUnavailableError, StorageError, TableAlteredError, TableDroppedError
from kvemb.net.deadline import Deadline, pauses
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import GET_TABLE, TableRequest
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef

_REROUTE_TIMEOUT_S = 5.0
_JOIN_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class PushSession:
    """Sends one trainer's pushes to all shards, each under the next sequence.

    One class, because pushes and those that are routed again take their sequences under the same lock.
    """

    def __init__(
        self,
        servers: AllShards,
        cluster_id: bytes,
        trainer: str,
        *,
        sync: bool,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._servers, self.trainer, self.sync = servers, trainer, sync
        self._sending = threading.Lock()
        self._streams: dict[int, PushSender] = {}
        self._introduction = Introduction(servers, cluster_id, trainer, sync=sync)
        self._waits = PushWaits(servers, self._streams, lambda: self._n_rerouted)
        self._numbers = PartNumbering(
            servers, self._streams, self._introduction, trouble=self._waits.trouble, refused=self._route_again_soon, sync=sync
        )
        self._heard: dict[int, frozenset[int]] = {}  # by a map's shards_serial: the shards that hear of every push of a sync job
        self._rerouting: threading.Thread | None = None
        self._rerouting_lock = threading.Lock()
        self._n_rerouted = 0
        self._map_serial = 0  # of the shards that the last push was routed by
        self._closed = threading.Event()

    def push(self, tables: Sequence[TableRows], deadline: Deadline, prefetched: Sequence[PrefetchedRows] = ()) -> Ack:
        """Send a push.

        Raises:
            ShardUnavailableError: a shard could not be reached or its window stayed full; nothing of the push was sent.
            KvembError: an earlier push failed and no caller waited for it (its error), or the session has ended (FencedError,
                ShardFailedError); nothing of this push was sent.
        """
        self._servers.check_usable()
        if not self._sending.acquire(timeout=deadline.remaining_s()):
            raise ShardUnavailableError(f"another thread's push still waits for room after {deadline.timeout_s:g} s")
        try:
            if self._waits.failed:
                self.raise_unseen()
            if not self._introduction.said:
                self._numbers.begin(self._introduction.say(deadline))
            if self._numbers.behind:
                self._numbers.catch_up(self._ack, deadline)
            cluster_map = self._follow_map(deadline)
            if self._waits.failed:  # an earlier push was found refused just now
                self.raise_unseen()
            wanted = shares(tables, cluster_map, cluster_map.writing_shards if self.sync else ())
            prefetched_of = route_prefetched(prefetched, cluster_map) if prefetched else []
            began_s = time.monotonic()
            for shard in wanted:
                self._numbers.stream(shard).wait_room(deadline)
            window_s = time.monotonic() - began_s
            self._numbers.step += 1
            serials = Serials(cluster_map.shards_serial, self._servers.tables_serial, self._servers.load_serial)
            numbered = self._numbers.number(wanted, prefetched_of, self._numbers.step, serials)
            ack = self._ack(f"push {self._numbers.step}", [one.part for one in numbered])
            send(numbered, ack)
            ack.window_s = window_s
            return ack
        finally:
            self._sending.release()

    def take_place(self, deadline: Deadline) -> None:
        """Say hello to all shards now, and not at the first push; raises as `push` does."""
        self._servers.check_usable()
        if not self._sending.acquire(timeout=deadline.remaining_s()):
            raise ShardUnavailableError(f"another thread's push still waits for room after {deadline.timeout_s:g} s")
        try:
            if not self._introduction.said:
                self._numbers.begin(self._introduction.say(deadline))
        finally:
            self._sending.release()

    def wait_accepted(self, deadline: Deadline) -> None:
        """Wait until everything sent is accepted; raises as `wait_applied` does."""
        self._waits.wait(PushSender.wait_accepted, deadline)

    def wait_applied(self, deadline: Deadline) -> None:
        """Wait until everything sent is applied."""
        self._waits.wait(PushSender.wait_applied, deadline)

    def undelivered(self) -> list[Ack]:
        """See `PushWaits.undelivered`."""
        return self._waits.undelivered()

    def raise_unseen(self) -> None:
        """See `PushWaits.raise_unseen`."""
        self._waits.raise_unseen()

    def close(self, deadline: Deadline | None) -> None:
        """Wait until everything sent is accepted (not at all without a deadline), say goodbye, end the streams."""
        if self._servers.forked:
            return
        try:
            if deadline is not None:
                self._waits.wait_at_close(deadline)
        finally:
            self._closed.set()
            if (rerouting := self._rerouting) is not None:
                rerouting.join(_JOIN_S)
            self._introduction.say_bye()
            for stream in list(self._streams.values()):
                stream.close()

    def _ack(self, what: str, parts: list[PartAck]) -> Ack:
        return Ack(f"{what} of trainer {self.trainer!r}", parts, self._waits.note_failure, self._timeout_s)

    # --- parts that were refused, and go anew ---------------------------------------------------------------------------------------

    def _follow_map(self, deadline: Deadline) -> ClusterMap:
        """Return the map to route by. Parts routed by an earlier map are with their shards, or routed again, before any goes by this one.

        This waits for answers that do not depend on the other trainers of a sync job: before slots change their shard, all shards have
        handed out the same steps, and each refuses the rest.
        """
        while True:
            cluster_map = self._servers.cluster_map
            refused = self._refused() if any(stream.refused for stream in self._streams.values()) else []
            same = cluster_map.shards_serial == self._map_serial and not any(push.moved for push in refused)
            if same and not refused:
                return cluster_map
            for stream in list(self._streams.values()):
                (stream.wait_level if same else stream.wait_answered)(deadline)
            refused = self._refused()
            if moved := [push.serial for push in refused if push.moved]:
                cluster_map = self._newer_map(max(moved), deadline)
            if not all(self._send_anew(push, cluster_map, deadline) for push in refused):
                continue
            self._map_serial = cluster_map.shards_serial
            self._heard[self._map_serial] = cluster_map.writing_shards

    def _refused(self) -> list[RefusedPush]:
        """The pushes of which shards have refused parts that may go anew, in the order in which they were made."""
        return put_together((shard, sent) for shard, stream in list(self._streams.items()) for sent in stream.refused)

    def _send_anew(self, push: RefusedPush, cluster_map: ClusterMap, deadline: Deadline) -> bool:
        """Send the refused parts of a push under new sequences, by the map and tables in force; or let it fail, if nothing of it was taken.

        Returns:
            Whether that was done; else more of its parts have been refused since: they go together.
        """
        taken = push.outdated and push.ack.is_taken(deadline)
        if push.outdated and not taken and (push.closed is not None or push.ack.failed):
            self._fail_refused(push, push.closed or push.refusals[0])
            return True
        if push.outdated and not taken and not push.ack.consists_of(push.parts):
            return False
        by_load = push.outdated and push.closed is None
        for shard in push.shards if by_load and self._servers.load_serial <= push.load_serial else ():
            with suppress(ShardLeftError):
                self._introduction.again_to(shard, self._numbers.stream)(deadline)  # which load it has carried out: as it joined, say
        writing = cluster_map.writing_shards
        # Of a sync job's step the others have their part: it goes to those that refused theirs, and to those that have joined since.
        missed = (
            push.shards if push.step <= self._numbers.inherited else push.shards | (writing - self._heard.get(push.serial, frozenset()))
        )
        serials = Serials(cluster_map.shards_serial, push.tables_serial, self._servers.load_serial if push.outdated else push.load_serial)
        try:
            tables = self._of_now(push, serials.load, deadline) if taken else push.tables
            wanted = shares(tables, cluster_map, writing & missed if self.sync else ())
            if taken and self.sync and not wanted.keys() <= missed:  # a shard has one part of each step
                raise FrozenTableError("its rows are those of other shards now")
        except FrozenTableError as error:
            self._fail_refused(push, _taken_in_part(push, error))
            return True
        prefetched_of = route_prefetched(push.prefetched, cluster_map) if push.prefetched and not taken else []
        numbered = self._numbers.number(wanted, prefetched_of, push.step, serials)
        push.ack.replace_parts(push.parts, [one.part for one in numbered])
        send(numbered, push.ack)
        self._forget_refused(push)
        return True

    def _of_now(self, push: RefusedPush, load_serial: int, deadline: Deadline) -> list[TableRows]:
        """The rows of a push that other shards have taken, by the definitions in force, without those of tables that are gone or loaded."""
        found = list[TableRows]()
        for rows in push.tables:
            with suppress(TableDroppedError):  # what the other shards had taken is gone, too
                reply = self._servers.call(0, GET_TABLE, TableRequest(rows.table, rows.schema), deadline)
                if not push.load_serial < reply.load_serial <= load_serial:
                    found.append(gradients_of_now(rows, TableDef.from_dict(reply.table)))
        return found

    def _fail_refused(self, push: RefusedPush, error: KvembError) -> None:
        push.ack.part_failed(error)
        self._forget_refused(push)

    def _forget_refused(self, push: RefusedPush) -> None:
        self._n_rerouted += 1
        for shard in push.shards:
            self._streams[shard].resent(push.parts)

    def _newer_map(self, serial: int, deadline: Deadline) -> ClusterMap:
        if self._servers.cluster_map.shards_serial > serial:
            return self._servers.cluster_map
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            with suppress(StorageError):
                self._servers.refresh_map(deadline)
            if (cluster_map := self._servers.cluster_map).shards_serial > serial:
                return cluster_map
            if deadline.expired or self._closed.wait(pause_s):
                break
        raise ShardUnavailableError(
            f"shards refused rows that were routed by the cluster map of serial {serial}, and the nodes have no newer one yet; nothing of "
            "them was taken"
        )

    def _route_again_soon(self) -> None:
        """Have a thread do it, unless one is at it: perhaps no caller pushes now, and acks are waited for."""
        with self._rerouting_lock:
            if self._rerouting is None:
                thread = threading.Thread(target=self._keep_routing, name="kvemb-reroute", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending: refused parts are told as undelivered
                    thread.start()
                    self._rerouting = thread

    def _keep_routing(self) -> None:
        while not self._closed.is_set():
            with self._rerouting_lock:
                if not any(stream.refused for stream in list(self._streams.values())):
                    self._rerouting = None
                    return
            try:
                with self._sending:
                    self._follow_map(Deadline.after(_REROUTE_TIMEOUT_S))
            except KvembError:  # tried again; a caller that waits for an ack asks the shards why
                self._closed.wait(_LONGEST_PAUSE_S)


def _taken_in_part(push: RefusedPush, why: KvembError) -> KvembError:
    shards = ", ".join(map(str, sorted(push.shards)))
    return TableAlteredError(
        f"{push.closed} Of this push the rows of shard {shards} were refused, and those of the other shards were taken before: {why}"
    )
