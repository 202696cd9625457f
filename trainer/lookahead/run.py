"""What a run over a loader looks like from outside: its iterator, and the loader's.

What must not live here: what happens in a run (`pipeline`).
"""

from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

from kvemb.errors import InvalidInputError

T = TypeVar("T")


class Run(Generic[T]):
    """The iterator of a run, which ends with it. One that was ended because another one began says so, instead of looking exhausted.

    Args:
        batches: what happens in the run; nobody else may refer to it.
    """

    def __init__(self, batches: Generator[T, None, None]) -> None:
        self._batches, self._replaced = batches, False

    def __iter__(self) -> "Run[T]":
        return self

    def __next__(self) -> T:
        """Return the next batch.

        Raises:
            InvalidInputError: the loader was iterated anew.
        """
        if self._replaced:
            raise InvalidInputError(
                "this iteration was ended when the same prepared loader was iterated again: it has one run at a time. "
                "Prepare another one for a loop inside of a loop."
            )
        return next(self._batches)

    def close(self) -> None:
        """End the run. Idempotent."""
        self._batches.close()

    def replace(self) -> None:
        """End the run, since another one begins."""
        self._replaced = True
        self._batches.close()


class _Lent(Generic[T]):
    """An iterator that is the caller's own: it is not closed here, and may be gone on with."""

    def __init__(self, batches: Iterator[T]) -> None:
        self._batches = batches

    def __iter__(self) -> "_Lent[T]":
        return self

    def __next__(self) -> T:
        return next(self._batches)


def iterator_of(loader: Iterable[T]) -> Iterator[T]:
    """Begin to iterate a loader.

    Returns:
        An iterator that ends with the run; where the loader is one itself, it outlives it.
    """
    made: Iterator[T] = iter(loader)
    return _Lent(made) if made is loader else made
