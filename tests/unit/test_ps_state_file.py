"""A state file is read back whole or not at all."""

import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import kvemb.init
import kvemb.optim
from kvemb.errors import ParameterServerError
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.row_log.state_file import FORMAT_VERSION, HEAD, MAGIC, LoggedTable, RunEntry, ShardState, decode_state, encode_state

USER = TableDef("user", 4, kvemb.optim.adam(), kvemb.init.normal(), dtype="bfloat16")
ITEM = TableDef("item", 2, kvemb.optim.sgd(), kvemb.init.zeros())
TABLES = (LoggedTable(USER, 41, 10**9, (RunEntry(1, 900, 7), RunEntry(4, 2**40, 2**63)), 5), LoggedTable(ITEM))
CUT = make_version(3, 9)
STATE = ShardState(b"c" * 16, 1, 2, 3, 99, 1000, 7, TABLES, (("trainer-ä", 5, 12),), (("a", 1), ("b", 2)), True, (5, 48), CUT)
DATA = encode_state(STATE)


def test_a_state_is_read_back() -> None:
    assert decode_state(DATA, "f") == STATE


@given(st.integers(0, len(DATA) - 1), st.binary(max_size=100))
def test_a_file_cut_off_or_prolonged_is_refused(size: int, more: bytes) -> None:
    for data in (DATA[:size], DATA + more + b"x", more):
        with pytest.raises(ParameterServerError, match=r"the/file.*damaged"):
            decode_state(data, "the/file")


@given(st.integers(0, len(DATA) * 8 - 1))
def test_a_flipped_bit_is_refused(bit: int) -> None:
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ParameterServerError, match="the/file"):
        decode_state(bytes(data), "the/file")


@pytest.mark.parametrize("body", [b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\xc0", b"\x80", b"\x82\xa3cut\xffb"])
def test_a_file_with_a_right_checksum_may_still_be_wrong(body: bytes) -> None:
    data = HEAD.pack(MAGIC, FORMAT_VERSION, len(body)) + body
    with pytest.raises(ParameterServerError, match=r"the/file.*damaged"):
        decode_state(data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data)), "the/file")


def test_a_table_is_found_by_its_key_and_refused_under_another_definition() -> None:
    assert STATE.of(USER) == TABLES[0]
    new = TableDef("new", 2, kvemb.optim.sgd(), kvemb.init.zeros())
    assert STATE.of(new) == LoggedTable(new)
    changed = replace(TABLES[1], n_rows=3)
    assert set(STATE.with_table(changed).tables) == {TABLES[0], changed}
    with pytest.raises(ParameterServerError, match="another cluster's"):
        STATE.of(TableDef("item", 3, kvemb.optim.sgd(), kvemb.init.zeros()))
