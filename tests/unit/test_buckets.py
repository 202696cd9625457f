"""Where rows lie in buckets: golden keys, slots as Redis Cluster computes them, how many buckets a table has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb import init, optim
from kvemb.errors import InvalidInputError
from kvemb.schema.buckets import BucketKeys, buckets_for
from kvemb.schema.keys import coalesce_keys
from kvemb.schema.slots import N_SLOTS, text_slot
from kvemb.schema.table_def import TableDef
from kvemb.stores.node_batch import group_by_node

IDS = np.array([0, 1, 2, 2**63, 2**64 - 1], dtype=np.uint64)
SIZES = [1, 2, 256, N_SLOTS, 2 * N_SLOTS, 1 << 32]

# A released table's rows must never change their place.
GOLDEN = {
    1: ["tab{DLH}"] * 5,
    256: ["tab{DLH}", "tab{BOZ}", "tab{E4H}", "tab{FOZ}", "tab{AU4}"],
    N_SLOTS: ["tab{DLH}", "tab{EnY}", "tab{BSr}", "tab{DiK}", "tab{DVD}"],
    1 << 32: ["tab{DLH}AAA", "tab{EnY}hYd", "tab{BSr}jiX", "tab{DiK}m6l", "tab{DVD}FX8"],
}


def keys_of(ids: np.ndarray, n_buckets: int = 256, tag: bytes = b"tab") -> BucketKeys:
    return BucketKeys(tag, ids.astype(np.uint64), n_buckets, name="user")


def test_golden_keys_and_fields() -> None:
    for n_buckets, expected in GOLDEN.items():
        assert [bytes(key).decode() for key in keys_of(IDS, n_buckets).encode()] == expected
    assert [bytes(field).hex() for field in keys_of(IDS).fields()] == [
        "0000000000000000",
        "0100000000000000",
        "0200000000000000",
        "0000000000000080",
        "ffffffffffffffff",
    ]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50), st.sampled_from(SIZES))
def test_the_slot_is_the_one_that_redis_cluster_computes_of_the_key(ids: list[int], n_buckets: int) -> None:
    keys = keys_of(np.array(ids, dtype=np.uint64), n_buckets)
    assert keys.slots().tolist() == [text_slot(bytes(key)) for key in keys.encode()]
    assert ((keys.buckets >= 0) & (keys.buckets < n_buckets)).all()


@pytest.mark.parametrize("n_buckets", SIZES)
def test_every_bucket_has_a_key_of_its_own_and_rows_spread_evenly(n_buckets: int) -> None:
    keys = keys_of(np.arange(200_000), n_buckets)
    n_filled = len(np.unique(keys.buckets))
    assert len({bytes(key) for key in keys.encode()}) == n_filled
    if n_buckets <= 256:
        assert np.bincount(keys.buckets, minlength=n_buckets).min() > 0.8 * len(keys) / n_buckets


def test_rows_of_a_bucket_come_one_after_another_at_every_node() -> None:
    one, other = keys_of(np.arange(3000)), keys_of(np.arange(1000), tag=b"two")
    for keys in (one, coalesce_keys([one, other])):
        nodes = (keys.slots() * 3 // N_SLOTS).astype(np.int64)
        grouped = group_by_node(keys, nodes)
        for _, rows in grouped.shares:
            share = grouped.keys[rows]
            assert isinstance(share, BucketKeys)
            begins = share[share.runs()].encode()
            assert len(begins) == len({bytes(key) for key in begins})


def test_joined_keys_are_those_of_their_tables() -> None:
    one, other = keys_of(np.arange(5)), keys_of(np.arange(3, 9), tag=b"two")
    joined = coalesce_keys([one, other])
    assert joined.encode().tobytes() == one.encode().tobytes() + other.encode().tobytes()
    assert joined[4:7].slots().tolist() == [*one.slots()[4:], *other.slots()[:2]]
    containers = joined.containers()
    assert containers is not None
    assert containers.kind == "hash"
    assert {bytes(key) for key in containers.keys.encode()} == {bytes(key) for keys in (one, other) for key in keys.encode()}


def test_a_row_is_described_with_its_bucket_and_its_field() -> None:
    assert keys_of(np.array([258])).described(0) == (
        "table 'user', id 258 (key " + keys_of(np.array([258])).encode().tobytes().decode() + r', field "\x02\x01\x00\x00\x00\x00\x00\x00")'
    )


def test_how_many_buckets_a_table_has() -> None:
    assert [buckets_for(rows, 76) for rows in (None, 1, 64, 100, 128, 1000, 16_383, 16_384, 10**7)] == [256, 1, 1, 1, 2, 16, 256, 256, 256]
    assert buckets_for(10**9, 76) * (4 << 20) >= 76 * 10**9
    assert buckets_for(10**11, 52) == 1 << 21
    with pytest.raises(InvalidInputError, match="at most"):
        buckets_for(10**18, 1000)


def test_buckets_of_a_compact_table_hold_some_dozens_of_rows() -> None:
    assert [buckets_for(rows, 76, "compact") for rows in (1, 48, 49, 1000, 2_000_000)] == [1, 1, 2, 32, 1 << 16]
    assert 10**11 / buckets_for(10**11, 52, "compact") < 48
    with pytest.raises(InvalidInputError, match=r"records up to 1024 bytes.*1025"):
        buckets_for(1000, 1025, "compact")
    with pytest.raises(InvalidInputError, match="give one of fast, compact"):
        buckets_for(1000, 76, "small")


def definition(**changed: object) -> TableDef:
    return TableDef(**{"name": "user", "dim": 4, "optimizer": optim.sgd(), "initializer": init.zeros(), **changed})  # type: ignore[arg-type]


def test_the_number_of_buckets_is_fixed_with_the_table_and_no_identity() -> None:
    many = definition().laid_out(np.int64(10**9))
    assert many.n_buckets == 8192
    assert definition().n_buckets == 256
    many.require_same(definition())
    assert many.schema != definition().schema
    assert TableDef.from_dict(many.to_dict()) == many
    assert definition().laid_out(None) == definition()


def test_the_layout_is_kept_with_the_table_and_needs_a_number_of_rows() -> None:
    compact = definition().laid_out(10_000, "compact")
    assert (compact.layout, compact.n_buckets) == ("compact", 256)
    assert TableDef.from_dict(compact.to_dict()) == compact
    compact.require_same(definition())
    assert "layout" not in definition().laid_out(10_000, "fast").to_dict()
    with pytest.raises(InvalidInputError, match="'user': layout=\"compact\" needs expected_rows"):
        definition().laid_out(None, "compact")
    with pytest.raises(InvalidInputError, match="give one of fast, compact"):
        definition().laid_out(10, "dense")
    with pytest.raises(InvalidInputError, match="num_ids"):
        definition(num_ids=9).laid_out(None, "compact")


@pytest.mark.parametrize("given_rows", [0, -1, True, 1.5, "many"])
def test_what_is_no_number_of_rows_is_refused_naming_the_table(given_rows: object) -> None:
    with pytest.raises(InvalidInputError, match="table 'user': expected_rows is"):
        definition().laid_out(given_rows)


def test_a_table_with_num_ids_has_no_buckets() -> None:
    assert definition(num_ids=9).n_buckets is None
    with pytest.raises(InvalidInputError, match=r"give num_ids.*or expected_rows"):
        definition(num_ids=9).laid_out(9)
    with pytest.raises(InvalidInputError, match="n_buckets"):
        definition(num_ids=9, n_buckets=4)
    with pytest.raises(InvalidInputError, match="power of two"):
        definition(n_buckets=3)
