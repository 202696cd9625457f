"""Builds batches of requests: arrays with a constant stride, filled by whole columns. Pure."""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def columns(n: int, *pieces: bytes | Bytes) -> Bytes:
    """Return uint8 [n, stride]: the pieces side by side, constant bytes repeated in every row.

    Args:
        n: rows.
        pieces: bytes that every row holds, or uint8 [n, width] arrays.

    Example:
        >>> columns(2, b"GET ", np.array([[65], [66]], dtype=np.uint8)).tobytes()
        b'GET AGET B'
    """
    widths = [len(p) if isinstance(p, bytes) else p.shape[1] for p in pieces]
    out = np.empty((n, sum(widths)), dtype=np.uint8)
    at = 0
    for piece, width in zip(pieces, widths, strict=True):
        out[:, at : at + width] = np.frombuffer(piece, dtype=np.uint8) if isinstance(piece, bytes) else piece
        at += width
    return out


def decimals(values: NDArray[np.uint64]) -> Bytes:
    """Return decimal digits of equal width, zero-padded: uint8 [n, width]; width is that of the largest value.

    Example:
        >>> decimals(np.array([7, 120], dtype=np.uint64)).tobytes()
        b'007120'
    """
    width = len(str(int(values.max(initial=0))))
    out = np.empty((len(values), width), dtype=np.uint8)
    left = values
    for column in reversed(range(width)):
        left, digit = np.divmod(left, np.uint64(10))
        out[:, column] = digit.astype(np.uint8) + ord("0")
    return out


def chunks(n: int, size: int) -> list[slice]:
    """Cut n rows into slices of at most `size`.

    Example:
        >>> chunks(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(at, min(at + size, n)) for at in range(0, n, size)]
