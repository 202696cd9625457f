"""The demo's text: every word of the Python standard library's own source files, as 64-bit ids.

Here lives finding the files, cutting them into words and setting text aside for the held-out loss; sampling and training must not. Words
are identifiers by form, keywords, comments and strings included. A hash of the word is its id, so nothing needs to agree on a vocabulary;
the word list is kept only to show neighbours.
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
    """Text as ids, file after file. All arrays are read-only by convention; safe to share between threads."""

    tokens: NDArray[np.int64]  # int64 [n], the id of every word in reading order
    # int32 [n], the unbroken run of text each word stands in; one ends with its file or where held-out text begins or ends
    runs: NDArray[np.int32]
    held_out: NDArray[np.bool_]  # bool [n], words that are never trained on: every 50th stretch of 512
    ids: NDArray[np.int64]  # int64 [v], the unique ids, ascending
    counts: NDArray[np.int64]  # int64 [v], how often each of `ids` occurs outside the held-out text
    words: tuple[str, ...]  # [v] the word behind each of `ids`; for display only
    n_files: int  # of the text


def source_files(root: Path) -> list[Path]:
    """List the .py files below a folder, sorted by their parts relative to it; installed packages are left out."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def split_words(source: str) -> list[str]:
    """Cut source text into words: identifiers, keywords, and the words of comments and strings."""
    return _WORD.findall(source)


def build(texts: Iterable[list[str]], *, origin: str = "the texts given") -> Corpus:
    """Turn the words of each file into a corpus."""
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
    """Read every decodable source file below a folder; the 3.2 M words of CPython 3.11 take about 2 s."""
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    return build(map(split_words, _readable(source_files(folder))), origin=str(folder))


def _readable(paths: list[Path]) -> Iterator[str]:
    """Yield the text of each UTF-8 file, passing over the rest: the test suite holds files broken on purpose."""
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
