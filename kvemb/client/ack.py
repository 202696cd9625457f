"""The acknowledgement of one push, and its staleness. No gRPC here; the push streams report into it.

A push is one or more parts on each shard it goes to. Thread-safe; waiting makes sense in the process that pushed only.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvemb.datapath.prefetched_rows import ChangedRows, PrefetchedRows, changed_rows_of, join_changed_rows
from kvemb.errors import KvembError, ShardUnavailableError
from kvemb.net.deadline import SAY_AFTER_S, Deadline, checked_timeout
from kvemb.protocol.message_format import ChangedRowsBlock

DEFAULT_TIMEOUT_S = 30.0  # of one question to the shards
_ASK_S = 1.0  # of a wait, for asking why it was in vain


@dataclass(frozen=True)
class Staleness:
    """How old the weights were that a push's gradients were computed from.

    Args:
        changed_fraction: of the pushed rows, those changed between the pull and the apply; shards count by their rows.
        batches_elapsed: batches between the pull and the apply, on the worst shard. They count from the newest that the pulled rows had
            seen to the newest that changed one of them; 0 where none changed.
    """

    changed_fraction: float
    batches_elapsed: int


@dataclass(eq=False)
class PartAck:
    """One part on its way; owned by the push stream of its shard.

    Args:
        where: shard and address, for messages.
        n_rows: rows in it.
        trouble: returns the stream's trouble at the moment, or ""; within the deadline.
        say_trouble: says in the log why the shard does not get on, if it does not.
        prefetched: the rows that it asked about, which the trainer holds for later steps.
        changed_rows: as its answer has them; empty while and where they are not known.
        released: whether its batch is computed; always so once it is applied.
        held_back: how many of its rows the tables' admission held back.
        refused: whether its shard has refused it, and no other has taken its place.
    """

    where: str
    n_rows: int
    trouble: Callable[[Deadline], str] = lambda deadline: ""
    say_trouble: Callable[[Deadline], None] = lambda deadline: None
    prefetched: Sequence[PrefetchedRows] = ()
    changed_rows: Sequence[ChangedRowsBlock] = ()
    accepted: bool = False
    released: bool = False
    applied: bool = False
    held_back: int = 0
    refused: bool = False


class Ack:
    """The result of `push`: wait on it, or ignore it (a failure then raises at the next push, flush or close).

    One class, although programs wait on it and streams report into it: both look at the same parts under the same lock.

    Args:
        what: the push's name in messages.
        parts: all its parts.
        on_failure: called once, with this ack, when a part fails.
        timeout_s: of its waits that are given none.
    """

    def __init__(
        self,
        what: str,
        parts: list[PartAck],
        on_failure: Callable[["Ack"], None] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._what, self._parts, self._on_failure, self._timeout_s = what, parts, on_failure, timeout_s
        self.window_s = 0.0
        """Seconds that `push` waited before it sent anything, because the shards had not taken what was pushed before."""
        self._changed = threading.Condition()
        self._error: KvembError | None = None
        self._seen = False
        self._moved_rows, self._versioned_rows, self._elapsed = 0.0, 0, 0

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every shard has accepted its part: it is in the shard's journal and will be applied exactly once.

        In sync mode a shard accepts a step as a whole, when all trainers' parts of it are in.

        Args:
            timeout_s: seconds; as long as a shard may be away (`parameter_servers.away_timeout_s`) unless given.

        Raises:
            ShardUnavailableError: not within the time. Parts may have been accepted, and those that were not are sent again until
                the cluster is closed, so waiting again is fine.
            KvembError: a shard refused its part, in the class that says why. Other shards may have accepted theirs.
        """
        self._wait(lambda part: part.accepted, "accepted", timeout_s)

    def wait_applied(self, timeout_s: float | None = None) -> None:
        """Return when every shard has applied its part: every client's next pull sees it. Raises as `wait` does."""
        self._wait(lambda part: part.applied, "applied", timeout_s)

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Return when `changed_rows` and `staleness` are known. Raises as `wait` does.

        For a push with prefetched rows (`Cluster.push(prefetched=...)`) that is as soon as every shard has computed its part. It is in
        the shard's journal then; storage may not have it yet. This connection's pulls wait until it has. Those of others see it a little
        later. For any other push it is when the push is applied.
        """
        self._wait(lambda part: part.released, "released", timeout_s)

    def wait_settled(self, timeout_s: float) -> None:
        """Return when it is applied, or has failed: the failure is raised elsewhere.

        Raises:
            ShardUnavailableError: neither within the time.
        """
        self._wait_until(lambda part: part.applied, "applied", timeout_s)

    def wait_answered(self, timeout_s: float) -> None:
        """Return when every shard has accepted its part, or one has refused it, or the time is up; does not say which."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or all(part.accepted for part in self._parts), timeout_s)

    @property
    def n_rows(self) -> int:
        """Rows pushed, over all tables."""
        return sum(part.n_rows for part in self._parts)

    @property
    def held_back(self) -> int:
        """How many of the rows the tables' admission held back: their gradients train nothing. Known once the push is released, or applied.

        A shard that was killed in between does not know it any more: its rows then count as not held back.
        """
        return sum(part.held_back for part in self._parts)

    @property
    def accepted(self) -> bool:
        """Whether every shard has accepted its part."""
        with self._changed:
            return all(part.accepted for part in self._parts)

    @property
    def applied(self) -> bool:
        """Whether every shard has applied its part."""
        with self._changed:
            return all(part.applied for part in self._parts)

    @property
    def released(self) -> bool:
        """Whether every shard has computed its part (see `wait_released`), or the push has failed."""
        with self._changed:
            return self._error is not None or all(part.released for part in self._parts)

    @property
    def settled(self) -> bool:
        """Whether every shard has applied its part, or the push has failed."""
        with self._changed:
            return self._error is not None or all(part.applied for part in self._parts)

    @property
    def staleness(self) -> Staleness | None:
        """How stale the push was; None until it is released, and when it carried no versions."""
        with self._changed:
            if self._versioned_rows == 0 or not all(part.released for part in self._parts):
                return None
            return Staleness(self._moved_rows / self._versioned_rows, self._elapsed)

    @property
    def changed_rows(self) -> Mapping[str, ChangedRows] | None:
        """Those of the push's prefetched rows (`Cluster.push(prefetched=...)`) that this step changed, by table, right after it.

        A table of which nothing changed is there with no rows; `{}` for a push without prefetched rows. The arrays may be read-only.

        None until the push is released. None, too, where a shard could not say, because the connection broke before its answer came, or
        storage did not give it the rows: then pull them again before the next push.
        """
        with self._changed:
            if not all(part.released for part in self._parts):
                return None
            parts = [(part.prefetched, part.changed_rows) for part in self._parts if part.prefetched]
        if not all(changed_rows for _, changed_rows in parts):
            return None
        found: dict[str, list[ChangedRows]] = {}
        for prefetched, changed_rows in parts:
            for rows, got in zip(prefetched, changed_rows, strict=True):
                found.setdefault(rows.definition.name, []).append(changed_rows_of(rows, got))
        return {name: join_changed_rows(every) for name, every in found.items()}

    def take_error(self) -> KvembError | None:
        """Return the failure that no caller has been told of, once."""
        with self._changed:
            if self._error is None or self._seen:
                return None
            self._seen = True
            return self._error

    @property
    def failed(self) -> bool:
        """Whether a shard has refused its part."""
        with self._changed:
            return self._error is not None

    @property
    def failure_seen(self) -> bool:
        """Whether the push failed and a caller has been told."""
        with self._changed:
            return self._error is not None and self._seen

    def replace_parts(self, moved: Sequence[PartAck], by: Sequence[PartAck]) -> None:
        """Let other parts take the place of those that were refused. Called by the session."""
        gone = {id(part) for part in moved}
        with self._changed:
            self._parts = [part for part in self._parts if id(part) not in gone] + list(by)
            for part in moved:
                part.refused = False
            self._changed.notify_all()

    def consists_of(self, parts: Sequence[PartAck]) -> bool:
        """Whether these are all its parts. Called by the session."""
        with self._changed:
            return {id(part) for part in self._parts} == {id(part) for part in parts}

    def is_taken(self, deadline: Deadline) -> bool:
        """Whether a shard has taken a part of it, although others have refused theirs; waits until that is known. Called by the session.

        Raises:
            ShardUnavailableError: it is not known within the deadline; ask again.
        """

        def known() -> bool:
            return self._error is not None or any(part.accepted for part in self._parts) or all(part.refused for part in self._parts)

        with self._changed:
            if self._changed.wait_for(known, deadline.remaining_s()):
                return self._error is None and any(part.accepted for part in self._parts)
            late = ", ".join(sorted({part.where for part in self._parts if not part.refused}))
        raise ShardUnavailableError(f"{self._what}: was refused by a shard, and whether others have taken it is not known yet: {late}")

    def part_refused(self, part: PartAck) -> None:
        """A shard has refused a part, which goes anew where the others have taken theirs. Called by its push stream."""
        with self._changed:
            part.refused = True
            self._changed.notify_all()

    def part_accepted(self, part: PartAck) -> None:
        """A shard has accepted a part. Called by its push stream."""
        with self._changed:
            part.accepted = True
            self._changed.notify_all()

    def part_computed(self, part: PartAck, changed: float, elapsed: int, rows: Sequence[ChangedRowsBlock] = (), *, applied: bool) -> None:
        """A shard has computed a part, and perhaps applied it; `changed` is -1 when it carried no versions. Called by its push stream."""
        with self._changed:
            if not part.released:  # a later answer does not have the rows any more
                part.accepted = part.released = True
                part.changed_rows = rows
                if changed >= 0 and part.n_rows:
                    self._moved_rows += changed * part.n_rows
                    self._versioned_rows += part.n_rows
                    self._elapsed = max(self._elapsed, elapsed)
            part.applied |= applied
            self._changed.notify_all()

    def part_failed(self, error: KvembError) -> None:
        """A part will never be applied. Called by its push stream."""
        with self._changed:
            first, self._error = self._error is None, self._error or error
            self._changed.notify_all()
        if first and self._on_failure is not None:
            self._on_failure(self)

    def _wait(self, done: Callable[[PartAck], bool], state: str, timeout_s: float | None) -> None:
        self._wait_until(done, state, self._timeout_s if timeout_s is None else checked_timeout(timeout_s))
        with self._changed:
            if self._error is not None:
                self._seen = True
                raise copied(self._error)

    def _wait_until(self, done: Callable[[PartAck], bool], state: str, timeout_s: float) -> None:
        """Wait until all parts are done, or the push has failed. Late shards are asked why: after a while, and before the time is up."""
        deadline = Deadline.after(timeout_s)
        if waits_s(deadline) > SAY_AFTER_S:
            for part in {part.where: part for part in self._late(done, SAY_AFTER_S)}.values():
                part.say_trouble(deadline)
        asked = self._late(done, waits_s(deadline))
        why = {where: part.trouble(deadline) for where, part in {part.where: part for part in asked}.items()}
        if asked and (late := self._late(done, deadline.remaining_s())):
            troubles = {part.where: why.get(part.where, "") for part in late}
            if all(trouble.startswith("step ") for trouble in troubles.values()):  # of `StatusReply.step`: no shard is to blame
                raise ShardUnavailableError(f"{self._what}: not {state} within {timeout_s:.3g} s: {next(iter(troubles.values()))}")
            shards = ", ".join(f"{where}{f' ({trouble})' if trouble else ''}" for where, trouble in troubles.items())
            raise ShardUnavailableError(f"{self._what}: not {state} within {timeout_s:.3g} s by {shards}")

    def _late(self, done: Callable[[PartAck], bool], timeout_s: float) -> list[PartAck]:
        """Return the parts that are not done within the time; none when the push has failed."""
        with self._changed:
            over = self._changed.wait_for(lambda: self._error is not None or all(done(part) for part in self._parts), timeout_s)
            return [] if over else [part for part in self._parts if not done(part)]

    def __repr__(self) -> str:
        reached = [state for state in ("applied", "released", "accepted") if getattr(self, state)]
        state = "failed" if self._error else next(iter(reached), "sent")
        return f"<Ack of {self._what}: {state}>"


def waits_s(deadline: Deadline) -> float:
    """How long to wait for shards, so that those that are late can still be asked why."""
    return deadline.remaining_s() - min(_ASK_S, deadline.remaining_s() / 5)


def copied(error: KvembError) -> KvembError:
    """Return a copy to raise, so that raising it twice does not pile up tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
