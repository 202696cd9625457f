"""Looks for things in a receive buffer, many places at once: patterns at given places or anywhere, lines, sizes. Pure."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError

Bytes = NDArray[np.uint8]
EOL = b"\r\n"
WRONG_TYPE = b"-WRONGTYPE "
"""The beginning of Redis's answer where another program keeps a list, a hash, …"""
UNREAD = b"SERVER_ERROR no memory to read from flash"
"""Stands for what `unread_bytes` finds: memcached has no error line for it."""
_MAX_LINE = 4096
_SCANNED_AT_ONCE = 1 << 15  # bytes: the results of comparing them stay in a core's cache, and are not in fresh memory each time


def matches(block: Bytes, at: int, pattern: bytes) -> NDArray[np.bool_]:
    """Return which rows of block [k, stride] hold the pattern at column `at`: bool [k].

    Compares in machine words: a comparison of [k, len(pattern)] single bytes costs ten times as much.
    """
    good: NDArray[np.bool_] | None = None
    for offset, width, mask, value in _words(pattern, block.shape[1] - at) if len(block) else ():
        words = np.ndarray((len(block),), f"<u{width}", block, at + offset, (block.strides[0],))  # [k], a view: a word of each row
        right: NDArray[np.bool_] = (words if mask is None else words & mask) == value
        good = right if good is None else np.logical_and(good, right, good)
    return np.ones(len(block), dtype=bool) if good is None else good


def matches_at(data: Bytes, starts: NDArray[np.intp], pattern: bytes, room: int) -> NDArray[np.bool_]:
    """Return at which of the given positions of data the pattern lies: bool [k]. Behind every position must be `room` bytes."""
    good: NDArray[np.bool_] | None = None
    for offset, width, mask, value in _words(pattern, room) if len(starts) else ():
        words = pieces(data[offset:], width, f"<u{width}")[starts]  # [k]: a word behind each start
        if mask is not None:
            words &= mask
        right: NDArray[np.bool_] = words == value
        good = right if good is None else np.logical_and(good, right, out=good)
    return np.ones(len(starts), dtype=bool) if good is None else good


@cache
def _words(pattern: bytes, room: int) -> tuple[tuple[int, int, np.uint64 | None, int], ...]:
    """Cut a pattern into machine words: (offset, width, mask, value); one wide word with the rest masked out where there is room for it."""
    words: list[tuple[int, int, np.uint64 | None, int]] = []
    offset = 0
    while offset < len(pattern):
        left = len(pattern) - offset
        value = int.from_bytes(pattern[offset : offset + 8], "little")
        if left not in (1, 2, 4) and offset + 8 <= room:
            words.append((offset, 8, np.uint64((1 << 8 * left) - 1) if left < 8 else None, value))
            offset += 8
        else:
            width = next(w for w in (8, 4, 2, 1) if w <= left)
            words.append((offset, width, None, value & (1 << 8 * width) - 1))
            offset += width
    return tuple(words)


def pieces(data: Bytes, size: int, dtype: str = "") -> NDArray[Any]:
    """Return the view [len - size + 1] whose item i is data[i : i + size] in one piece. Raw bytes unless a dtype is given.

    Items of one opaque type are copied whole: gathering rows of [n, size] single bytes costs three times as much.
    """
    return np.ndarray((len(data) - size + 1,), dtype or _raw(size), data, 0, (1,))


@cache
def _raw(size: int) -> np.dtype[np.void]:
    return np.dtype(f"V{size}")


def unread_bytes(data: Bytes, line: bytes) -> int:
    """Return how long memcached's answer is for a value that it has no memory to bring back from its flash file; 0: data is none.

    It sends the value's first line, which it had built, then that line again and a miss in one (`storage_get_item` failed; seen with
    1.6.18, and so in the sources of July 2026). Who believed the first line would wait for a value that never comes.
    """
    answer = 2 * (line + EOL) + b"EN" + EOL
    return len(answer) if line.startswith(b"VA ") and data[: len(answer)].tobytes() == answer else 0


def find(data: Bytes, pattern: bytes) -> NDArray[np.intp]:
    """Return every position at which the pattern starts, ascending."""
    last = len(data) - len(pattern) + 1
    if last <= 0:
        return np.empty(0, dtype=np.intp)
    blocks = (slice(start, min(start + _SCANNED_AT_ONCE, last)) for start in range(0, last, _SCANNED_AT_ONCE))
    at = np.concatenate([_pairs(data[block], data[block.start + 1 : block.stop + 1], pattern) + block.start for block in blocks])
    for offset in range(2, len(pattern)):
        at = at[data[at + offset] == pattern[offset]]
    return at


def _pairs(first: Bytes, second: Bytes, pattern: bytes) -> NDArray[np.intp]:
    good = first == pattern[0]
    good &= second == pattern[1]
    return np.flatnonzero(good)


def windows(data: Bytes, size: int) -> NDArray[np.uint8]:
    """Return the view [len - size + 1, size] whose row i is data[i : i + size]."""
    return np.lib.stride_tricks.sliding_window_view(data, size)


def take_line(data: Bytes, at: int) -> bytes | None:
    """Return the line starting at `at` without its end, or None while its end has not arrived."""
    line = data[at : at + _MAX_LINE].tobytes()
    end = line.find(EOL)
    if end < 0 and len(line) == _MAX_LINE:
        raise ProtocolError(f"reply line longer than {_MAX_LINE} bytes: {line[:40]!r}…")
    return None if end < 0 else line[:end]


def prefix_size(data: Bytes, prefix: bytes) -> int:
    """Return the prefix's length when data begins with it, else 0."""
    return len(prefix) if prefix and data[: len(prefix)].tobytes() == prefix else 0


def is_error(line: bytes) -> bool:
    """Whether a reply line is an error of Redis or memcached."""
    return line[:1] == b"-" or line.split(b" ", 1)[0] in (b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR")


def value_size(line: bytes) -> int | None:
    """Return the size that the first line of a value announces (`$76`, `VA 76 …`), or None when it is no such line."""
    text = line[1:] if line[:1] == b"$" else line[3:].split(b" ")[0] if line[:3] == b"VA " else b""
    return int(text) if text.isdigit() else None


def parse_digits(data: Bytes, at: NDArray[np.intp], n_digits: NDArray[np.intp]) -> NDArray[np.uint64]:
    """Decimal numbers of the given widths at the given positions: uint64 [n]."""
    value = np.zeros(len(at), dtype=np.uint64)  # [n]: the numbers, up to the column reached
    for column in range(int(n_digits.max(initial=0))):
        inside = column < n_digits  # bool [n]: numbers that have this column
        digit = data[np.minimum(at + column, len(data) - 1)].astype(np.uint64) - np.uint64(ord("0"))
        value = np.where(inside, value * np.uint64(10) + digit, value)
    return value
