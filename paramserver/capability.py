"""What a capability brings to a shard beside pull and push. The kernel knows capabilities by these hooks alone; `capabilities` lists them.

A capability that needs another hook than these belongs into the kernel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvemb.protocol.verb import Handled, Verb

from .apply.background import Job
from .apply.committer import Committer, Judge
from .apply.shard_events import ShardEvents
from .journal.write_ahead_log import AppliedMark
from .recovery.shard_parts import ShardParts, StartingShard
from .row_log.log_flush import FlushSchedule

if TYPE_CHECKING:
    from kvemb.process.metrics import MetricFamilies

    from .engine.storage_pace import Pause

MAX_SUBSCRIBERS = 32
"""Of streams of one shard that `Capability.serving` answers."""
Stream = Callable[[bytes, Any], Iterator[bytes]]
"""(request, gRPC's context) -> encoded replies until the call is over."""


@dataclass(frozen=True)
class ShardKernel:
    """What a capability gets of the shard that it is part of.

    Args:
        wake: wakes the apply thread, so that it looks at the jobs.
        on_load: called once when the shard is to start again; None where no caller would start it.
        capabilities: all of the shard; not before each of them is made.
    """

    parts: ShardParts
    mark: AppliedMark
    events: ShardEvents
    committer: Committer
    flushes: FlushSchedule
    wake: Callable[[], None]
    on_load: Callable[[], None] | None
    capabilities: Callable[[], Sequence["Capability"]]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keep slots with their shards while a block runs; MoveRefusedError where they are on their way."""
        with ExitStack() as stack:
            for one in self.capabilities():
                stack.enter_context(one.still())
            yield


class StartStep(Protocol):
    """What a capability does while a shard starts."""

    def how_far(self) -> tuple[int, int]:
        """Rows done, and of about how many. Any thread."""

    def read(self) -> None:
        """Change the saved state, before it is read; called if nothing is in the journal after it."""

    def finish(self, parts: ShardParts) -> None:
        """Do what needs the recovered shard; StartAgainError: all is to be done again, from the saved state that there is now."""


class Capability:
    """One thing that a shard can do. Any thread, but for jobs and judges.

    Attributes:
        verbs: that it answers, each with a method of `answering`, which is the capability itself unless it says otherwise.
        streams: verbs whose calls have many replies; `serving` has what answers each.
        jobs: what the apply thread does between two batches.
        judges: of the gradients of a batch, before it is journaled.
    """

    verbs: ClassVar[Handled] = {}
    streams: ClassVar[Sequence[Verb[Any, Any]]] = ()
    jobs: Sequence[Job] = ()
    judges: Sequence[Judge] = ()

    def __init__(self, kernel: ShardKernel) -> None:
        self._kernel, self._parts = kernel, kernel.parts

    @property
    def answering(self) -> object:
        """The object whose methods `verbs` names."""
        return self

    @property
    def serving(self) -> Mapping[Verb[Any, Any], Stream]:
        """What answers `streams`."""
        return {}

    @classmethod
    def at_start(cls, shard: StartingShard, pause: "Pause") -> StartStep | None:
        """What is to be done while the shard starts."""
        return None

    @property
    def holds_journal(self) -> bool:
        """Whether the journal's older segments are needed."""
        return False

    @property
    def holds_slots(self) -> bool:
        """Whether slots must not change their shard now."""
        return False

    def still(self) -> AbstractContextManager[None]:
        """See `ShardKernel.still`."""
        return nullcontext()

    def joins(self) -> None:
        """The shard takes its first slots. Apply thread."""

    def add_metrics(self, to: "MetricFamilies") -> None:
        """Add its figures to a scrape."""

    def serve(self) -> None:
        """Start its threads."""

    def stop(self, timeout_s: float) -> None:
        """End what it has under way, its threads among that; before the shard drains."""

    def close(self) -> None:
        """Let go of its streams and connections; after the shard has drained."""
