"""Feature columns under TensorFlow's names: the meaning of a feature's values, and the rows of a table that they stand for.

A column is a frozen description; `buckets` is a pure function of values. Names, arguments, defaults and the order of results follow
tf.feature_column, so that models move over; nothing else of it is here.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.process.cached_property import cached_property

from .feature_values import Bags, cross_bags, hash_buckets, text_bytes

NO_ROW = -1
"""The bucket of a value that stands for no row: it is left out of its bag."""
COMBINERS = ("sum", "mean", "sqrtn")


@dataclass(frozen=True)
class _KeyedColumn:
    """A column that reads the feature `key`."""

    key: str

    @property
    def name(self) -> str:
        """The name by which columns are sorted, and from which embedding columns get theirs."""
        return self.key


@dataclass(frozen=True)
class NumericColumn(_KeyedColumn):
    """Numbers that go into the model as they are, or normalized; made by `numeric_column`."""

    shape: tuple[int, ...]
    normalizer_fn: Callable[[Any], Any] | None

    @property
    def width(self) -> int:
        """Values per example."""
        return int(np.prod(self.shape))

    def check_shape(self, given: Sequence[int | None]) -> None:
        """Refuse the shape of a feature that has not the column's numbers for each example; [b] will do for one number."""
        if not given or (None not in given[1:] and np.prod([int(n or 0) for n in given[1:]]) != self.width):
            expected = ", ".join(map(str, ("b", *self.shape)))
            raise InvalidInputError(f"feature {self.key!r} has the shape {tuple(given)}, its column takes [{expected}]")


@dataclass(frozen=True)
class IdentityColumn(_KeyedColumn):
    """Integers in [0, num_buckets) that are ids themselves; made by `categorical_column_with_identity`."""

    num_buckets: int
    default_value: int | None

    def buckets(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return integers [m] themselves, those out of range replaced by the default, or refused where there is none."""
        _require(self.key, values, "iu", "integers")
        outside = (values < 0) | (values >= self.num_buckets)
        if outside.any():
            if self.default_value is None:
                first = int(values[np.argmax(outside)])
                raise InvalidInputError(
                    f"feature {self.key!r}: {first} is outside 0 to {self.num_buckets} - 1, the column's num_buckets. Give the column a "
                    "default_value, or hash such values with categorical_column_with_hash_bucket."
                )
            values = np.where(outside, values.dtype.type(0), values)
        ids = values.astype(np.int64)
        ids[outside] = self.default_value or 0
        return ids


@dataclass(frozen=True)
class HashedColumn(_KeyedColumn):
    """Values that are hashed to buckets; made by `categorical_column_with_hash_bucket`."""

    num_buckets: int
    dtype: str

    def buckets(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Hash values [m] of the column's dtype."""
        _require_dtype(self.key, values, self.dtype)
        with _naming(self.key):
            return hash_buckets(values, self.num_buckets)


@dataclass(frozen=True)
class VocabularyColumn(_KeyedColumn):
    """Values whose place in a list is their id; made by `categorical_column_with_vocabulary_list`."""

    vocabulary: tuple[Any, ...]
    dtype: str
    default_value: int
    num_oov_buckets: int

    @property
    def num_buckets(self) -> int:
        """The number of words, and of buckets for other values."""
        return len(self.vocabulary) + self.num_oov_buckets

    def buckets(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the place of each value [m] in the vocabulary; of others the default, or a bucket after the vocabulary."""
        _require_dtype(self.key, values, self.dtype)
        ids = self._integers(values) if self.dtype == "int64" else self._texts(values)
        unknown = ids == NO_ROW
        if self.num_oov_buckets and unknown.any():
            ids[unknown] = len(self.vocabulary) + hash_buckets(values[unknown], self.num_oov_buckets)
        elif self.default_value != NO_ROW:
            ids[unknown] = self.default_value
        return ids

    def _texts(self, values: NDArray[Any]) -> NDArray[np.int64]:
        with _naming(self.key):
            place = {word: self._places.get(text_bytes(word), NO_ROW) for word in set(values.tolist())}
        return np.fromiter(map(place.__getitem__, values.tolist()), np.int64, len(values))

    def _integers(self, values: NDArray[Any]) -> NDArray[np.int64]:
        words, order = self._sorted
        signed = values.astype(np.int64)
        at = np.searchsorted(words, signed)
        at[at == len(words)] = 0
        known = (words[at] == signed) & ((values < 0) == (signed < 0))  # a uint64 may have become negative
        return np.where(known, order[at], NO_ROW)

    @cached_property
    def _places(self) -> dict[bytes, int]:
        return {text_bytes(word): at for at, word in enumerate(self.vocabulary)}

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        words = np.array(self.vocabulary, np.int64)
        order = np.argsort(words)
        return words[order], order.astype(np.int64)


@dataclass(frozen=True)
class BucketizedColumn:
    """Numbers whose interval between boundaries is their id; made by `bucketized_column`."""

    source: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def key(self) -> str:
        """The feature it reads."""
        return self.source.key

    @property
    def name(self) -> str:
        """The name from which its embedding columns get theirs."""
        return f"{self.source.name}_bucketized"

    @property
    def num_buckets(self) -> int:
        """Buckets of all values of an example together."""
        return (len(self.boundaries) + 1) * self.source.width

    def buckets(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the buckets of float32 [b * width] values, each with a range of its own; a bucket holds its lower boundary."""
        found = np.searchsorted(np.array(self.boundaries, np.float32), values.astype(np.float32, copy=False), side="right")
        width = self.source.width
        shift = np.arange(width) * (len(self.boundaries) + 1)
        return (found.reshape(-1, width) + shift).reshape(-1).astype(np.int64, copy=False)


@dataclass(frozen=True)
class WeightedColumn:
    """A categorical column with a weight for each value; made by `weighted_categorical_column`."""

    source: "IdentityColumn | HashedColumn | VocabularyColumn"
    weight_key: str

    @property
    def key(self) -> str:
        """The feature it reads its values from."""
        return self.source.key

    @property
    def name(self) -> str:
        """The name from which its embedding columns get theirs."""
        return f"{self.source.name}_weighted_by_{self.weight_key}"

    @property
    def num_buckets(self) -> int:
        """Those of the column that is weighted."""
        return self.source.num_buckets

    def buckets(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Those of the column that is weighted."""
        return self.source.buckets(values)


@dataclass(frozen=True)
class CrossedColumn:
    """Combinations of values, hashed to buckets; made by `crossed_column`."""

    keys: tuple["str | IdentityColumn | VocabularyColumn | BucketizedColumn", ...]
    num_buckets: int

    @property
    def name(self) -> str:
        """The name from which its dense columns get theirs."""
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.keys))

    def cross(self, parts: Sequence[Bags]) -> Bags:
        """Return the buckets of all combinations: of a feature's values as they are, of a column's ids, NO_ROW included."""
        for key, part in zip(self.keys, parts, strict=True):
            _require(str(key if isinstance(key, str) else key.name), part.values, "iuO", "integers or text (numbers: bucketized_column)")
        with _naming(self.name):
            return cross_bags(parts, self.num_buckets)


CategoricalColumn = IdentityColumn | HashedColumn | VocabularyColumn | BucketizedColumn | WeightedColumn | CrossedColumn


@dataclass(frozen=True)
class IndicatorColumn:
    """How often each bucket of a categorical column comes; made by `indicator_column`."""

    source: CategoricalColumn

    @property
    def name(self) -> str:
        """The name by which columns are sorted."""
        return f"{self.source.name}_indicator"

    @property
    def width(self) -> int:
        """Values per example."""
        return self.source.num_buckets

    def counts(self, ids: Bags) -> NDArray[np.float32]:
        """Return how often each bucket is in a bag, or the sum of its weights: float32 [b, width]. NO_ROW is counted nowhere."""
        kept = ids.keep(ids.values != NO_ROW)
        n_bags = len(kept.lengths)
        cells = np.repeat(np.arange(n_bags) * self.width, kept.lengths) + kept.values
        return np.bincount(cells, kept.weights, n_bags * self.width).reshape(n_bags, self.width).astype(np.float32)


@dataclass(frozen=True)
class EmbeddingColumn:
    """A categorical column whose ids are rows of a table; made by `embedding_column` or `shared_embedding_columns`."""

    source: CategoricalColumn
    dimension: int
    combiner: str
    initializer: Initializer
    table_name: str
    shared: bool

    @property
    def name(self) -> str:
        """The name by which columns are sorted, and by which options are given."""
        return f"{self.source.name}_{'shared_embedding' if self.shared else 'embedding'}"

    @property
    def width(self) -> int:
        """Values per example."""
        return self.dimension

    def rows(self, ids: Bags) -> Bags:
        """Return the ids that are rows of the table: NO_ROW, and what has no place in a weighted mean, are left out, as TensorFlow does."""
        kept = ids.keep(ids.values != NO_ROW)
        return kept if kept.weights is None or self.combiner == "sum" else kept.keep(kept.weights > 0)


DenseColumn = NumericColumn | IndicatorColumn | EmbeddingColumn


def check_key(key: object) -> str:
    """Return the name of a feature, or refuse it."""
    if not isinstance(key, str) or not key:
        raise InvalidInputError(f"the key of a column must be the name of a feature, got {key!r}")
    return key


def check_integer(where: str, value: object, low: int, end: int) -> int:
    """Return an integer in [low, end), or refuse it."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if not low <= number < end:
        raise InvalidInputError(f"{where} is {value!r}; give an integer from {low} to {end - 1}")
    return number


def check_unique(where: str, values: Sequence[Any]) -> None:
    """Refuse the first value that stands twice."""
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise InvalidInputError(f"{where}: {value!r} stands twice")
        seen.add(value)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Name the feature in the error of a refused value."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"feature {key!r}: {error}") from error


def _require_dtype(key: str, values: NDArray[Any], dtype: str) -> None:
    _require(key, values, "iu" if dtype == "int64" else "O", "integers" if dtype == "int64" else "text")


def _require(key: str, values: NDArray[Any], kinds: str, expected: str) -> None:
    if values.dtype.kind not in kinds and len(values):
        got = "text" if values.dtype.kind == "O" else str(values.dtype)
        raise InvalidInputError(f"feature {key!r} holds {got}, its column expects {expected}; convert it, or give the column that dtype")
