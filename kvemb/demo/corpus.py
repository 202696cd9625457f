"""The demo's text: every word of the Python standard library's own source files, as 64-bit ids.

Here lives finding the files, cutting them into words and setting text aside for the held-out loss; sampling and training must not. Words
are identifiers by form, keywords, comments and strings included. A hash of the word is its id, so nothing needs to agree on a vocabulary;
the word list is kept only to show neighbours.

The demo's rows are in a cluster, or, to compare, in NumPy arrays of one process. Two tables: "word_in" holds a word as a centre, "word_out"
as a context. Both kinds of rows begin and learn alike.
"""

import os
import re
import sysconfig
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb import init, optim
from kvemb.api import Cluster
from kvemb.arrays.hashing import hash_ids
from kvemb.client.ack import Ack
from kvemb.errors import InvalidInputError

HELD_OUT_EVERY = 50  # one stretch of text in so many is never trained on: 2 %
HELD_OUT_STRETCH = 512  # words in a row: long against the window, so that few held-out pairs straddle trained text
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_WORD = re.compile(r"\b[^\W\d]\w*")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as ids, file after file. All arrays are read-only by convention; safe to share between threads.

    Attributes:
        tokens: int64 [n], the id of every word in reading order.
        runs: int32 [n], the unbroken run of text each word stands in; one ends with its file or where held-out text begins or ends.
        held_out: bool [n], words that are never trained on: every 50th stretch of 512.
        ids: int64 [v], the unique ids, ascending.
        counts: int64 [v], how often each of `ids` occurs outside the held-out text.
        words: [v] the word behind each of `ids`; for display only.
        n_files: of the text.
    """

    tokens: NDArray[np.int64]
    runs: NDArray[np.int32]
    held_out: NDArray[np.bool_]
    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    words: tuple[str, ...]
    n_files: int


def source_files(root: Path) -> list[Path]:
    """List the .py files below a folder in the same order on every machine; installed packages are left out.

    Args:
        root: the folder to walk; links to folders are not followed.

    Returns:
        Paths sorted by their parts relative to root.
    """
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def split_words(source: str) -> list[str]:
    """Cut source text into words: identifiers, keywords, and the words of comments and strings.

    Example:
        >>> split_words("def f2(x):  # twice x\\n    return 2 * x")
        ['def', 'f2', 'x', 'twice', 'x', 'return', 'x']
    """
    return _WORD.findall(source)


def build(texts: Iterable[list[str]], *, origin: str = "the texts given") -> Corpus:
    """Turn the words of each file into a corpus.

    Args:
        texts: per file, its words in order; consumed one file at a time.
        origin: where the texts come from, for the error message.

    Raises:
        InvalidInputError: there is no word at all.

    Example:
        >>> corpus = build([["a", "b", "a"], ["b"]])
        >>> corpus.tokens.size, corpus.runs.tolist(), sorted(corpus.words)
        (4, [1, 1, 1, 2], ['a', 'b'])
    """
    order: defaultdict[str, int] = defaultdict(count().__next__)  # a word's number is made when it is first looked up
    numbered = [np.fromiter(map(order.__getitem__, words), np.int64, len(words)) for words in texts]
    if not order:
        raise InvalidInputError(f"no word in {origin}: expected readable .py files; give a folder that holds Python sources")
    vocabulary = list(order)
    ids_by_number = hash_ids(vocabulary)
    tokens = ids_by_number[np.concatenate(numbered)]
    held_out = np.equal(np.arange(tokens.size) // HELD_OUT_STRETCH % HELD_OUT_EVERY, HELD_OUT_EVERY - 1)
    starts = np.zeros(tokens.size + 1, np.bool_)  # of runs
    starts[np.cumsum([0, *(part.size for part in numbered)])] = True
    starts[1:-1] |= np.diff(held_out)
    ids, first = np.unique(ids_by_number, return_index=True)
    counts = np.bincount(np.searchsorted(ids, tokens[~held_out]), minlength=ids.size).astype(np.int64)
    words = tuple(vocabulary[i] for i in first.tolist())
    return Corpus(tokens, np.cumsum(starts[:-1], dtype=np.int32), held_out, ids, counts, words, len(numbered))


def load(root: Path | None = None) -> Corpus:
    """Read every decodable source file below a folder; the 3.2 M words of CPython 3.11 take about 2 s.

    Args:
        root: folder of Python sources; None means this interpreter's standard library.

    Raises:
        InvalidInputError: no readable source file with a word in it (a library shipped as .pyc or .zip only); names
            the folder.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    return build(map(split_words, _readable(source_files(folder))), origin=str(folder))


def _readable(paths: list[Path]) -> Iterator[str]:
    """Yield the text of each UTF-8 file, passing over the rest: the test suite holds files broken on purpose."""
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


WORD_IN = "word_in"
WORD_OUT = "word_out"
DIM = 32
INITIALIZER = init.uniform(low=-0.5 / DIM, high=0.5 / DIM)  # word2vec's own start for its input vectors
OPTIMIZER = optim.rowwise_adagrad(lr=0.2)  # as good as full Adagrad here, with one float of state per row instead of 32

# Pushes handed over and not yet applied. Without a bound a trainer would run ahead of the parameter servers and learn from old rows. With 8
# late pushes the held-out loss was 10 % worse, with 2 it was 2 %.
MAX_UNAPPLIED = 2
APPLY_TIMEOUT_S = 60.0


class Rows(Protocol):
    """The source of the demo's rows, and the destination of its gradients."""

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """Fetch rows: per table, unique ids int64 [n] to rows float32 [n, d] in the same order."""
        ...

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """Hand over gradients: per table, unique ids int64 [n] and gradients float32 [n, d]."""
        ...


class ClusterRows:
    """Rows of a cluster. The tables are created, or opened as they are.

    Args:
        cluster: connected.
        seed: of the initial rows.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._unapplied: deque[Ack] = deque()
        for name in (WORD_IN, WORD_OUT):
            cluster.create_table(name, dim=DIM, optimizer=OPTIMIZER, initializer=INITIALIZER, seed=seed, exist_ok=True)

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """See `Rows`: all tables in one round trip per node."""
        return self._cluster.pull(batch)

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """See `Rows`: returns while the newest pushes are still on their way."""
        self._unapplied.append(self._cluster.push(grads))
        self._wait_applied(MAX_UNAPPLIED)

    def flush(self) -> None:
        """Wait until all pushes are applied and visible."""
        self._wait_applied(0)

    def _wait_applied(self, n_left: int) -> None:
        while len(self._unapplied) > n_left:
            self._unapplied.popleft().wait_applied(APPLY_TIMEOUT_S)


class LocalRows:
    """Rows of this process, updated by row-wise Adagrad. Not safe to share between threads that push.

    It knows every id in advance, which storage never does, so a row is found by binary search in the sorted ids.

    Args:
        ids: int64 [v], every id that will ever be used, ascending and unique.
        seed: of the initial rows; the seed of the tables it is compared with.

    Example:
        >>> rows = LocalRows(np.array([3, 5, 9]), seed=0)
        >>> rows.pull({"word_in": np.array([9, 3])})["word_in"].shape
        (2, 32)
    """

    def __init__(self, ids: NDArray[np.int64], *, seed: int) -> None:
        self._ids = ids
        unsigned = np.ascontiguousarray(ids).view(np.uint64)
        self._weights = {name: INITIALIZER.rows(unsigned, DIM, table=name, seed=seed) for name in (WORD_IN, WORD_OUT)}
        self._mean_square_sums = {name: np.zeros((ids.size, 1), np.float32) for name in self._weights}
        hyper = OPTIMIZER.defaults()
        self._lr, self._eps = np.float32(hyper["lr"]), np.float32(hyper["eps"])

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """See `Rows`: copies."""
        return {name: self._weights[name][np.searchsorted(self._ids, ids)] for name, ids in batch.items()}

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """See `Rows`: applied at once. G += mean(g ** 2) over the row's columns; w -= lr g / (sqrt(G) + eps).

        Source: Duchi, Hazan, Singer 2011 (Adagrad); one accumulator per row as in Naumov et al. 2019, "Deep Learning
        Recommendation Model for Personalization and Recommendation Systems", and its code.
        """
        for name, (ids, gradients) in grads.items():
            at = np.searchsorted(self._ids, ids)
            sums = self._mean_square_sums[name][at] + np.square(gradients).mean(axis=1, keepdims=True)
            self._mean_square_sums[name][at] = sums
            self._weights[name][at] -= self._lr * gradients / (np.sqrt(sums) + self._eps)
