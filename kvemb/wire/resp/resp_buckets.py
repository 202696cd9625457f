"""Rows in buckets over the Redis protocol: HMGET, HSET, HDEL, UNLINK. Commands: https://redis.io/docs/latest/commands/

One command asks for neighbouring rows of one bucket. The bytes of a row have one length; a command's head has one of a few, by the digits
of its number of words. Both are made for all commands of a step at once, and then put in their places.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.schema.buckets import FIELD_BYTES, FILLER, BucketKeys, WholeBuckets, needs_filler
from kvemb.schema.keys import RowKeys
from kvemb.wire.buffer_scan import EOL, pieces
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.replies import CodeReply, RowsReader, RowsStep
from kvemb.wire.request_arrays import Bytes, StepLimit, chunks, columns
from kvemb.wire.resp.bucket_values import MISS, MOST_ROWS, WORD_BYTES, BucketRuns, BucketValuesReply, announcement_texts
from kvemb.wire.resp.integer_replies import IntegerReplies

_STEP_BYTES = 1 << 20  # of a step, at most MOST_ROWS: rows made together cost less each
_COMMAND_BYTES = 1 << 20  # of one command's rows: a server holds all of it in one buffer, and closes connections beyond 1 GB
_MOST_HEADS = 1 << 13  # of a table of them, which is kept: 26 tables of 256 buckets have fewer
_FIELD_HEAD = b"$%d\r\n" % FIELD_BYTES
_NEXT = _FIELD_HEAD[:2]
_HALF = np.array(32, np.uint64)
_ANY_FIELD = _FIELD_HEAD + bytes(FIELD_BYTES) + EOL
_FIELD_FRAME = np.frombuffer(_ANY_FIELD + _NEXT, dtype="<u8")
_FILLER_FIELD = b"$1\r\n-\r\n$%d\r\n%s\r\n" % (len(FILLER), FILLER)


class BucketRequests:
    """Builds steps for rows that lie in buckets; `ask` is sent before every command, and answered with `asked`."""

    def __init__(self, ask: bytes, asked: bytes, rows_per_step: int, limit: StepLimit) -> None:
        self._ask, self._asked = ask, asked
        self._rows_per_step, self._limit = rows_per_step, limit

    def read_steps(
        self, keys: BucketKeys, record_bytes: int, out: Bytes, found: NDArray[np.bool_], foreign: NDArray[np.bool_] | None
    ) -> list[RowsStep]:
        """Read n rows; whole records travel, their first out.shape[1] bytes are copied."""
        steps: list[RowsStep] = []
        if keys.sparse:  # a constant stride both ways: docs/adr/0046 has what it saves
            line = b"*1\r\n"
            head, miss = self._asked + line + b"$%d\r\n" % record_bytes, self._asked + line + MISS
            most = max(self._rows_per_step, min(MOST_ROWS, _STEP_BYTES // record_bytes))
            for rows in chunks(len(keys.ids), min(most, max(1, self._limit.most_bytes // record_bytes))):
                odd = None if foreign is None else foreign[rows]
                values = FixedSizeValuesReply(head, record_bytes, miss, out[rows], found[rows], self._asked, line, foreign=odd)
                steps.append(RowsStep(partial(self._get_singly, keys[rows]), values, values.reply_bytes))
            return steps
        for rows, some, runs in self._pieces(keys, record_bytes):
            odd = None if foreign is None else foreign[rows]
            reply = BucketValuesReply(runs, record_bytes, out[rows], found[rows], self._asked, odd)
            steps.append(RowsStep(partial(self._fields_request, b"HMGET", some, runs), reply, reply.reply_bytes))
        return steps

    def write_steps(self, keys: BucketKeys, records: RecordsToWrite, out: NDArray[np.uint8]) -> list[RowsStep]:
        """Write n records."""
        return [
            RowsStep(partial(self._set_request, some, runs, records[rows]), RunsDone(runs, self._asked, out[rows]))
            for rows, some, runs in self._pieces(keys, records.size_bytes)
        ]

    def erase_steps(self, keys: BucketKeys, out: NDArray[np.uint8]) -> list[RowsStep]:
        """Delete n rows; missing ones are fine."""
        return [
            RowsStep(partial(self._fields_request, b"HDEL", some, runs), RunsDone(runs, self._asked, out[rows]))
            for rows, some, runs in self._pieces(keys, FIELD_BYTES)
        ]

    def unlink_steps(self, keys: RowKeys, out: NDArray[np.uint8]) -> list[RowsStep]:
        """Delete whole buckets or pages. UNLINK frees memory in the background; DEL would halt the server for a bucket of many rows."""
        head, codes = self._ask + b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n" % keys.key_bytes, (self._asked + b":1\r\n", self._asked + b":0\r\n")

        def request(some: RowKeys) -> memoryview:
            return columns(len(some), head, some.encode(), EOL).reshape(-1).data

        return [
            RowsStep(partial(request, keys[rows]), CodeReply(codes, out[rows], self._asked))
            for rows in chunks(len(keys), self._rows_per_step)
        ]

    def _pieces(self, keys: BucketKeys, bytes_per_row: int) -> Iterator[tuple[slice, BucketKeys, BucketRuns]]:
        """Cut rows into steps: the first of many is small, because the server has nothing to do until it is sent."""
        most = max(self._rows_per_step, min(MOST_ROWS, _STEP_BYTES // bytes_per_row))
        most = min(most, max(1, self._limit.most_bytes // bytes_per_row))
        in_command = max(1, min(self._rows_per_step, _COMMAND_BYTES // bytes_per_row))
        n = len(keys.ids)
        start, first = 0, min(most, n if n <= most else self._rows_per_step)
        while start < n:
            rows = slice(start, min(start + (most if start else first), n))
            some = keys if n <= most else keys[rows]
            yield rows, some, BucketRuns.of(some.runs(), rows.stop - start, in_command)
            start = rows.stop

    def _get_singly(self, keys: BucketKeys) -> memoryview:
        """A command for each row: its table's and bucket's part is kept ready, the id is put in."""
        commands = _heads(keys, None, self._ask + b"*3\r\n$5\r\nHMGET\r\n$%d\r\n" % keys.key_bytes, EOL + _ANY_FIELD)  # items [n]
        at = commands.itemsize - len(EOL) - FIELD_BYTES
        np.ndarray((len(commands),), "<u8", commands, at, (commands.itemsize,))[:] = keys.ids
        return commands.view(np.uint8).data

    def _fields_request(self, name: bytes, keys: BucketKeys, runs: BucketRuns) -> memoryview:
        return self._request(name, keys, runs, _fields(keys), 1)

    def _set_request(self, keys: BucketKeys, runs: BucketRuns, records: RecordsToWrite) -> memoryview:
        value = b"\r\n$%d\r\n" % records.size_bytes
        rows = columns(len(keys.ids), _FIELD_HEAD, keys.fields(), value, records.bytes(), EOL + _NEXT)
        filler = _FILLER_FIELD if needs_filler(records.size_bytes, compact=keys.compact) else b""
        return self._request(b"HSET", keys, runs, rows, 2, filler)

    def _request(self, name: bytes, keys: BucketKeys, runs: BucketRuns, rows: Bytes, words_per_row: int, more: bytes = b"") -> memoryview:
        """A command for each run: its head, `more`, and its rows' bytes out of `rows`, uint8 [n, width + len(_NEXT)]."""
        width, texts = rows.shape[1] - len(_NEXT), announcement_texts()
        n_words = words_per_row * runs.sizes + (4 if more else 2)  # intp [k]: words of each command, k runs
        heads = _heads(keys, runs.firsts, b"$%d\r\n%s\r\n$%d\r\n" % (len(name), name, keys.key_bytes), EOL + more)  # items [k]
        announced = texts.lengths.take(n_words)  # intp [k]: bytes of `*<n_words>`
        head_bytes = announced + (len(self._ask) + heads.itemsize)  # intp [k]: bytes of a command before its rows
        offsets = head_bytes.cumsum()  # intp [k]: bytes of all heads up to each command's
        starts = runs.firsts * width + offsets - head_bytes  # intp [k]: where each command begins in out
        out = np.empty(width * len(rows) + offsets.item(-1) + len(_NEXT), dtype=np.uint8)  # all commands, and room for the last row's _NEXT
        places = np.arange(0, width * len(rows), width)  # intp [n]: where each row begins in out, by the next line
        places += offsets.repeat(runs.sizes)
        pieces(out, rows.shape[1])[places] = as_items(rows)
        # Items end in surplus bytes, which later writes cover: a row's by the command after it, an announcement's by its own head.
        if self._ask:
            pieces(out, len(self._ask))[starts] = np.void(self._ask)
            starts += len(self._ask)
        pieces(out, WORD_BYTES, "<u8")[starts] = texts.words.take(n_words)
        pieces(out, heads.itemsize)[starts + announced] = heads
        return out[: len(out) - len(_NEXT)].data


def _fields(keys: BucketKeys) -> Bytes:
    """`$8`, the field, and the next row's beginning: uint8 [n, 16]. Items of 16 bytes are put in place in two thirds of the time of 14."""
    words = np.empty((len(keys.ids), 2), dtype="<u8")  # 16 bytes per row
    np.left_shift(keys.ids, _HALF, words[:, 0])  # the id's low half, after the four bytes of `$8`
    np.right_shift(keys.ids, _HALF, words[:, 1])  # its high half, before the line's end and _NEXT
    words |= _FIELD_FRAME
    return words.view(np.uint8)


def _heads(keys: BucketKeys, which: NDArray[np.intp] | None, begin: bytes, end: bytes) -> NDArray[np.void]:
    """The bytes of commands with their buckets' keys in the middle: one item for each of the rows `which`, [k], or for all."""
    tags = (keys.tag,) if keys.tables is None else keys.tables.tags
    if len(tags) * keys.n_buckets > _MOST_HEADS or not keys.named_by_tag:
        names = (keys if which is None else keys[which]).encode()  # uint8 [k, key_bytes]
        texts = columns(len(names), begin, names, end)  # uint8 [k, bytes of a head]
        return as_items(texts)
    at = keys.buckets if which is None else keys.buckets.take(which)  # int64 [k]: where each bucket stands in the table of heads
    if keys.tables is not None:
        tables = keys.tables.which if which is None else keys.tables.which.take(which)
        at = at + tables.astype(np.int64) * keys.n_buckets
    return _head_table(tags, keys.n_buckets, begin, end).take(at)


@lru_cache(maxsize=64)  # a few commands for a process's tables; the set of tables may change from call to call
def _head_table(tags: tuple[bytes, ...], n_buckets: int, begin: bytes, end: bytes) -> NDArray[np.void]:
    """Return the heads of all buckets of tables, one table after another: items [tables * n_buckets]."""
    numbers = np.arange(n_buckets, dtype=np.uint64)
    names = np.concatenate([WholeBuckets(tag, numbers, n_buckets).encode() for tag in tags])
    texts = columns(len(names), begin, names, end)  # uint8 [tables * n_buckets, bytes of a head]
    return as_items(texts)


@dataclass(eq=False)
class RunsDone(RowsReader):
    """The replies to commands that wrote or deleted runs of rows: an integer each."""

    runs: BucketRuns  # of the rows
    asked: bytes  # the bytes before each integer, `+OK` or none
    out: NDArray[np.uint8]  # uint8 [n], set to 0 for rows that were answered

    def __post_init__(self) -> None:
        self.n_rows = len(self.out)
        lines = b"+:" if self.asked else b":"
        self._integers = IntegerReplies(
            lines, int(self.runs.sizes.max(initial=0)) + 1, np.zeros(len(self.runs.firsts), dtype=np.uint8), usual=0
        )

    @property
    def done(self) -> bool:
        return self._integers.done

    @property
    def fewest_bytes(self) -> int:
        return self._integers.fewest_bytes

    def take(self, data: Bytes) -> int:
        taken = self._integers.take(data)
        if self.done:
            firsts, sizes = self.runs.firsts.tolist(), self.runs.sizes.tolist()
            self.errors = [(firsts[run] + i, line) for run, line in self._integers.errors for i in range(sizes[run])]
            self.out[:] = 0
            self._at = self.n_rows
        return taken
