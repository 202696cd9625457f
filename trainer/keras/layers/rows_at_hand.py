"""The rows that came with the batch of the step under way, where the model's layers find them.

What must not live here: pulling them (`steps.fed_batches`), layers (`row_embedding`). A model has one `RowsAtHand`. It is filled while a
step is traced or run, and empty in between. One thread.

Strategy, the same on every backend: a table is one leaf, its distinct rows. A shadow variable stands beside it,
`leaf = rows + (shadow - stop_gradient(shadow))`, which Keras overwrites with its gradient instead of updating it. That is the rows'
gradient, summed by row, as the dense weight of an Embedding would have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from kvemb.errors import InvalidInputError

Fed = Mapping[str, Any]
"""What travels beside a batch: "rows" by table, a tensor [capacity, dim], and "at" by layer, its positions of each call."""


class RowsAtHand:
    """The rows of the step under way, for one model."""

    def __init__(self) -> None:
        self.shadows: dict[str, Any] = {}
        """By table, the variable that takes its gradient."""
        self._fed: Fed | None = None
        self._leaves: dict[str, Any] = {}
        self._n_calls: dict[str, int] = {}
        self._training = False

    @property
    def there(self) -> bool:
        """Whether a step is under way."""
        return self._fed is not None

    @contextmanager
    def of_step(self, fed: Fed, training: bool) -> Iterator[None]:
        """Have rows at hand, until the step is traced or run."""
        self._fed, self._training = fed, training
        self._leaves, self._n_calls = {}, {}
        try:
            yield
        finally:
            self._fed, self._leaves, self._n_calls = None, {}, {}

    def look_up(self, table: str, layer: str, shape: Sequence[int | None]) -> tuple[Any, Any]:
        """Return a table's leaf [capacity, dim], and the positions in it of the next call of a layer.

        Args:
            table, layer: by name.
            shape: of the ids that the layer was called with.

        Raises:
            InvalidInputError: the layer is called otherwise than it was foreseen.
        """
        assert self._fed is not None, "called within a step"
        calls: Sequence[Any] = self._fed["at"].get(layer, ())
        n = self._n_calls.get(layer, 0)
        self._n_calls[layer] = n + 1
        foreseen = [tuple(at.shape) for at in calls]
        if n >= len(calls) or not _same(foreseen[n], shape):
            raise InvalidInputError(
                f"layer {layer!r} over table {table!r}: its call {n + 1} in a step asks for ids of shape {tuple(shape)}, rows "
                "were pulled for "
                f"{foreseen or 'no call'}. The model calls it otherwise than in the step that was traced; name what feeds it with "
                "distribute(features=…)"
            )
        return self._leaf(table), calls[n]

    def _leaf(self, table: str) -> Any:
        if table not in self._leaves:
            assert self._fed is not None
            leaf = self._fed["rows"][table]
            if self._training and table in self.shadows:
                shadow = self.shadows[table]
                value = keras.ops.convert_to_tensor(shadow)
                leaf = leaf + (value - keras.ops.stop_gradient(value))
            self._leaves[table] = leaf
        return self._leaves[table]


def _same(known: Sequence[int | None], shape: Sequence[int | None]) -> bool:
    return len(known) == len(shape) and all(a == b for a, b in zip(known, shape, strict=True) if a is not None and b is not None)
