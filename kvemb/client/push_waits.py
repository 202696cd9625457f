"""What one trainer waits for: that its pushes are accepted or applied. And the failures of pushes that no call has raised yet."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvemb.client.ack import Ack, copied, waits_s
from kvemb.client.all_shards import AllShards
from kvemb.client.push_sender import PushSender
from kvemb.errors import FencedError, KvembError, ShardFailedError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import GET_STATUS, Empty

_Wait = Callable[[PushSender, Deadline], None]


class PushWaits:
    """Waits for one trainer's pushes, over all streams. Thread-safe.

    Args:
        streams: to the shards; more may come.
        n_rerouted: how many pushes were routed again so far.
    """

    def __init__(self, servers: AllShards, streams: Mapping[int, PushSender], n_rerouted: Callable[[], int]) -> None:
        self._servers, self._streams, self._n_rerouted = servers, streams, n_rerouted
        self.failed: list[Ack] = []
        self._last_failed: Ack | None = None
        self._failed_lock = threading.Lock()

    def wait(self, wait: _Wait, deadline: Deadline) -> None:
        """Wait for each stream, and raise what has failed."""
        try:
            self._wait_streams(wait, deadline)
        except (FencedError, ShardFailedError):
            self.raise_unseen()  # the same failure, and now its ack counts as seen
            raise
        self.raise_unseen()

    def wait_at_close(self, deadline: Deadline) -> None:
        """Wait until everything sent is accepted; what a caller knows of is not raised again."""
        try:
            self._wait_streams(PushSender.wait_accepted, deadline)
        except (FencedError, ShardFailedError):
            self.raise_unseen()
            if self._last_failed is None:  # otherwise a caller that waited for a push of this failure knows of it already
                raise
        else:
            self.raise_unseen()

    def undelivered(self) -> list[Ack]:
        """The pushes that not every shard has accepted, without those whose failure a caller was told of."""
        with self._failed_lock:
            failed = [ack for ack in self.failed if not ack.failure_seen]
        waiting = [ack for stream in list(self._streams.values()) for ack in stream.unaccepted()]
        return list(dict.fromkeys([*failed, *waiting]))

    def raise_unseen(self) -> None:
        """Raise the failure of a push that no caller waited for, if there is one."""
        with self._failed_lock:
            failed, self.failed = self.failed, []
        errors = [error for error in (ack.take_error() for ack in failed) if error is not None]
        if errors:
            error = copied(errors[0])
            error.add_note("An earlier push failed, and no call had waited for it; the call that raised this did nothing.")
            if len(errors) > 1:
                error.add_note(f"{len(errors) - 1} more pushes have failed since.")
            raise error

    def note_failure(self, ack: Ack) -> None:
        """Keep a push that has failed until its failure was raised."""
        with self._failed_lock:
            self.failed.append(ack)
            self._last_failed = ack

    def trouble(self, shard: int, deadline: Deadline) -> str:
        """Why a shard is late, as far as its stream and it itself can tell; asked only when a caller's time is nearly up."""
        told = [stream.trouble] if (stream := self._streams.get(shard)) is not None else []
        with suppress(KvembError):  # when it does not answer, the stream's own word must do
            reply = self._servers.call(shard, GET_STATUS, Empty(), deadline)
            told = [f"it is starting: {reply.starting}"] if reply.starting else [*told, reply.failure]
            told = [*filter(None, told)] or [reply.step]
        return "; ".join(filter(None, told))

    def _wait_streams(self, wait: _Wait, deadline: Deadline) -> None:
        self._servers.check_usable()
        with suppress(ShardUnavailableError):
            self._wait_each(wait, deadline.within(waits_s(deadline)))
            return
        causes = {str(channel): self.trouble(shard, deadline) for shard, channel in self._servers.channels.items()}
        known = "; ".join(f"{where} says: {cause}" for where, cause in causes.items() if cause)
        try:
            self._wait_each(wait, deadline)
        except ShardUnavailableError as error:
            raise ShardUnavailableError(f"{error}{'. ' + known if known else ''}") from error

    def _wait_each(self, wait: _Wait, deadline: Deadline) -> None:
        before = -1
        while before != self._n_rerouted():  # parts routed again may be with a stream whose wait is over
            before = self._n_rerouted()
            for stream in list(self._streams.values()):
                wait(stream, deadline)
