"""Gradients in 16 bits on their way to a shard: their rounding, the refusals, and the values at the shard."""

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.arrays.rounding import to_float32
from kvemb.datapath.push import prepare_push
from kvemb.errors import InvalidInputError
from kvemb.protocol.message_format import digest_tables
from kvemb.protocol.messages import PushPart
from kvemb.protocol.shard_routing import route, split
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef
from paramserver.ingest.part_checks import check_part
from tests.owners import shard_of

TABLE = TableDef("user", 4, optim.sgd(lr=0.5), init.zeros())
THREE = ClusterMap.first(0, 3)
HALVES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to the nearest: half of a last bit."""


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_arrive_as_close_as_the_dtype_allows(dtype: str) -> None:
    ids = np.arange(500, dtype=np.int64)
    grads = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    rows = prepare_push(TABLE, ids, grads, wire_dtype=dtype)
    share = route(rows, THREE)[1]
    (message,) = split([share])
    part = PushPart("a", 1, 1, 1, False, message, digest_tables(message))
    (checked,) = check_part(PushPart.decode(part.encode()), lambda name, schema: TABLE, 1, THREE)
    assert checked.rows.dtype == np.float32
    np.testing.assert_allclose(checked.rows, grads[shard_of(ids.view(np.uint64), 3) == 1], rtol=HALVES[dtype])
    assert (checked.rows != grads[shard_of(ids.view(np.uint64), 3) == 1]).any()  # it did travel in 16 bits
    assert share.rows.nbytes * 2 == checked.rows.nbytes


@pytest.mark.parametrize("dtype", HALVES)
def test_duplicates_are_summed_before_they_are_rounded(dtype: str) -> None:
    small = np.full((4096, 4), 2.0**-10, np.float32)  # 1 + 2**-10 is 1 in bfloat16, so that sums there would stop growing
    rows = prepare_push(TABLE, np.full(4097, 7), np.concatenate([np.ones((1, 4), np.float32), small]), wire_dtype=dtype)
    assert to_float32(rows.rows, dtype).tolist() == [[5.0] * 4]


def test_a_gradient_beyond_float16_is_refused_by_name_and_bfloat16_takes_it() -> None:
    grads = np.array([[1, 2, 3, 65504], [1, -65505, 2, 3], [1e5, 0, 0, 0]], np.float32)
    with pytest.raises(InvalidInputError, match=r"'user', id -3: a gradient of 65505 does not fit .* float16.*2 such rows.*bfloat16"):
        prepare_push(TABLE, [1, -3, -2], grads, wire_dtype="float16")
    rows = prepare_push(TABLE, [1, 2, 3], grads, wire_dtype="bfloat16")
    np.testing.assert_allclose(to_float32(rows.rows, "bfloat16"), grads, rtol=2.0**-8)
    assert to_float32(prepare_push(TABLE, [1], grads[:1], wire_dtype="float16").rows, "float16").tolist() == [[1, 2, 3, 65504]]


def test_a_sum_beyond_float16_is_refused_though_each_gradient_fits() -> None:
    with pytest.raises(InvalidInputError, match="id 7: a gradient of 80000 does not fit"):
        prepare_push(TABLE, [7, 7], np.full((2, 4), 40000, np.float32), wire_dtype="float16")


def test_a_gradient_beyond_bfloat16_never_becomes_infinity() -> None:
    with pytest.raises(InvalidInputError, match=r"bfloat16, which ends at 3\.3"):
        prepare_push(TABLE, [7], np.full((1, 4), np.finfo(np.float32).max), wire_dtype="bfloat16")


@pytest.mark.parametrize("dtype", HALVES)
def test_the_same_gradients_give_the_same_bytes_and_nan_is_refused(dtype: str) -> None:
    grads = np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32)
    first, again = (prepare_push(TABLE, np.arange(50), grads, wire_dtype=dtype) for _ in range(2))
    assert digest_tables([first]) == digest_tables([again])
    grads[3, 1] = np.nan
    with pytest.raises(InvalidInputError, match="id 3: NaN"):
        prepare_push(TABLE, np.arange(50), grads, wire_dtype=dtype)


def test_an_empty_push_is_fine() -> None:
    assert prepare_push(TABLE, [], [], wire_dtype="float16").rows.shape == (0, 4)
