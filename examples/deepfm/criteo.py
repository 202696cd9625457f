"""Parse the Criteo click log format: label, 13 numbers, 26 categories, tab-separated, empty allowed. Files: `readers`.

Every line becomes 39 features. A number x has the id of its column and the value sign(x) log(1 + |x|); a category has an
id hashed from its column and its text, and the value 1; an empty field has an id of its own per column, and the value 1.
"""

import numpy as np
from numpy.typing import NDArray

from deepfm.clicks import Clicks
from kvemb.arrays.hashing import digest64, hash_ids, mix64
from kvemb.errors import InvalidInputError

N_NUMBERS, N_CATEGORIES = 13, 26
N_FEATURES = N_NUMBERS + N_CATEGORIES
N_COLUMNS = 1 + N_FEATURES


def parse(block: bytes, path: str, first_line: int) -> Clicks:
    """Parse whole lines; blank ones are skipped. Categories may be any text.

    Args:
        block: text in which every line ends with a newline.
        path, first_line: where the block stands, for messages.

    Raises:
        InvalidInputError: naming file, line and what is wrong with it.

    Example:
        >>> log = parse(b"1\\t" + b"3\\t" * 13 + b"a9\\t" * 25 + b"\\n", "day_0", 1)
        >>> log.labels.tolist(), len(log.ids), log.values[0].round(3)
        ([1.0], 39, np.float32(1.386))
    """
    parsed = _parse(block)
    if parsed is None:
        raise _blame(block, path, first_line)
    return parsed


def _parse(block: bytes) -> Clicks | None:
    """Parse text, or return None if any of it is malformed."""
    try:
        lines = [line for line in block.decode().replace("\r\n", "\n").split("\n") if line]
    except UnicodeDecodeError:
        return None
    words = "\t".join(lines).split("\t") if lines else []
    if len(words) != len(lines) * N_COLUMNS or {line.count("\t") for line in lines} - {N_COLUMNS - 1}:
        return None
    cells = np.array(words, dtype=object).reshape(len(lines), N_COLUMNS)
    if not np.isin(cells[:, 0], ("0", "1")).all():
        return None
    ids, values = np.empty((len(lines), N_FEATURES), np.int64), np.ones((len(lines), N_FEATURES), np.float32)
    try:
        for column in range(N_FEATURES):
            if column < N_NUMBERS:
                ids[:, column], values[:, column] = _numbers(cells[:, 1 + column], column)
            else:
                ids[:, column] = _categories(cells[:, 1 + column], column)
    except (ValueError, OverflowError):
        return None
    offsets = np.arange(len(lines) + 1, dtype=np.int64) * N_FEATURES
    return Clicks((cells[:, 0] == "1").astype(np.float32), offsets, ids.reshape(-1), values.reshape(-1))


def _numbers(cells: NDArray[np.object_], column: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    empty = cells == ""
    numbers = np.where(empty, "0", cells).astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("not finite")
    ids = np.where(empty, _signed(digest64("criteo", column, "empty")), _signed(digest64("criteo", column)))
    return ids, np.where(empty, 1.0, np.sign(numbers) * np.log1p(np.abs(numbers)))


def _categories(cells: NDArray[np.object_], column: int) -> NDArray[np.int64]:
    texts = hash_ids(cells).view(np.uint64)
    return mix64(texts ^ np.uint64(digest64("criteo", column))).view(np.int64)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _blame(block: bytes, path: str, first_line: int) -> InvalidInputError:
    """Find the first bad line and say what is wrong with it."""
    for number, line in enumerate(block.split(b"\n"), first_line):
        if line and _parse(line + b"\n") is None:
            return InvalidInputError(f"{path}:{number}: {_fault(line)}")
    raise AssertionError("a block is malformed, but none of its lines is")


def _fault(line: bytes) -> str:
    cells = line.rstrip(b"\r").decode("utf-8", "replace").split("\t")
    if len(cells) != N_COLUMNS:
        return f"{len(cells)} columns, expected {N_COLUMNS}, separated by tabs"
    if cells[0] not in ("0", "1"):
        return f"label {cells[0]!r}, expected 0 or 1"
    return f"expected {N_NUMBERS} finite numbers (or nothing) after the label, in UTF-8, got {cells[1 : N_NUMBERS + 1]!r}"
