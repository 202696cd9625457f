"""The Redis protocol (RESP2) for batches of rows. Specification: https://redis.io/docs/latest/develop/reference/protocol-spec/"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.buckets import BucketKeys, WholeBuckets
from kvemb.schema.keys import KEY_SIZE, RowKeys
from kvemb.schema.pages import PagedKeys
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.replies import BlobReply, CodeReply, RowsStep, Step
from kvemb.wire.request_arrays import Bytes, SharedRows, chunks, columns
from kvemb.wire.resp.resp_buckets import BucketRequests
from kvemb.wire.resp.resp_pages import PageRequests

_MISS = b"$-1\r\n"
_KEY_HEAD = b"$%d\r\n" % KEY_SIZE


class RespCodec:
    """Builds steps for Redis, Valkey and Redis Cluster; for rows that lie in pages, those of `kvemb.wire.resp.resp_pages`.

    Args:
        multi_get: read records with MGET, one command per chunk, which costs the server less than pipelined GETs.
            Redis Cluster refuses it, because the keys of a chunk lie in many slots.
        asking: send ASKING before every row's command, as a node wants that is importing the row's slot.
        rows_per_step: rows of one request; small enough to overlap with its neighbours, large enough to cost nothing per step.
    """

    def __init__(self, *, multi_get: bool, asking: bool = False, rows_per_step: int = 1024) -> None:
        assert not (multi_get and asking)
        self._multi_get = multi_get
        self._ask, self._asked = (command(b"ASKING"), b"+OK\r\n") if asking else (b"", b"")
        self._rows_per_step = rows_per_step
        self._pages = PageRequests(self._ask, self._asked, rows_per_step)
        self._buckets = BucketRequests(self._ask, self._asked, rows_per_step)

    def read_steps(
        self,
        keys: RowKeys,
        record_bytes: int,
        out: Bytes,
        found: NDArray[np.bool_],
        tokens: NDArray[np.uint64] | None,
        foreign: NDArray[np.bool_] | None = None,
    ) -> list[RowsStep]:
        """See `Codec.read_steps`; Redis has no tokens, so `tokens` is left alone."""
        if isinstance(keys, PagedKeys):
            return self._pages.read_steps(keys, record_bytes, out, found, foreign)
        if isinstance(keys, BucketKeys):
            return self._buckets.read_steps(keys, record_bytes, out, found, foreign)
        head, miss = self._asked + b"$%d\r\n" % record_bytes, self._asked + _MISS
        shared = SharedRows(lambda rows: self._get_rows(keys[rows]), len(keys), self._rows_per_step)
        steps = []
        for rows in chunks(len(keys), self._rows_per_step):
            preamble = b"*%d\r\n" % (rows.stop - rows.start) if self._multi_get else b""
            odd = None if foreign is None else foreign[rows]
            reply = FixedSizeValuesReply(head, record_bytes, miss, out[rows], found[rows], preamble, self._asked, foreign=odd)
            steps.append(RowsStep(partial(self._get_request, shared, rows), reply, reply.n_rows * (len(head) + record_bytes + 2)))
        return steps

    def write_steps(
        self, keys: RowKeys, records: RecordsToWrite, tokens: NDArray[np.uint64] | None, out: NDArray[np.uint8]
    ) -> list[RowsStep]:
        """See `Codec.write_steps`: pipelined SETs, which never conflict."""
        if isinstance(keys, PagedKeys):
            return self._pages.write_steps(keys, records, out)
        if isinstance(keys, BucketKeys):
            return self._buckets.write_steps(keys, records, out)
        return [
            RowsStep(partial(self._set_request, keys[rows], records[rows]), CodeReply((self._asked + b"+OK\r\n",), out[rows], self._asked))
            for rows in chunks(len(keys), self._rows_per_step)
        ]

    def erase_steps(self, keys: RowKeys, out: NDArray[np.uint8], tokens: NDArray[np.uint64] | None = None) -> list[RowsStep]:
        """See `Codec.erase_steps`; Redis has no tokens, so `tokens` is left alone."""
        if isinstance(keys, PagedKeys):
            return self._pages.erase_steps(keys, out)
        if isinstance(keys, BucketKeys) and not isinstance(keys, WholeBuckets):
            return self._buckets.erase_steps(keys, out)
        codes = (self._asked + b":1\r\n", self._asked + b":0\r\n")
        return [
            RowsStep(partial(self._del_request, keys[rows]), CodeReply(codes, out[rows], self._asked))
            for rows in chunks(len(keys), self._rows_per_step)
        ]

    def read_kinds(self, keys: RowKeys, prefix_bytes: int) -> NDArray[np.int8] | None:
        """See `Codec.read_kinds`."""
        return self._pages.read_kinds(keys, prefix_bytes) if isinstance(keys, PagedKeys) else None

    def write_kinds(self, keys: RowKeys, tokens: NDArray[np.uint64] | None) -> NDArray[np.int8] | None:
        """See `Codec.write_kinds`."""
        return self._pages.write_kinds(keys) if isinstance(keys, PagedKeys) else None

    def get_step(self, key: bytes) -> tuple[Step, BlobReply]:
        """See `Codec.get_step`."""
        reply = BlobReply(miss=_MISS[:-2])
        return Step(memoryview(command(b"GET", key)), reply), reply

    def put_step(self, key: bytes, value: bytes) -> tuple[Step, CodeReply]:
        """See `Codec.put_step`."""
        reply = CodeReply((b"+OK\r\n",), np.zeros(1, dtype=np.uint8))
        return Step(memoryview(command(b"SET", key, value)), reply), reply

    def _get_rows(self, keys: RowKeys) -> Bytes:
        head = b"" if self._multi_get else self._ask + b"*2\r\n$3\r\nGET\r\n"
        return columns(len(keys), head + _KEY_HEAD, keys.encode(), b"\r\n")

    def _get_request(self, shared: SharedRows, rows: slice) -> memoryview:
        body = shared[rows].reshape(-1)
        if not self._multi_get:
            return body.data
        head = b"*%d\r\n$4\r\nMGET\r\n" % (rows.stop - rows.start + 1)
        return np.concatenate([np.frombuffer(head, dtype=np.uint8), body]).data

    def _set_request(self, keys: RowKeys, records: RecordsToWrite) -> memoryview:
        head, middle = self._ask + b"*3\r\n$3\r\nSET\r\n" + _KEY_HEAD, b"\r\n$%d\r\n" % records.size_bytes
        return columns(len(keys), head, keys.encode(), middle, records.bytes(), b"\r\n").reshape(-1).data

    def _del_request(self, keys: RowKeys) -> memoryview:
        return columns(len(keys), self._ask + b"*2\r\n$3\r\nDEL\r\n$%d\r\n" % keys.key_bytes, keys.encode(), b"\r\n").reshape(-1).data


def command(*words: bytes) -> bytes:
    """Return one command in RESP.

    Example:
        >>> command(b"GET", b"key")
        b'*2\\r\\n$3\\r\\nGET\\r\\n$3\\r\\nkey\\r\\n'
    """
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
