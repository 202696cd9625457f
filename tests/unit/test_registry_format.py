"""The registry of tables as read-only clients read it."""

from dataclasses import replace

import msgpack
import pytest

from kvemb import init, optim
from kvemb.coordination.registry_format import REPLACED, STAGED, Dropped, decode_registry, encode_registry, newest_registry
from kvemb.errors import ProtocolError
from kvemb.schema.table_def import TableDef
from paramserver.model import registry_copies

USER = TableDef("user", 4, optim.adam(), init.normal(), seed=9)
ITEM = TableDef("item", 2, optim.chain(optim.clip_by_norm(1.0), optim.sgd(0.5, momentum=0.9)), init.zeros(), dtype="float16")


def test_definitions_survive_the_round_trip() -> None:
    assert decode_registry(encode_registry(7, [USER, ITEM]))[:2] == (7, {"user": USER, "item": ITEM})


def test_tables_that_take_part_in_an_alteration_survive_the_round_trip_and_dropped_ones_keep_their_bytes() -> None:
    dropped = [Dropped(replace(USER, life=1), True), Dropped(replace(USER, life=2), False, STAGED), Dropped(ITEM, True, REPLACED)]
    assert list(decode_registry(encode_registry(7, [USER], dropped)).dropped.values()) == dropped
    assert msgpack.unpackb(encode_registry(7, [], dropped[:1]))[4] == [[dropped[0].definition.to_dict(), True]]
    with pytest.raises(ProtocolError, match="table registry"):
        decode_registry(encode_registry(7, [], [Dropped(USER, True, "melted")]))


def test_what_shard_0_writes_is_what_a_reader_expects() -> None:
    assert registry_copies.META_NAME == "kvemb:tables"
    assert decode_registry(registry_copies.encode_registry(3, [USER]))[:2] == (3, {"user": USER})


def test_the_copy_with_the_highest_serial_counts() -> None:
    copies = [encode_registry(1, []), None, encode_registry(2, [USER])]
    assert newest_registry(copies)[:2] == (2, {"user": USER})
    assert newest_registry([None])[:2] == (0, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb(["other", 1, 0, []]),
        msgpack.packb(["kvemb-tables", 2, 0, []]),
        msgpack.packb(["kvemb-tables", 1, 0, [{"name": "x"}]]),
        msgpack.packb(["kvemb-tables", 1, 0, [7]]),
        encode_registry(1, [USER])[:-3],
        encode_registry(1, [USER]) + b"\x00",
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="table registry"):
        decode_registry(data)
