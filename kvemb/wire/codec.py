"""The interface of protocol codecs for the stores, and the records that they write."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.process.cached_property import batch_value
from kvemb.schema.keys import RowKeys
from kvemb.wire.replies import BlobReply, RowsReader, RowsStep, Step
from kvemb.wire.request_arrays import StepLimit

Bytes = NDArray[np.uint8]


@batch_value
class RecordsToWrite:
    """Records to write, put in order only as their requests are built."""

    values: Bytes  # uint8 [m, size_bytes]
    order: NDArray[np.intp] | None = None  # intp [n], which of them are written, in which order; None for all as they are

    @property
    def size_bytes(self) -> int:
        """Of one record."""
        return int(self.values.shape[1])

    def __getitem__(self, rows: slice) -> "RecordsToWrite":
        """Return some of the n records."""
        return RecordsToWrite(self.values[rows]) if self.order is None else RecordsToWrite(self.values, self.order[rows])

    def bytes(self) -> Bytes:
        """The records in order: uint8 [n, size_bytes]."""
        if self.order is None or not self.size_bytes:
            return self.values if self.order is None else self.values[self.order]
        return as_rows(as_items(np.ascontiguousarray(self.values))[self.order])


class Codec(Protocol):
    """Turns batches of rows into steps (request and reply) of one protocol. Arrays passed as outputs are filled as replies are fed."""

    limit: StepLimit  # of what a step that reads carries

    def read_steps(
        self,
        keys: RowKeys,
        record_bytes: int,
        out: Bytes,
        found: NDArray[np.bool_],
        tokens: NDArray[np.uint64] | None,
        foreign: NDArray[np.bool_] | None = None,
    ) -> list[RowsStep]:
        """Read n rows into out [n, prefix]; tokens where the protocol has compare-and-swap and the caller wants them.

        With tokens and a prefix of 0 bytes any value is found, of whatever size.
        Values of another size are marked in foreign, bool [n]; where that is None, they raise UnexpectedValueError.
        """

    def write_steps(
        self, keys: RowKeys, records: RecordsToWrite, tokens: NDArray[np.uint64] | None, out: NDArray[np.uint8]
    ) -> list[RowsStep]:
        """Write n records; out [n] gets 0 for stored, 1 for a conflict; tokens [n] of rows stored are replaced by the new ones."""

    def erase_steps(self, keys: RowKeys, out: NDArray[np.uint8], tokens: NDArray[np.uint64] | None = None) -> list[RowsStep]:
        """Delete n rows; out [n] gets 0 for deleted, 1 for not there, 2 for a conflict: the row's token is not the one given."""

    def read_kinds(self, keys: RowKeys, prefix_bytes: int) -> NDArray[np.int8] | None:
        """Return which rows have read requests of one length, small numbers int8 [n]; None when all have.

        Stores put the rows of a kind together, in ascending order of kinds, so that requests have one stride each.
        """

    def write_kinds(self, keys: RowKeys, tokens: NDArray[np.uint64] | None) -> NDArray[np.int8] | None:
        """Return the same of requests to write or (tokens None) to erase."""

    def get_step(self, key: bytes) -> tuple[Step, BlobReply]:
        """Read one small value, such as a marker."""

    def put_step(self, key: bytes, value: bytes) -> tuple[Step, RowsReader]:
        """Write one small value unconditionally; where that fails, the old one stays."""
