"""What a protocol codec offers to the stores, and the shared shape of its results."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.wire.replies import BlobReply, CodeReply, Step

Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """Turns batches of rows into steps (request and reply) of one protocol. Arrays passed as outputs are filled as replies are fed."""

    def read_steps(
        self, keys: Bytes, record_bytes: int, out: Bytes, found: NDArray[np.bool_], tokens: NDArray[np.uint64] | None
    ) -> list[Step]:
        """Read n rows into out [n, prefix]; tokens where the protocol has compare-and-swap and the caller wants them."""

    def write_steps(self, keys: Bytes, records: Bytes, tokens: NDArray[np.uint64] | None, out: NDArray[np.uint8]) -> list[Step]:
        """Write n records; out [n] gets 0 for stored, 1 for a conflict; tokens [n] of rows stored are replaced by the new ones."""

    def erase_steps(self, keys: Bytes, out: NDArray[np.uint8]) -> list[Step]:
        """Delete n rows; out [n] gets 0 for deleted, 1 for not there."""

    def get_step(self, key: bytes) -> tuple[Step, BlobReply]:
        """Read one small value, such as a marker."""

    def put_step(self, key: bytes, value: bytes) -> tuple[Step, CodeReply]:
        """Write one small value unconditionally."""
