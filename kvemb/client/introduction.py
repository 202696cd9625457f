"""How a trainer introduces itself to the shards: at its first push, to one whose connection broke, and its goodbye."""

from collections.abc import Callable
from contextlib import suppress

from kvemb.client.all_shards import AllShards
from kvemb.client.push_sender import PushSender, ShardLeftError
from kvemb.errors import KvembError, PushRejectedError, ShardFailedError, ShardUnavailableError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import BYE, HELLO, LEFT_SESSION, ByeRequest, HelloReply, HelloRequest, LeftSessionRequest

BYE_TIMEOUT_S = 2.0
_LOOK_TIMEOUT_S = 1.0


class Introduction:
    """One trainer's hellos. `say` under the session's lock, the rest for any thread.

    Attributes:
        said: whether all shards have heard hello, and not yet goodbye.
        incarnation: the one in force, 0 before.
    """

    def __init__(self, servers: AllShards, cluster_id: bytes, trainer: str, *, sync: bool) -> None:
        self._servers, self._cluster_id, self.trainer, self._sync = servers, cluster_id, trainer, sync
        self.incarnation, self.said = 0, False

    def say(self, deadline: Deadline) -> dict[int, HelloReply]:
        """Say hello to all shards; shard 0 issues the incarnation, the others are told."""
        first = self._servers.call(0, HELLO, self._request(), deadline)
        self.incarnation = first.incarnation
        others = dict.fromkeys((shard for shard in self._servers.numbers if shard), self._request())
        replies = {0: first, **self._servers.call_each(HELLO, others, deadline)}
        self.said = True
        for reply in replies.values():
            self._servers.heard(reply.tables_serial, reply.load_serial)
        return replies

    def again_to(self, shard: int, stream: Callable[[int], PushSender]) -> Callable[[Deadline], HelloReply]:
        """Return the hello after a broken connection to one shard, whose stream the other function returns."""

        def hello(deadline: Deadline) -> HelloReply:
            if shard not in self._servers.numbers:  # it has applied all parts that it took: it had drained when it left the cluster
                request = LeftSessionRequest(shard, self.trainer, self.incarnation)
                raise ShardLeftError(self._servers.call(0, LEFT_SESSION, request, deadline).last_sequence)
            try:
                reply = self._servers.call(shard, HELLO, self._request(), deadline)
                where = stream(shard).where  # and it sends where this was asked
                if (reply.mode == "sync") != self._sync:  # a push would stop it for good; started again in order it takes them
                    raise ShardUnavailableError(
                        f"{where} was started in mode {reply.mode}, and this job runs in the other one. Start it "
                        "again with the kvemb.yaml of the others (parameter_servers.mode); pushes wait for it"
                    )
                self._servers.heard(reply.tables_serial, reply.load_serial)
                return reply
            except ShardUnavailableError:
                with suppress(StorageError):
                    self._servers.refresh_map(Deadline.after(_LOOK_TIMEOUT_S))  # it may have left the cluster while we slept
                raise
            except PushRejectedError as error:
                raise ShardFailedError(
                    f"{stream(shard).where} was restarted and does not know this trainer any more: {error}. What it had "
                    "acknowledged and not applied is lost there. Close this cluster and connect again to go on from the rows "
                    "in storage."
                ) from error

        return hello

    def say_bye(self) -> None:
        """Say goodbye to all shards: one whose idle stream has ended awaits us, too, and a new one has heard of us from the others."""
        if self.said:
            self.said = False
            with suppress(KvembError):
                self._servers.try_each(BYE, ByeRequest(self.trainer, self.incarnation), Deadline.after(BYE_TIMEOUT_S))

    def _request(self) -> HelloRequest:
        return HelloRequest(self.trainer, self.incarnation, self._cluster_id, self._servers.cluster_map.serial)
