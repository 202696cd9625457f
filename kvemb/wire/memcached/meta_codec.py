"""The memcached meta protocol for batches of rows. Specification: doc/protocol.txt of memcached 1.6 ("Meta Commands").

Writes always carry a condition: a token from the read before, or "must not exist". So a write in doubt that lands late cannot overwrite a
newer row. An erase that was given the tokens of its rows cannot delete one. Tokens are sent zero-padded to one width, which keeps the
stride of a batch constant.

Writes are the classic `add`, `cas` and `replace`: where the server has no room for the new value, those leave the old one. `ms` and `set`
delete it then, whatever their condition says, also when they come late; and a row that is gone looks like one that never was
(docs/adr/0112). They do not tell the new token; a `mg` right after each does.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.keys import RowKeys
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.memcached.memcached_replies import CasValuesReply, CasWriteReply, ClassicWriteReply
from kvemb.wire.replies import BlobReply, CodeReply, RowsReader, RowsStep, Step
from kvemb.wire.request_arrays import Bytes, SharedRows, StepLimit, chunks, columns, decimals


class MetaCodec:
    """Builds requests in memcached's meta commands (>= 1.6), and the readers of their replies; see `Codec`."""

    def __init__(self, *, rows_per_step: int = 1024) -> None:
        self._rows_per_step, self.limit = rows_per_step, StepLimit()

    def read_steps(
        self,
        keys: RowKeys,
        record_bytes: int,
        out: Bytes,
        found: NDArray[np.bool_],
        tokens: NDArray[np.uint64] | None,
        foreign: NDArray[np.bool_] | None = None,
    ) -> list[RowsStep]:
        alone = tokens is not None and not out.shape[1]  # tokens without values: a tenth of the bytes, and half of the server's time
        tail = b" v\r\n" if tokens is None else b" c\r\n" if alone else b" v c\r\n"
        head = b"VA %d\r\n" % record_bytes
        most = min(self._rows_per_step, max(1, self.limit.most_bytes // record_bytes))
        shared = SharedRows(lambda rows: columns(rows.stop - rows.start, b"mg ", keys[rows].encode(), tail), len(keys), most)
        steps = []
        for rows in chunks(len(keys), most):
            odd = None if foreign is None else foreign[rows]
            request = partial(_shared_request, shared, rows)
            if tokens is None:
                reply = FixedSizeValuesReply(head, record_bytes, b"EN\r\n", out[rows], found[rows], foreign=odd)
                steps.append(RowsStep(request, reply, reply.reply_bytes))
            elif alone:
                steps.append(RowsStep(request, CasWriteReply(np.empty(rows.stop - rows.start, np.uint8), tokens[rows], found[rows])))
            else:
                steps.append(RowsStep(request, CasValuesReply(record_bytes, out[rows], found[rows], tokens[rows], odd)))
        return steps

    def write_steps(
        self, keys: RowKeys, records: RecordsToWrite, tokens: NDArray[np.uint64] | None, out: NDArray[np.uint8]
    ) -> list[RowsStep]:
        """See `Codec.write_steps`; new rows (token 0) come first, else ValueError: a write without a condition is never sent."""
        if tokens is None:
            raise ValueError("memcached writes need tokens")
        n_new = int(np.count_nonzero(tokens == 0))
        if tokens[:n_new].any():
            raise ValueError("new rows (token 0) come first")
        steps = []
        for first, last in ((0, n_new), (n_new, len(keys))):
            for rows in chunks(last - first, self._rows_per_step):
                at = slice(first + rows.start, first + rows.stop)
                old = None if last == n_new else tokens[at].copy()  # the reply puts new tokens in the place of these
                request = partial(_store_request, keys[at], records[at], old)
                steps.append(RowsStep(request, CasWriteReply(out[at], tokens[at], written=True)))
        return steps

    def erase_steps(self, keys: RowKeys, out: NDArray[np.uint8], tokens: NDArray[np.uint64] | None = None) -> list[RowsStep]:
        codes = (b"HD\r\n", b"NF\r\n", b"EX\r\n")
        return [
            RowsStep(partial(_erase_request, keys[rows], None if tokens is None else tokens[rows]), CodeReply(codes, out[rows]))
            for rows in chunks(len(keys), self._rows_per_step)
        ]

    def read_kinds(self, keys: RowKeys, prefix_bytes: int) -> NDArray[np.int8] | None:
        return None

    def write_kinds(self, keys: RowKeys, tokens: NDArray[np.uint64] | None) -> NDArray[np.int8] | None:
        """See `Codec.write_kinds`: new rows (token 0) are added, the others replaced."""
        return None if tokens is None else (tokens != 0).view(np.int8)

    def get_step(self, key: bytes) -> tuple[Step, BlobReply]:
        reply = BlobReply(miss=b"EN")
        return Step(memoryview(b"mg %s v\r\n" % key), reply), reply

    def put_step(self, key: bytes, value: bytes) -> tuple[Step, RowsReader]:
        reply = ClassicWriteReply(np.zeros(2, bool))
        what = b"%s 0 0 %d\r\n%s\r\n" % (key, len(value), value)
        return Step(memoryview(b"add %sreplace %s" % (what, what)), reply), reply


def _shared_request(shared: SharedRows, rows: slice) -> memoryview:
    return shared[rows].reshape(-1).data


def _erase_request(keys: RowKeys, tokens: NDArray[np.uint64] | None) -> memoryview:
    condition = (b"",) if tokens is None else (b" C", decimals(tokens))
    return columns(len(keys), b"md ", keys.encode(), *condition, b"\r\n").reshape(-1).data


def _store_request(keys: RowKeys, records: RecordsToWrite, tokens: NDArray[np.uint64] | None) -> memoryview:
    """Store under a condition: the tokens, or None for rows that must not exist; and ask for the new ones."""
    names, size = keys.encode(), b" 0 0 %d" % records.size_bytes
    condition = (b"add ", names, size) if tokens is None else (b"cas ", names, size + b" ", decimals(tokens))
    return columns(len(keys), *condition, b"\r\n", records.bytes(), b"\r\nmg ", names, b" c\r\n").reshape(-1).data
