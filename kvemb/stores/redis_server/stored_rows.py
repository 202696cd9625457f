"""The rows that one Redis or Valkey server holds: listed, counted, told from other keys; and how compactly it keeps their buckets.

Keys of rows are found among a server's by the inverse of `RowKeys.encode`. What has another length, another character or an id beyond 64
bits is another program's, or ours for something else: markers and other small values have a colon in their names.
"""

import logging
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ConfigError, KvembError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.buckets import FIELD_BYTES, needs_filler
from kvemb.schema.keys import KEY_SIZE, PINNED_HEAD_SIZE, RowKeys
from kvemb.schema.pages import PageLayout
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.slots import TAG_SIZE, slot_tags
from kvemb.schema.table_def import TableDef
from kvemb.stores.redis_server.redis_admin import info
from kvemb.stores.redis_server.redis_commands import Word, ask, ask_all, shown, text_of
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in, replicas_of
from kvemb.stores.row_io import HeldRows
from kvemb.stores.server_errors import server_error
from kvemb.stores.store_repair import StoreRepair
from kvemb.wire.request_arrays import chunks
from kvemb.wire.resp.resp_value import ErrorLine, Value

_AT_ONCE = 1 << 16  # fields that a server may list in one piece: about a millisecond of its time
_SCAN_FIELDS, _SCAN_KEYS = 4096, 10_000
_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)
_DIGITS = np.full(256, -1, dtype=np.int16)
_DIGITS[_ALPHABET] = np.arange(64)
_BUCKET = re.compile(rb"[A-Za-z0-9_-]{3}\{[A-Za-z0-9_-]{3}\}([A-Za-z0-9_-]{3})?")
_PAGE = re.compile(rb"[A-Za-z0-9_-]{3}\{[A-Za-z0-9_-]{3}\}[A-Za-z0-9_-]{11}")
_SLOT_TAG = slice(TAG_SIZE + 1, 2 * TAG_SIZE + 1)  # of a bucket's key
_SHIFTS = np.arange(60, -1, -6, dtype=np.uint64)
_MOST_BUCKETS = 4096  # or pages, of a table, that are all counted; of more, so many drawn at random
_READ_PAGES = 128  # of a table, whose rows are counted
_PIPELINED = 1024
log = logging.getLogger("kvemb")
_ENTRIES, _VALUE = "hash-max-listpack-entries", "hash-max-listpack-value"


def rows_on(address: str, access: RedisAccess, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys]:
    """Yield the rows on a server in blocks of one table, of buckets outside `slots`, bool [16384], names; see `StoreRepair.keys_on`."""
    tags = {tag for tag, ours in zip(slot_tags(), slots.tolist(), strict=True) if ours}
    with logged_in(address, access, deadline) as link:
        for block in _scan(address, access, deadline):
            yield from page_keys_in(block)
            yield from rows_in_buckets(link, [key for key in bucket_keys_in(block) if key[_SLOT_TAG] in tags], deadline)


def _scan(address: str, access: RedisAccess, deadline: Deadline) -> Iterator[list[bytes]]:
    """Yield all keys of a server in blocks; one may come twice, and one that comes or goes meanwhile may be missed."""
    with logged_in(address, access, deadline) as link:
        cursor = "0"
        while True:
            answer = ask(link, Deadline.after(deadline.timeout_s), "SCAN", cursor, "COUNT", _SCAN_KEYS)
            if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
                raise ProtocolError(f"node {address}: SCAN answered {shown(answer)}, expected a cursor and keys")
            yield [key for key in answer[1] if isinstance(key, bytes)]
            cursor = text_of(link, answer[0], "SCAN")
            if cursor == "0":
                return


def rows_in_buckets(link: Link, keys: Sequence[bytes], deadline: Deadline) -> Iterator[RowKeys]:
    """Yield the rows in these hashes, in blocks; the deadline's length is that of each block."""
    if not keys:
        return
    sizes = ask_all(link, [("HLEN", key) for key in keys], Deadline.after(deadline.timeout_s))
    for key, size in zip(keys, sizes, strict=True):
        if isinstance(size, int):  # otherwise it is another program's value
            for fields in _fields(link, key, size, deadline):
                rows = b"".join(field for field in fields if isinstance(field, bytes) and len(field) == FIELD_BYTES)
                yield RowKeys(tag_of(key), np.frombuffer(rows, dtype="<u8").astype(np.uint64))


def _fields(link: Link, key: bytes, size: int, deadline: Deadline) -> Iterator[Sequence[Value]]:
    """The names of a hash's fields, in blocks."""
    if size <= _AT_ONCE:
        fields = _asked(link, deadline, "HKEYS", key)
        yield fields if isinstance(fields, list) else []
        return
    cursor = "0"
    while True:
        answer = _asked(link, deadline, "HSCAN", key, cursor, "COUNT", _SCAN_FIELDS)
        if answer is None:
            return
        if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
            raise ProtocolError(f"node {link.address}: HSCAN answered {shown(answer)}, expected a cursor and fields")
        yield answer[1][::2]
        cursor = text_of(link, answer[0], "HSCAN")
        if cursor == "0":
            return


def _asked(link: Link, deadline: Deadline, *words: Word) -> Value | None:
    """The answer about a bucket; None once its slot has gone to another node, and its rows with it: that one lists them."""
    (answer,) = ask_all(link, [words], Deadline.after(deadline.timeout_s))
    if isinstance(answer, ErrorLine):
        if answer.line.startswith((b"-MOVED ", b"-ASK ")):
            return None
        raise server_error(link.address, answer.line)
    return answer


def row_keys_in(keys: Sequence[bytes]) -> Iterator[RowKeys]:
    """Yield the row keys among these, table by table."""
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
    """Yield the keys of pages among these, table by table; the ids are the pages' numbers."""
    yield from row_keys_in([key[:TAG_SIZE] + key[PINNED_HEAD_SIZE:] for key in keys if _PAGE.fullmatch(key)])


def bucket_keys_in(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of buckets among these."""
    return [key for key in keys if _BUCKET.fullmatch(key)]


def tag_of(key: bytes) -> bytes:
    """The tag of the table that a bucket's key belongs to."""
    return key[:TAG_SIZE]


def _ids(digits: NDArray[np.int16]) -> NDArray[np.uint64]:
    ids: NDArray[np.uint64] = np.bitwise_or.reduce(digits.astype(np.uint64) << _SHIFTS, axis=1)
    return ids


def count_rows(
    repair: StoreRepair, address: str, access: RedisAccess, tables: Sequence[TableDef], deadline: Deadline
) -> list[HeldRows | None]:
    """See `StoreRows.held_on`."""
    with logged_in(address, access, deadline) as link:
        counted: list[HeldRows | None] = []
        for table in tables:
            whole = table.whole(_numbers(table.n_containers))
            keys = [bytes(key) for key in whole[np.flatnonzero(repair.keys_of(address, whole))].encode()]
            exact, times = len(whole) == table.n_containers, table.n_containers / max(len(whole), 1)
            if table.pages:
                there = [key for key, start in zip(keys, _of_each(link, keys, "GETRANGE", deadline, 0, 0), strict=True) if start]
                counted.append(_in_pages(link, table.pages, there, times, deadline, exact=exact))
                continue
            fillers = int(needs_filler(table.record.size_bytes, compact=table.layout == "compact"))
            # A slot on its way and another program's value give no number.
            sizes = (size - fillers for size in _of_each(link, keys, "HLEN", deadline) if isinstance(size, int) and size)
            counted.append(HeldRows(int(times * sum(sizes)), exact=exact))
    return counted


def _in_pages(link: Link, layout: PageLayout, keys: list[bytes], times: float, deadline: Deadline, *, exact: bool) -> HeldRows:
    """Count the rows in pages that are there, by the headers in some of them; `times` as many pages are there in all."""
    some = keys[:: -(-len(keys) // _READ_PAGES) or 1]
    n_rows = 0
    for value in _of_each(link, some, "GETRANGE", deadline, 0, -1):
        if isinstance(value, bytes):
            records = np.frombuffer(value[: len(value) // layout.record_bytes * layout.record_bytes], np.uint8)
            n_rows += int(records.reshape(-1, layout.record_bytes)[:, :HEADER_SIZE].any(axis=1).sum())
    n_rows = round(times * n_rows * len(keys) / max(len(some), 1))
    idle_bytes = round(times * len(keys)) * layout.page_bytes - n_rows * layout.record_bytes
    return HeldRows(n_rows, exact=exact and len(some) == len(keys), idle_bytes=max(0, idle_bytes))


def _of_each(link: Link, keys: list[bytes], command: str, deadline: Deadline, *words: Word) -> list[Value]:
    """The answers to a command with each of many keys."""
    asked = [[(command, key, *words) for key in keys[some]] for some in chunks(len(keys), _PIPELINED)]
    return [answer for commands in asked for answer in ask_all(link, commands, deadline)]


def _numbers(n_buckets: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    if n_buckets <= _MOST_BUCKETS:
        return np.arange(n_buckets, dtype=np.uint64)
    return np.unique(np.random.default_rng(n_buckets).integers(n_buckets, size=_MOST_BUCKETS, dtype=np.uint64))


def read_limits(address: str, access: RedisAccess, deadline: Deadline) -> BucketLimits:
    """Return a server's limits."""
    with logged_in(address, access, deadline) as link:
        answer = ask(link, deadline, "CONFIG", "GET", "hash-max-*")
    words = [word.decode("ascii", "replace") for word in answer if isinstance(word, bytes)] if isinstance(answer, list) else []
    told = {name.replace("ziplist", "listpack"): value for name, value in zip(words[::2], words[1::2], strict=False)}
    entries, value = told.get(_ENTRIES, ""), told.get(_VALUE, "")
    if not all(text.isdigit() and len(text) < 20 for text in (entries, value)):
        raise ConfigError(f"node {address}: CONFIG GET hash-max-* answered {words}, expected {_ENTRIES} and {_VALUE}")
    return BucketLimits(int(entries), int(value))


def set_limits(address: str, access: RedisAccess, limits: BucketLimits, deadline: Deadline) -> None:
    """Change a server's limits until it is started again, and its replicas', which may take its place. Raises as `read_limits`."""
    for replica in replicas_of(info(address, access, deadline)):
        try:
            _set(replica, access, limits, deadline)
        except KvembError as error:
            log.warning("the replica %s of %s keeps its limits of hashes: %s", replica, address, error)
    _set(address, access, limits, deadline)


def _set(address: str, access: RedisAccess, limits: BucketLimits, deadline: Deadline) -> None:
    with logged_in(address, access, deadline) as link:
        for name, value in ((_ENTRIES, limits.entries), (_VALUE, limits.value_bytes)):
            ask(link, deadline, "CONFIG", "SET", name.replace("listpack", "ziplist"), value)
