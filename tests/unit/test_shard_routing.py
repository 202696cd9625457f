"""Routing rows to shards and cutting them into messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.client import shard_client
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import CountReply, RowsRequest
from kvemb.protocol.shard_routing import pieces, route, split
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import Placement
from tests.owners import shard_of


def rows_of(n: int, dim: int = 3, versions: bool = True) -> TableRows:
    ids = np.arange(n, dtype=np.uint64) * np.uint64(2**55 + 7)
    rows = np.arange(n * dim, dtype=np.float32).reshape(n, dim)
    return TableRows("t", 9, ids, rows, ids + np.uint64(1) if versions else np.empty(0, np.uint64), {"lr": 0.1}, placement=Placement(256))


def joined(parts: list[TableRows]) -> list[tuple[int, list[float], int | None]]:
    out = []
    for part in parts:
        versions = part.versions.tolist() or [None] * len(part.ids)
        out += list(zip(part.ids.tolist(), part.rows.tolist(), versions, strict=True))
    return out


@given(st.integers(0, 60), st.integers(1, 7), st.booleans())
def test_every_row_goes_to_its_owner_once_with_its_version(n: int, n_shards: int, versions: bool) -> None:
    rows = rows_of(n, versions=versions)
    shares = route(rows, ClusterMap.first(0, n_shards))
    assert len(shares) == n_shards
    for shard, share in enumerate(shares):
        assert (shard_of(share.ids, n_shards) == shard).all()
        assert (np.diff(share.ids.astype(object)) > 0).all()
        assert (share.table, share.schema, share.hyper) == ("t", 9, {"lr": 0.1})
    assert sorted(joined(shares)) == joined([rows])


@given(st.integers(0, 60), st.integers(1, 2000))
def test_pieces_are_the_rows_in_order_within_the_limit(n: int, limit: int) -> None:
    rows = rows_of(n)
    cut = list(pieces(rows, limit))
    assert cut
    assert joined(cut) == joined([rows])
    assert all(piece.size_bytes <= limit or len(piece.ids) == 1 for piece in cut)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(28, 3000))
def test_messages_hold_every_row_of_every_table_within_the_limit(sizes: list[int], limit: int) -> None:
    tables = [rows_of(n) for n in sizes]
    messages = split(tables, limit)
    assert all(messages)
    assert joined([rows for message in messages for rows in message]) == joined(tables)
    assert all(sum(rows.size_bytes for rows in m) <= limit or len(m) == len(m[0].ids) == 1 for m in messages)


def test_a_table_without_rows_is_still_in_a_message() -> None:
    assert [[len(rows.ids) for rows in message] for message in split([rows_of(0), rows_of(2), rows_of(0)])] == [[0, 2, 0]]


class OneShard:
    """A shard that takes every message, and notes until when its answer is awaited."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, float]] = []

    cluster_map = ClusterMap.first(0, 1)

    def wait_accepted(self, deadline: Deadline) -> None:
        self.sent.append((0, deadline.at_s))

    def try_each(self, verb: object, requests: dict[int, RowsRequest], deadline: Deadline) -> dict[int, CountReply]:
        self.sent.append((len(requests[0].rows.ids), deadline.at_s))
        return {0: CountReply(len(requests[0].rows.ids))}


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_every_message_of_a_large_erase_has_the_whole_time_unless_the_caller_set_it(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    monkeypatch.setattr(shard_client, "_MESSAGE_BYTES", 8 * 4)
    shard = OneShard()
    client = shard_client.ShardClient(shard, shard)  # type: ignore[arg-type]
    ids = np.arange(10, dtype=np.uint64)
    assert client.erase(TableRows("user", 0, ids, np.empty((10, 0), np.float32)), timeout_s) == 10
    assert sorted(n_rows for n_rows, _ in shard.sent) == [0, 2, 4, 4]
    assert len({at_s for _, at_s in shard.sent}) == (4 if timeout_s is None else 1)
