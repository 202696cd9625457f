"""Finds the keys of rows among a server's keys. Pure.

The inverse of `RowKeys.encode`. What has another length, another character or an id beyond 64 bits is another program's, or ours for
something else: markers and other small values have a colon in their names.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.keys import KEY_SIZE, PINNED_HEAD_SIZE, RowKeys
from kvemb.schema.slots import TAG_SIZE

_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)
_DIGITS = np.full(256, -1, dtype=np.int16)
_DIGITS[_ALPHABET] = np.arange(64)
_BUCKET = re.compile(rb"[A-Za-z0-9_-]{3}\{[A-Za-z0-9_-]{3}\}([A-Za-z0-9_-]{3})?")
_PAGE = re.compile(rb"[A-Za-z0-9_-]{3}\{[A-Za-z0-9_-]{3}\}[A-Za-z0-9_-]{11}")
_SHIFTS = np.arange(60, -1, -6, dtype=np.uint64)


def row_keys_in(keys: Sequence[bytes]) -> Iterator[RowKeys]:
    """Yield the row keys among these, table by table.

    Example:
        >>> [(found.tag, found.ids.tolist()) for found in row_keys_in([b"tabAAAAAAAAAAB", b"kvemb:marker", b"other"])]
        [(b'tab', [1])]
    """
    fitting = [key for key in keys if len(key) == KEY_SIZE]
    if not fitting:
        return
    characters = np.frombuffer(b"".join(fitting), dtype=np.uint8).reshape(-1, KEY_SIZE)
    digits = _DIGITS[characters]
    # The first of the id's eleven digits holds its top four bits only.
    good = (digits >= 0).all(axis=1) & (digits[:, TAG_SIZE] < 16)
    characters, digits = characters[good], digits[good]
    tags = np.ascontiguousarray(characters[:, :TAG_SIZE]).view(f"S{TAG_SIZE}")[:, 0]
    for tag in np.unique(tags):
        yield RowKeys(bytes(tag), _ids(digits[tags == tag, TAG_SIZE:]))


def page_keys_in(keys: Sequence[bytes]) -> Iterator[RowKeys]:
    """Yield the keys of pages among these, table by table; the ids are the pages' numbers.

    Example:
        >>> [(found.tag, found.ids.tolist()) for found in page_keys_in([b"tab{EnY}AAAAAAAAAAB", b"tab{EnY}", b"tabAAAAAAAAAAB"])]
        [(b'tab', [1])]
    """
    yield from row_keys_in([key[:TAG_SIZE] + key[PINNED_HEAD_SIZE:] for key in keys if _PAGE.fullmatch(key)])


def bucket_keys_in(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of buckets among these.

    Example:
        >>> bucket_keys_in([b"tab{Alr}", b"tab{Alr}AAB", b"kvemb:marker:{Alr}", b"tab{A r}", b"tabAAAAAAAAAAB"])
        [b'tab{Alr}', b'tab{Alr}AAB']
    """
    return [key for key in keys if _BUCKET.fullmatch(key)]


def tag_of(key: bytes) -> bytes:
    """The tag of the table that a bucket's key belongs to."""
    return key[:TAG_SIZE]


def _ids(digits: NDArray[np.int16]) -> NDArray[np.uint64]:
    ids: NDArray[np.uint64] = np.bitwise_or.reduce(digits.astype(np.uint64) << _SHIFTS, axis=1)
    return ids
