"""Lists the rows that a Redis or Valkey server holds: in pages, and as fields of buckets."""

from collections.abc import Iterator, Sequence

import numpy as np

from kvemb.errors import ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.schema.buckets import FIELD_BYTES
from kvemb.schema.keys import RowKeys
from kvemb.stores.node_batch import server_error
from kvemb.stores.redis_server.key_parsing import bucket_keys_in, page_keys_in, tag_of
from kvemb.stores.redis_server.redis_admin import scan
from kvemb.stores.redis_server.redis_commands import RedisAccess, Word, admin, ask_all, shown, text_of
from kvemb.wire.resp.resp_value import ErrorLine, Value

_AT_ONCE = 1 << 16  # fields that a server may list in one piece: about a millisecond of its time
_SCAN_FIELDS = 4096


def rows_on(address: str, access: RedisAccess, deadline: Deadline) -> Iterator[RowKeys]:
    """Yield the rows on a server in blocks of one table; see `StoreRepair.keys_on`.

    Args:
        address: "host:port".
        access: credentials, and how to connect.
        deadline: its length is that of each block: a whole listing takes as long as there are rows.
    """
    with admin(address, access, deadline) as link:
        for block in scan(address, access, deadline):
            yield from page_keys_in(block)
            yield from _in_buckets(link, bucket_keys_in(block), deadline)


def _in_buckets(link: Link, keys: Sequence[bytes], deadline: Deadline) -> Iterator[RowKeys]:
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
