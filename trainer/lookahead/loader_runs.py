"""Runs over a loader as seen from outside: their iterator, the loader's, and the object in the loader's place."""

import weakref
from collections.abc import Generator, Iterable, Iterator, Sized
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import chain
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from kvemb.errors import InvalidInputError

from .pool_sizes import Sizes

T = TypeVar("T")


class Run(Generic[T]):
    """The iterator of a run, which ends with it. If it was ended because another one began, it says so, instead of looking exhausted."""

    def __init__(self, batches: Generator[T, None, None]) -> None:
        self._batches, self._replaced = batches, False

    def __iter__(self) -> "Run[T]":
        return self

    def __next__(self) -> T:
        """Return the next batch."""
        self._check_idle()
        if self._replaced:
            raise InvalidInputError(
                "this iteration was ended when the same prepared loader was iterated again: it has one run at a time. "
                "Prepare another one for a loop inside of a loop."
            )
        return next(self._batches)

    def close(self) -> None:
        """End the run. Idempotent."""
        self._check_idle()
        self._batches.close()

    def replace(self) -> None:
        """End the run, since another one begins; raises as `close`."""
        self._check_idle()
        self._replaced = True
        self._batches.close()

    def _check_idle(self) -> None:
        if getgeneratorstate(self._batches) == GEN_RUNNING:
            raise InvalidInputError(
                "the next batch of this prepared loader is being waited for: iterate and close it in one thread. To end the loop from "
                "outside, set a flag that the loop looks at."
            )


def iterator_of(loader: Iterable[T]) -> Iterator[T]:
    """Begin to iterate a loader: by an iterator that ends with the run; if the loader is one itself, it outlives the run."""
    made: Iterator[T] = iter(loader)
    return chain(made) if made is loader else made  # of the caller's own: it is not closed here, and the caller may go on with it


class LoaderRuns(Generic[T]):
    """Stands in a loader's place: each `iter` is a new run over it (an epoch) and ends the run before. Use it from one thread."""

    def __init__(self, loader: Iterable[Any], sizes: Sizes) -> None:
        self._loader, self._sizes = loader, sizes
        self._run: weakref.ref[Run[T]] | None = None  # weak: the end of a loop, by break too, ends its run

    def __iter__(self) -> Iterator[T]:
        if (before := None if self._run is None else self._run()) is not None:
            before.replace()
        # Now, not at the first batch: a loader's processes are forked here, before any thread of this run exists.
        run = Run(self._batches(iterator_of(self._loader)))
        self._run = weakref.ref(run)
        return run

    def _batches(self, batches: Iterator[Any]) -> Generator[T, None, None]:
        """Yield the batches of a run; must not refer to `batches` any longer than it needs them."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))

    def close(self) -> None:
        """End the present run: no thread of it remains. Idempotent; iterating again is fine."""
        run = None if self._run is None else self._run()
        if run is not None:
            run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def threads_num(self) -> int:
        """Threads in force."""
        return self._sizes.threads_num

    @property
    def capacity(self) -> int:
        """Batches ahead, in force."""
        return self._sizes.capacity
