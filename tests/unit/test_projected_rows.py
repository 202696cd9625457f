"""How rows of a projection lie in its target, without a server."""

import numpy as np
import pytest

import kvemb.optim
from kvemb.arrays.rounding import from_int8
from kvemb.errors import ConfigError, ForeignRowsError
from kvemb.projection.projected_rows import ALL_SLOTS, ProjectedTable, SlotShare
from kvemb.projection.publisher import Projection
from kvemb.schema.table_def import TableDef
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.resp.resp_codec import RespCodec, command

IDS = np.arange(5, dtype=np.uint64)
ROWS = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)


def projected(dtype: str = "float32", layout: str = "kvemb", **options: object) -> ProjectedTable:
    definition = TableDef("user", 4, kvemb.optim.sgd(), kvemb.init.zeros(), **options)  # type: ignore[arg-type]
    return ProjectedTable.of(definition, dtype, layout, 3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_value_has_the_weights_alone(dtype: str) -> None:
    table = projected(dtype)
    values = table.values(IDS, ROWS)
    assert values.shape == (5, table.row_bytes)
    if dtype == "int8":
        scale = np.ascontiguousarray(values[:, 4:]).view("<f4")[:, 0]
        np.testing.assert_allclose(from_int8(values[:, :4].view(np.int8), scale), ROWS, atol=float(scale.max()) / 2)
    else:
        np.testing.assert_array_equal(values.view({"float32": "<f4", "float16": "<f2"}[dtype]), ROWS.astype(f"f{table.row_bytes // 4}"))


@pytest.mark.parametrize(("dtype", "bad"), [("int8", np.nan), ("int8", np.inf), ("float16", 70000.0)])
def test_a_weight_that_the_dtype_does_not_hold_is_refused_with_its_row(dtype: str, bad: float) -> None:
    rows = ROWS.copy()
    rows[2, 1] = bad
    with pytest.raises(ForeignRowsError, match=rf"table 'user', id 2: a weight is .*{dtype} does not hold"):
        projected(dtype).values(IDS, rows)


def test_every_hash_has_one_publisher() -> None:
    shares = [SlotShare.parse(f"{number}/3") for number in (1, 2, 3)]
    for options in ({"n_buckets": 2}, {"n_buckets": 64}, {"n_buckets": 1 << 15}, {"num_ids": 100_000}):
        table = projected(**options)
        keys = [{key for some in table.hash_keys(share) for key in some} for share in shares]
        assert set().union(*keys) == {key for some in table.hash_keys(ALL_SLOTS) for key in some}
        assert sum(map(len, keys)) == table.n_buckets
        ids = np.arange(1000, dtype=np.uint64)
        names = np.array([bytes(key) for key in table.keys(ids).encode()])
        for share, own in zip(shares, keys, strict=True):
            assert set(names[share.owns(table.keys(ids).slots())].tolist()) <= own


def test_the_description_names_the_hash_of_every_id() -> None:
    table = projected(n_buckets=64)
    keys = table.described()["keys"]
    for row, key in zip(IDS.tolist(), table.keys(IDS).encode(), strict=True):
        mix = (row ^ row >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mix = (mix ^ mix >> 27) * 0x94D049BB133111EB % 2**64
        assert keys[(mix ^ mix >> 31) * len(keys) >> 64].encode() == bytes(key)
    assert projected(layout="nve").described()["keys"] == ["nv_nve_table{3/0}"]


def test_one_hash_is_written_and_erased_by_its_name() -> None:
    keys = projected(layout="nve").keys(IDS[:2])
    (write,) = RespCodec().write_steps(keys, RecordsToWrite(ROWS[:2].view(np.uint8)), None, np.zeros(2, np.uint8))
    (erase,) = RespCodec().erase_steps(keys, np.zeros(2, np.uint8))
    fields, values = [bytes(8), b"\1" + bytes(7)], [row.tobytes() for row in ROWS]
    assert bytes(write.request) == command(b"HSET", b"nv_nve_table{3/0}", fields[0], values[0], fields[1], values[1])
    assert bytes(erase.request) == command(b"HDEL", b"nv_nve_table{3/0}", *fields)


@pytest.mark.parametrize("prefix", ["", "kvemb:view-7:"], ids=["maintained", "view"])
@pytest.mark.parametrize("layout", ["kvemb", "nve"])
def test_some_of_the_keys_lie_where_all_of_them_do(layout: str, prefix: str) -> None:
    definition = TableDef("user", 4, kvemb.optim.sgd(), kvemb.init.zeros(), n_buckets=64)
    keys = ProjectedTable.of(definition, "float32", layout, 3, prefix if layout == "kvemb" else "").keys(IDS)
    names = keys.encode()
    for some in (slice(1, 3), np.array([4, 0])):
        assert np.array_equal(keys[some].encode(), names[some])
        assert keys[some].ids.tolist() == IDS[some].tolist()


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no share"):
        SlotShare.parse(text)


def test_tables_are_named_once_and_one_hash_has_one_publisher() -> None:
    with pytest.raises(ConfigError, match="--tables"):
        Projection(("user", "user"))
    with pytest.raises(ConfigError, match="--part"):
        Projection(("user",), layout="nve", share=SlotShare(0, 2))
