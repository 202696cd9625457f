"""Builds batches of requests: arrays with a constant stride, filled by whole columns. Pure."""

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items

Bytes = NDArray[np.uint8]
_CHUNKS_AT_ONCE = 4


def columns(n: int, *pieces: bytes | Bytes) -> Bytes:
    """Return uint8 [n, stride]: the pieces side by side, uint8 [n, width] arrays and bytes that every row holds."""
    widths = [len(p) if isinstance(p, bytes) else p.shape[1] for p in pieces]
    # A first row of everything constant, repeated; then the others' columns, in whole items: byte by byte costs twice as much.
    first = b"".join(p if isinstance(p, bytes) else bytes(width) for p, width in zip(pieces, widths, strict=True))
    out = np.full(n, np.void(first)).view(np.uint8).reshape(n, len(first))  # uint8 [n, stride]
    at = 0
    for piece, width in zip(pieces, widths, strict=True):
        if not isinstance(piece, bytes) and width:
            as_items(out[:, at : at + width])[:] = as_items(piece)  # both [n] items of `width` bytes
        at += width
    return out


def decimals(values: NDArray[np.uint64]) -> Bytes:
    """Return decimal digits of equal width, zero-padded: uint8 [n, width]; width is that of the largest value."""
    width = len(str(int(values.max(initial=0))))
    out = np.empty((len(values), width), dtype=np.uint8)  # ASCII digits, filled from the last column on
    left = values  # uint64 [n]: the digits not yet written
    for column in reversed(range(width)):
        left, digit = np.divmod(left, np.uint64(10))  # digit: uint64 [n], 0 to 9
        out[:, column] = digit.astype(np.uint8) + ord("0")
    return out


def chunks(n: int, size: int) -> list[slice]:
    """Cut n rows into slices of at most `size`."""
    return [slice(0, n)] if 0 < n <= size else [slice(at, min(at + size, n)) for at in range(0, n, size)]


class StepLimit:
    """How many bytes of rows one step may carry, if it has several: fewer where a server ends connections that have so much to read.

    A server may limit what waits to be sent to a client (Redis: client-output-buffer-limit, maxmemory-clients), and then closes the
    connection without a word. Threads may share one: at worst a step is larger or smaller than it need be.
    """

    _LEAST_BYTES = 16 << 10
    _FORGOTTEN_BYTES = 16 << 20
    _TRIES_MORE_AFTER = 64

    def __init__(self) -> None:
        self.most_bytes, self.narrow, self._n_good = sys.maxsize, False, 0

    def ended(self, largest_bytes: int) -> bool:
        """Note that a connection was closed under steps, the largest of so many bytes; return whether later ones will have fewer."""
        before, self._n_good = self.most_bytes, 0
        if largest_bytes > self._LEAST_BYTES:
            self.most_bytes, self.narrow = max(self._LEAST_BYTES, min(before, largest_bytes) // 2), True
        return self.most_bytes < before

    def went_well(self) -> None:
        """Note that all steps of a batch were answered: after many such batches steps may be larger again."""
        self._n_good += 1
        if self._n_good >= self._TRIES_MORE_AFTER:
            self._n_good, self.narrow = 0, self.most_bytes < self._FORGOTTEN_BYTES
            self.most_bytes = 2 * self.most_bytes if self.narrow else sys.maxsize


class SharedRows:
    """n rows of requests, uint8 [rows, stride], built for several chunks at a time when the first of them is asked for.

    A chunk is small enough for the server, and then so small that half of building it is NumPy's price per call. The very first is built
    alone, since the server waits for it. Chunks must be asked for in order; one thread.
    """

    def __init__(self, build: Callable[[slice], Bytes], n: int, chunk_rows: int) -> None:
        self._build, self._n, self._chunk_rows = build, n, chunk_rows
        self._built, self._range = np.empty((0, 1), np.uint8), slice(0, 0)  # uint8 [rows of the range, stride]

    def __getitem__(self, rows: slice) -> Bytes:
        """Return the rows of a chunk: uint8 [rows, stride]."""
        if not (self._range.start <= rows.start and rows.stop <= self._range.stop):
            n = self._chunk_rows * (_CHUNKS_AT_ONCE if rows.start else 1)
            self._range = slice(rows.start, max(rows.stop, min(rows.start + n, self._n)))
            self._built = self._build(self._range)
        return self._built[rows.start - self._range.start : rows.stop - self._range.start]
