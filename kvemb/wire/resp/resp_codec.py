"""The Redis protocol (RESP2) for batches of rows. Specification: https://redis.io/docs/latest/develop/reference/protocol-spec/"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.buckets import BucketKeys, WholeBuckets
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PagedKeys, WholePages
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.replies import BlobReply, CodeReply, RowsStep, Step
from kvemb.wire.request_arrays import Bytes, StepLimit
from kvemb.wire.resp.resp_buckets import BucketRequests
from kvemb.wire.resp.resp_pages import PageRequests

_MISS = b"$-1\r\n"


class RespCodec:
    """A `Codec` for Redis, Valkey and Redis Cluster, where rows lie in buckets (`resp_buckets`) or in pages (`resp_pages`).

    With `asking` every command follows ASKING, as a node wants that is importing the rows' slot.
    """

    def __init__(self, *, asking: bool = False, rows_per_step: int = 1024) -> None:
        ask, asked = (command(b"ASKING"), b"+OK\r\n") if asking else (b"", b"")
        self.limit = StepLimit()
        self._pages = PageRequests(ask, asked, rows_per_step, self.limit)
        self._buckets = BucketRequests(ask, asked, rows_per_step, self.limit)

    def read_steps(
        self,
        keys: RowKeys,
        record_bytes: int,
        out: Bytes,
        found: NDArray[np.bool_],
        tokens: NDArray[np.uint64] | None,
        foreign: NDArray[np.bool_] | None = None,
    ) -> list[RowsStep]:
        """See `Codec.read_steps`; Redis has no tokens, so `tokens` is not used."""
        if isinstance(keys, PagedKeys):
            return self._pages.read_steps(keys, record_bytes, out, found, foreign)
        assert isinstance(keys, BucketKeys), type(keys)  # servers of this protocol hold no row under a key of its own
        return self._buckets.read_steps(keys, record_bytes, out, found, foreign)

    def write_steps(
        self, keys: RowKeys, records: RecordsToWrite, tokens: NDArray[np.uint64] | None, out: NDArray[np.uint8]
    ) -> list[RowsStep]:
        """See `Codec.write_steps`; writes never conflict."""
        if isinstance(keys, PagedKeys):
            return self._pages.write_steps(keys, records, out)
        assert isinstance(keys, BucketKeys), type(keys)
        return self._buckets.write_steps(keys, records, out)

    def erase_steps(self, keys: RowKeys, out: NDArray[np.uint8], tokens: NDArray[np.uint64] | None = None) -> list[RowsStep]:
        """See `Codec.erase_steps`; Redis has no tokens, so `tokens` is not used. Of whole buckets and pages all rows are deleted."""
        if isinstance(keys, WholeBuckets | WholePages):
            return self._buckets.unlink_steps(keys, out)
        if isinstance(keys, PagedKeys):
            return self._pages.erase_steps(keys, out)
        assert isinstance(keys, BucketKeys), type(keys)
        return self._buckets.erase_steps(keys, out)

    def read_kinds(self, keys: RowKeys, prefix_bytes: int) -> NDArray[np.int8] | None:
        return self._pages.read_kinds(keys, prefix_bytes) if isinstance(keys, PagedKeys) else None

    def write_kinds(self, keys: RowKeys, tokens: NDArray[np.uint64] | None) -> NDArray[np.int8] | None:
        return self._pages.write_kinds(keys) if isinstance(keys, PagedKeys) else None

    def get_step(self, key: bytes) -> tuple[Step, BlobReply]:
        reply = BlobReply(miss=_MISS[:-2])
        return Step(_get_request(key), reply), reply

    def put_step(self, key: bytes, value: bytes) -> tuple[Step, CodeReply]:
        reply = CodeReply((b"+OK\r\n",), np.zeros(1, dtype=np.uint8))
        return Step(memoryview(command(b"SET", key, value)), reply), reply


@lru_cache(maxsize=64)  # every batch reads a marker
def _get_request(key: bytes) -> memoryview:
    return memoryview(command(b"GET", key))


def command(*words: bytes) -> bytes:
    """Return one command in RESP."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
