"""A state file is read back whole or not at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvemb.init
import kvemb.optim
from kvemb.errors import ParameterServerError
from kvemb.schema.table_def import TableDef
from paramserver.recovery.state_file import ShardState, TableImage, decode_state, encode_state


def state() -> ShardState:
    user = TableDef("user", 4, kvemb.optim.adam(), kvemb.init.normal(), dtype="bfloat16")
    item = TableDef("item", 2, kvemb.optim.sgd(), kvemb.init.zeros())
    ids = np.array([1, 2**64 - 1, 7], np.uint64)
    tables = (TableImage(user, 41, ids, ids * np.uint64(3)), TableImage(item, 0, ids[:0], ids[:0]))
    return ShardState(b"c" * 16, 1, 2, 3, 99, 1000, 7, tables, (("trainer-ä", 5, 12),))


DATA = b"".join(bytes(chunk) for chunk in encode_state(state()))


def test_round_trip() -> None:
    got, wanted = decode_state(DATA, "f"), state()
    for name in ("cluster_id", "shard", "n_shards", "epoch", "k", "rows_applied", "next_incarnation", "sessions"):
        assert getattr(got, name) == getattr(wanted, name)
    for mine, theirs in zip(got.tables, wanted.tables, strict=True):
        assert (mine.definition, mine.step) == (theirs.definition, theirs.step)
        assert mine.ids.tolist() == theirs.ids.tolist()
        assert mine.versions.tolist() == theirs.versions.tolist()


@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_file_is_refused(size: int) -> None:
    with pytest.raises(ParameterServerError, match="damaged"):
        decode_state(DATA[:size], "the/file")


@given(st.integers(0, len(DATA) * 8 - 1))
def test_a_flipped_bit_is_refused(bit: int) -> None:
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ParameterServerError, match="the/file"):
        decode_state(bytes(data), "the/file")


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ParameterServerError, match="damaged"):
        decode_state(DATA + b"\0", "f")
