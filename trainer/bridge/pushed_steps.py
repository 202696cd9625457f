"""A step of training, for every framework: the rows pulled ahead, the push of all tables' gradients, the waits, the report.

An async trainer's unapplied pushes are limited, or rows would grow old without bound if shards fell behind. The wait comes before the next
push: a failed one is reported while the gradients at hand can still be kept.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from kvemb.arrays.ids import to_caller
from kvemb.arrays.segment_sum import group_by_id
from kvemb.errors import InvalidInputError, KvembError, ShardUnavailableError

from ..lookahead.cluster_ports import AckPort, ClusterPort, GradientPart, LookaheadPort, Prefetched
from ..report.step_report import current_report
from .shared_lookups import SharedLookups

T = TypeVar("T")
MAX_UNAPPLIED = 16
"""Pushes that may be on their way unless said otherwise: more than shards that keep up ever have."""


class Unapplied:
    """The acks of pushes that may not be applied yet."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._acks: deque[AckPort] = deque()

    def wait_room(self, timeout_s: float | None) -> None:
        """Wait until one more push keeps within the limit (with a limit of 0, until none is unapplied)."""
        self._wait(max(0, self.limit - 1), timeout_s)

    def add(self, ack: AckPort, timeout_s: float | None) -> None:
        """Take a push that was handed over, and wait where it is one too many; raises as `wait_room`."""
        self._acks.append(ack)
        self._wait(self.limit, timeout_s)

    def _wait(self, n_left: int, timeout_s: float | None) -> None:
        while len(self._acks) > n_left:
            oldest = self._acks[0]
            try:
                if not oldest.failure_seen:
                    oldest.wait_applied(timeout_s)
            except ShardUnavailableError:
                raise  # it may still be applied
            except KvembError:
                self._acks.popleft()
                raise
            self._acks.popleft()


def check_max_unapplied(max_unapplied: object) -> None:
    """Refuse a value that is no number of pushes."""
    if isinstance(max_unapplied, bool) or not isinstance(max_unapplied, int) or max_unapplied < 0:
        raise InvalidInputError(f"max_unapplied is {max_unapplied!r}; give a whole number of pushes, 0 or more")


class PushedSteps:
    """Steps over the tables of one cluster. Use it from one thread; it does not survive fork()."""

    def __init__(
        self, cluster: ClusterPort, id_dtypes: Mapping[str, str], *, timeout_s: float | None = None, max_unapplied: int = MAX_UNAPPLIED
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidInputError(f"timeout_s is {timeout_s!r}; give seconds above 0")
        check_max_unapplied(max_unapplied)
        self._cluster, self._id_dtypes = cluster, dict(id_dtypes)
        self._timeout_s, self._unapplied = timeout_s, Unapplied(max_unapplied)
        self.last_ack: AckPort | None = None
        """Of the newest push; None before."""

    @property
    def max_unapplied(self) -> int:
        """How many pushes of an async job may not be applied yet when a step is over."""
        return self._unapplied.limit

    def take(
        self,
        sharing: Sequence[SharedLookups],
        parts: Callable[[], Mapping[str, GradientPart]],
        hyper: Callable[[], Mapping[str, dict[str, float]]],
        *,
        use_up: Callable[[], None],
        loss: Any = None,
    ) -> None:
        """Take a step.

        Raises:
            KvembError: the push or, in an async job, an earlier one failed, or it was not released or applied in time: it may be applied
                later. Without `use_up` called, nothing was handed over.
        """
        prefetched, holding = _begin_step(sharing)  # may wait for rows, which counts as that
        began_s = time.perf_counter()
        values = hyper()
        made = parts()
        for lookahead in _loaders(sharing):
            made = lookahead.merge(made)
        sync = self._cluster.mode == "sync"
        if not sync:
            made = {name: part for name, part in made.items() if len(part[0])}
        waited_s = 0.0 if sync or not made else self._timed(self._unapplied.wait_room)
        if sync or made:
            pushed = self._push(made, {name: values[name] for name in made}, prefetched)
            for lookahead in _loaders(sharing):
                lookahead.pushed(pushed)
        use_up()
        push_s = time.perf_counter() - began_s - waited_s
        if sync and self.last_ack is not None:
            waited_s = self._timed(self.last_ack.wait_released)
        elif made and self.last_ack is not None:
            waited_s += self._timed(partial(self._unapplied.add, self.last_ack))
        changed = None if prefetched is None or self.last_ack is None else self.last_ack.changed_rows
        for shared in sharing:
            shared.end_step(changed if shared in holding else None)
        if (report := current_report()) is not None:
            ack, waits = self.last_ack if sync or made else None, {"release_s" if sync else "window_s": waited_s}
            report.step(ack, push_s=push_s, **waits, loss=loss)

    def _timed(self, wait: Callable[[float | None], None]) -> float:
        """Wait within the timeout; return the seconds that it took."""
        began_s = time.perf_counter()
        wait(self._timeout_s)
        return time.perf_counter() - began_s

    def _push(self, parts: Mapping[str, GradientPart], hyper: Mapping[str, dict[str, float]], prefetched: Prefetched | None) -> AckPort:
        rows = {name: (to_caller(ids, self._id_dtypes[name]), grads) for name, (ids, grads, _) in parts.items()}
        versions = {name: part[2] for name, part in parts.items()}
        more = {} if prefetched is None else {"prefetched": prefetched}  # only those that pull ahead need a cluster that knows of it
        self.last_ack = self._cluster.push(rows, versions=versions, hyper=hyper, **more)
        return self.last_ack


class GatheredBatches(Generic[T]):
    """The gradients of rows, batch by batch, until the step of an optimizer that gathers several pushes them."""

    def __init__(self) -> None:
        self.batches: list[T] = []
        self._n = 0

    def begin(self, n_gathered: int) -> None:
        """Begin a batch; warn where the optimizer's state is not that of the batches here. These are dropped then."""
        if n_gathered != self._n:
            warnings.warn(
                f"the optimizer has gathered gradients of {n_gathered} batches, and those of rows here are of {self._n}: its state was "
                "loaded, or begun anew, in the middle of a step. The coming step trains rows by the batches from now on alone. Save where "
                "a step is whole",
                stacklevel=4,
            )
            self.batches, self._n = [], n_gathered

    def add(self, batch: T) -> None:
        """Keep a batch's gradients."""
        self.batches.append(batch)
        self._n += 1

    def clear(self) -> None:
        """Begin a new step."""
        self.batches, self._n = [], 0


def merge_parts(parts: Sequence[GradientPart], dim: int) -> GradientPart:
    """Sum the gradients of several lookups of one table by id; of the versions seen the oldest counts."""
    if not parts:
        return np.empty(0, np.uint64), np.empty((0, dim), np.float32), np.empty(0, np.uint64)
    if len(parts) == 1:  # the ids of one lookup are unique
        return parts[0]
    ids, grads, versions = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    groups = group_by_id(ids)
    with np.errstate(invalid="ignore"):  # infinities of both signs: the push refuses what comes of them, and says where
        summed = groups.sum(grads)
    return groups.ids, summed, groups.minimum(versions)


def _begin_step(sharing: Sequence[SharedLookups]) -> tuple[Prefetched | None, list[SharedLookups]]:
    """Begin a step of all; return the rows to register, and the lookups they are for: the first ones of each table."""
    prefetched: dict[str, Any] = {}
    holding = []
    for shared in sharing:
        mine = shared.begin_step()
        if mine is not None and not prefetched.keys() & mine.keys():
            prefetched.update(mine)
            holding.append(shared)
    return prefetched if holding else None, holding


def _loaders(sharing: Sequence[SharedLookups]) -> list[LookaheadPort]:
    """Return each loader that pulls ahead, once."""
    return list({id(shared.lookahead): shared.lookahead for shared in sharing if shared.lookahead is not None}.values())
