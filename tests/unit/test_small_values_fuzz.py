"""Small values on nodes, and a shard's own files: any bytes give one typed error or a value, take little memory, and do nothing else."""

import struct
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvemb import optim
from kvemb.checkpoint.load import Decision, Report, newest_decision, newest_report
from kvemb.coordination.registry_format import decode_registry, encode_registry
from kvemb.coordination.shard_owners import Owner, newest_owner
from kvemb.errors import KvembError, ParameterServerError, ProtocolError
from kvemb.init import uniform
from kvemb.schema.table_def import TableDef
from kvemb.stores.redis_cluster.whole_primaries import decode_members, encode_members
from paramserver.row_log import state_file

TABLE = TableDef("user", 4, optim.adam(), uniform())


def refusing(decode: Callable[[bytes], object], nothing: object) -> Callable[[bytes], object]:
    """A value that is passed over when it is damaged, as one that is refused."""

    def decoded(data: bytes) -> object:
        found = decode(data)
        if found == nothing:
            raise ProtocolError("passed over")
        return found

    return decoded


VALUES: dict[str, tuple[Callable[[bytes], object], bytes, type[KvembError]]] = {
    "owner": (lambda data: newest_owner([data], 0), Owner(3, 2).encode(), ProtocolError),
    "primaries": (refusing(decode_members, frozenset()), encode_members({"a" * 40, "b" * 40}), ProtocolError),
    "decision": (lambda data: newest_decision([data]), Decision(1, "1" * 32, "s3://b/a", "2" * 32).encode(), ProtocolError),
    "report": (refusing(lambda data: newest_report([data]), None), Report("1" * 32, "done", "", 3, 3, 9).encode(), ProtocolError),
    "registry": (decode_registry, encode_registry(1, [TABLE]), ProtocolError),
}
FILES: dict[str, Callable[[bytes], object]] = {
    "state": lambda data: state_file.decode_state(data, "state"),
}
MANY = b"\xdd" + struct.pack(">I", 2**32 - 1)
BOMBS = {
    "five bytes that claim 2**32 items": MANY,
    "the same as the second of two items": b"\x92\xa8kvemb-ld" + MANY,
    "a map of 2**32": b"\xdf" + struct.pack(">I", 2**32 - 1),
    "a text of 4 GB": b"\xdb" + struct.pack(">I", 2**32 - 1),
    "4 MiB of empty maps": b"\xdd" + struct.pack(">I", 4 << 20) + b"\x80" * (4 << 20),
    "lists in lists": b"\x91" * 200_000 + b"\xc0",
    "maps in maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "a time": msgpack.packb(msgpack.Timestamp(1, 1)),
    "no text": b"\x91\xa2\xff\xff",
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


def refused_or_read(decode: Callable[[bytes], object], data: bytes, error: type[KvembError]) -> None:
    try:
        decode(data)
    except error:
        return


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_any_bytes_of_a_small_value_are_read_or_refused_with_the_one_error(name: str, data: st.DataObject) -> None:
    decode, whole, error = VALUES[name]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    items = msgpack.unpackb(whole)
    if isinstance(items, list):
        items[data.draw(st.integers(0, len(items) - 1))] = data.draw(ANYTHING)
    else:
        items[data.draw(st.sampled_from(sorted(items)))] = data.draw(ANYTHING)
    other = data.draw(ANYTHING)
    for some in (bytes(damaged), whole[: len(damaged) // 2], data.draw(st.binary(max_size=60)), msgpack.packb(items), msgpack.packb(other)):
        refused_or_read(decode, some, error)


@given(st.dictionaries(st.sampled_from(sorted(TABLE.to_dict())), ANYTHING, max_size=9))
def test_a_registry_of_crooked_tables_is_refused_with_the_one_error(crooked: dict[str, object]) -> None:
    packed = msgpack.unpackb(encode_registry(1, [TABLE]))
    packed[3] = [{**TABLE.to_dict(), **crooked}]
    refused_or_read(decode_registry, msgpack.packb(packed), ProtocolError)


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", VALUES)
def test_a_bomb_under_a_small_values_name_is_refused_and_takes_no_memory(name: str, bomb: str) -> None:
    decode, _, error = VALUES[name]
    tracemalloc.start()
    try:
        with pytest.raises(error):
            decode(BOMBS[bomb])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def with_checksum(kind: str, header: bytes, rest: bytes = b"") -> bytes:
    """A file whose checksum is right, around any header."""
    data = state_file.HEAD.pack(state_file.MAGIC, 3 if kind != "state" else state_file.FORMAT_VERSION, len(header)) + header + rest
    return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


@pytest.mark.parametrize("bomb", [name for name in BOMBS if not name.startswith("4 MiB")])  # a file of ours is not measured by its header
@pytest.mark.parametrize("kind", FILES)
def test_a_bomb_in_a_file_whose_checksum_is_right_is_refused_all_the_same(kind: str, bomb: str) -> None:
    with pytest.raises(ParameterServerError, match="damaged"):
        FILES[kind](with_checksum(kind, BOMBS[bomb]))


@given(ANYTHING, st.binary(max_size=40))
def test_any_header_in_a_file_whose_checksum_is_right_is_read_or_refused(value: object, rest: bytes) -> None:
    for kind, decode in FILES.items():
        refused_or_read(decode, with_checksum(kind, msgpack.packb(value), rest), ParameterServerError)
