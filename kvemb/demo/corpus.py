"""The demo's text: every word of the Python standard library's own source files, as 64-bit ids.

Here lives finding the files, cutting them into words and setting text aside for the held-out loss; sampling and
training must not. Words are identifiers by form (a letter or underscore, then letters, digits, underscores), taken
from the whole source: keywords, comments and strings included. Comments and docstrings use names the way code does,
so they are evidence, not noise; keywords are tamed by the subsampling of frequent words. A hash of the word is its
id, so nothing needs to agree on a vocabulary; the word list is kept only to show neighbours.
"""

import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import hash_ids
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
        offsets: int64 [f + 1], file i is `tokens[offsets[i]:offsets[i + 1]]`.
        ids: int64 [v], the distinct ids, ascending.
        counts: int64 [v], how often each of `ids` occurs outside the held-out text.
        words: [v] the word behind each of `ids`; for display only.
    """

    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    words: tuple[str, ...]

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Say which tokens are never trained on: bool [n], every 50th stretch of 512 tokens."""
        return _held_out(self.tokens.size)

    @property
    def runs(self) -> NDArray[np.int32]:
        """Number the unbroken runs of text: int32 [n]; one ends with its file or where held-out text begins or ends."""
        starts = np.zeros(self.tokens.size + 1, np.bool_)
        starts[self.offsets] = True
        starts[1:-1] |= np.diff(self.held_out)
        return np.cumsum(starts[:-1], dtype=np.int32)

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """Find where ids stand in `ids`, and so in `counts` and `words`; an unknown id gets a meaningless place."""
        return np.searchsorted(self.ids, ids)


def standard_library() -> Path:
    """Name the folder of this interpreter's own library.

    Example:
        >>> (standard_library() / "socket.py").exists()
        True
    """
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """List the .py files below a folder in the same order on every machine; installed packages are left out.

    Args:
        root: the folder to walk; links to folders are not followed.

    Returns:
        Paths sorted by their parts relative to root.

    Example:
        >>> names = [path.name for path in source_files(standard_library() / "json")]
        >>> names[:3]
        ['__init__.py', 'decoder.py', 'encoder.py']
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
        >>> corpus.tokens.size, corpus.offsets.tolist(), sorted(corpus.words)
        (4, [0, 3, 4], ['a', 'b'])
    """
    order: defaultdict[str, int] = defaultdict(count().__next__)  # a word's number is made when it is first looked up
    numbered = [np.fromiter(map(order.__getitem__, words), np.int64, len(words)) for words in texts]
    if not order:
        raise InvalidInputError(f"no word in {origin}: expected readable .py files; give a folder that holds Python sources")
    vocabulary = list(order)
    ids_by_number = hash_ids(vocabulary)
    tokens = ids_by_number[np.concatenate(numbered)]
    offsets = np.cumsum([0, *(part.size for part in numbered)], dtype=np.int64)
    ids, first = np.unique(ids_by_number, return_index=True)
    trained = tokens[~_held_out(tokens.size)]
    counts = np.bincount(np.searchsorted(ids, trained), minlength=ids.size).astype(np.int64)
    return Corpus(tokens, offsets, ids, counts, tuple(vocabulary[i] for i in first.tolist()))


def load(root: Path | None = None) -> Corpus:
    """Read every decodable source file below a folder; the 3.2 M words of CPython 3.11 take about 2 s.

    Args:
        root: folder of Python sources; None means this interpreter's standard library.

    Raises:
        InvalidInputError: no readable source file with a word in it (a library shipped as .pyc or .zip only); names
            the folder.

    Example:
        >>> corpus = load(standard_library() / "json")
        >>> {"decoder", "JSONEncoder"} <= set(corpus.words)
        True
    """
    folder = standard_library() if root is None else root
    return build(map(split_words, _readable(source_files(folder))), origin=str(folder))


def _held_out(n_tokens: int) -> NDArray[np.bool_]:
    stretch = np.arange(n_tokens) // HELD_OUT_STRETCH
    return np.equal(stretch % HELD_OUT_EVERY, HELD_OUT_EVERY - 1)


def _readable(paths: list[Path]) -> Iterator[str]:
    """Yield the text of each UTF-8 file, passing over the rest: the test suite holds files broken on purpose."""
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
