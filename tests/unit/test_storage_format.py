"""docs/storage-format.md is enough to write a reader: its recipes, in Python without kvemb, give the vectors of examples/readers."""

import hashlib
import json
import struct
from binascii import crc_hqx
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from examples.readers.make_golden import FILE, text

MASK, ALPHABET = 2**64 - 1, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
TABLES = {name: (msgpack.unpackb(bytes.fromhex(of["definition"])), of) for name, of in GOLDEN["tables"].items()}


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def digest64(*parts: str | bytes | int) -> int:
    state = hashlib.blake2b()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        if isinstance(data, int):
            data = data.to_bytes(data.bit_length() // 8 + 1, "little", signed=True)
        kind = {str: b"s", bytes: b"b", int: b"i"}[type(part)]
        state.update(kind + len(data).to_bytes(8, "little") + data)
    return int.from_bytes(state.digest()[:8], "little")


def digits(number: int, n: int) -> str:
    return "".join(ALPHABET[number >> 6 * (n - 1 - i) & 63] for i in range(n))


def slot_tag(slot: int) -> str:
    """By the standard library's CRC16, which is XMODEM's."""
    return next(tag for tag in (digits(n, 3) for n in range(1 << 18)) if crc_hqx(tag.encode(), 0) % 16384 == slot)


def identity(d: dict[str, Any]) -> bytes:
    given, initializer = d["optimizer"], {**d["initializer"], "algorithm": d.get("init_algorithm", 1)}
    options = {"momentum": given["momentum"] > 0} if "momentum" in given else {}
    options |= {name: given[name] for name in ("nesterov", "amsgrad", "centered", "initial_accumulator_value") if name in given}
    optimizer = {"kind": given["kind"], "options": options, "transforms": [one["kind"] for one in given.get("transforms", [])]}
    made = {**{name: d[name] for name in ("name", "dim", "dtype", "id_dtype")}, "optimizer": optimizer, "initializer": initializer}
    made |= {"seed": d["seed"], "reduce": d["reduce"]}
    if "num_ids" in d:
        made |= {"num_ids": d["num_ids"], "page_layout": 1}
    if d.get("life"):
        made["life"] = d["life"]
    if "num_ids" not in d:
        made["n_buckets"] = d.get("n_buckets", 256)
    packed: bytes = msgpack.packb(made)
    return packed


def record_size(d: dict[str, Any]) -> int:
    optimizer, dim = d["optimizer"], d["dim"]
    state = {"sgd": 0, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2, "ftrl": 2}.get(optimizer["kind"], 0) * dim
    state += 1 if optimizer["kind"] == "rowwise_adagrad" else 0
    state += dim * sum(bool(optimizer.get(name, 0)) for name in ("momentum", "amsgrad", "centered"))
    return int(12 + dim * (4 if d["dtype"] == "float32" else 2) + 4 * state)


def rows_per_page(size: int) -> int:
    best, least = 1, float("inf")
    for c in sorted((4 + quarter) << power for power in range(8, 40) for quarter in range(1, 5)):
        if not max(4096, size) <= c <= max(65536, 4 * size):
            continue
        rows = (c - (6 if c <= 65536 else 10) - 1) // size
        if rows and (c + 64) / (rows * size) < least:
            best, least = rows, (c + 64) / (rows * size)
        if least <= 1.04:
            break
    return best


def placed(d: dict[str, Any], tag: str, id_: int) -> tuple[int, str]:
    """The slot and the key of a row, on servers of Redis's protocol."""
    if "num_ids" in d:
        page = id_ // rows_per_page(record_size(d))
        slot = mix64(page) >> 50
        return slot, f"{tag}{{{slot_tag(slot)}}}{digits(page, 11)}"
    bits = d["n_buckets"].bit_length() - 1
    bucket = mix64(id_) >> 64 - bits
    slot = bucket << 14 - bits if bits <= 14 else bucket >> bits - 14
    return slot, f"{tag}{{{slot_tag(slot)}}}" + (digits(bucket & (1 << bits - 14) - 1, 3) if bits > 14 else "")


def drawn(d: dict[str, Any], id_: int) -> Iterator[float]:
    """The first values of a row of a uniform kind."""
    made, seed, name = d["initializer"], d["seed"], d["name"]
    low, scale = made.get("low", 0.0), made.get("high", 0.0) - made.get("low", 0.0)
    if made["kind"] == "xavier_uniform":
        bound = made["gain"] * (6.0 / (made.get("fan_in", d["dim"]) + made.get("fan_out", d["dim"]))) ** 0.5
        low, scale = -bound, 2.0 * bound
    state = mix64(id_ ^ digest64("kvemb.init", 2, "id", name, seed)) + digest64("kvemb.init", 2, "stream", name, seed)
    for c in range(d["dim"]):
        lane = mix64(state + (c // 4 + 1) * 0x9E3779B97F4A7C15 & MASK) >> 16 * (c % 4) & 65535
        yield made["value"] if made["kind"] == "constant" else (lane + 0.5) * 2.0**-16 * scale + low


def stored(value: float, dtype: str) -> bytes:
    """A weight in the storage dtype: rounded to float32 first."""
    single = struct.pack("<f", value)
    if dtype == "float32":
        return single
    if dtype == "float16":
        return struct.pack("<e", struct.unpack("<f", single)[0])
    word = struct.unpack("<I", single)[0]
    return struct.pack("<H", word + 0x7FFF + (word >> 16 & 1) >> 16)


def test_the_golden_vectors_are_what_the_product_makes() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "a format has changed: readers in other languages will not read it"


def test_mixes_digests_and_slot_tags() -> None:
    assert {word: str(mix64(int(word))) for word in GOLDEN["mix64"]} == GOLDEN["mix64"]
    assert [[parts, str(digest64(*parts))] for parts, _ in GOLDEN["digest64"]] == GOLDEN["digest64"]
    assert {slot: slot_tag(int(slot)) for slot in GOLDEN["slot_tags"]} == GOLDEN["slot_tags"]


@pytest.mark.parametrize("name", TABLES)
def test_a_tables_keys_and_records(name: str) -> None:
    d, golden = TABLES[name]
    tag, schema = digits(digest64("table tag", name, d["tag_attempt"]) >> 46, 3), digest64("schema", identity(d)) & 255
    assert (tag, schema, record_size(d)) == (golden["tag"], golden["schema"], golden["record_bytes"])
    for row in golden["rows"]:
        id_ = int(row["id"]) & MASK
        check = mix64(id_ ^ digest64("id check", name)) >> 40
        record = bytes.fromhex(row["record"])
        assert record[:12] == bytes([schema]) + check.to_bytes(3, "little") + (2).to_bytes(6, "little") + (1).to_bytes(2, "little")
        assert len(record) == record_size(d)
        assert placed(d, tag, id_) == (row["slot"], row["key"])
        assert row["memcached_key"] == tag + digits(id_, 11)
        assert row.get("field") in (None, id_.to_bytes(8, "little").hex())
        if d["initializer"]["kind"] in ("uniform", "xavier_uniform", "constant") and d.get("init_algorithm") == 2:
            weights = b"".join(stored(value, d["dtype"]) for value in drawn(d, id_))
            assert record[12 : 12 + len(weights)] == weights


def test_maps_and_markers() -> None:
    for golden in GOLDEN["maps"]:
        fields = msgpack.unpackb(bytes.fromhex(golden["bytes"]))
        _, _, version, serial, _, nodes, _, shards, _, _, plan, _ = fields
        assert (version, serial) == (golden["version"], golden["serial"])
        assert str(digest64("cluster map", msgpack.packb([serial, nodes, shards]))) == golden["digest"]
        former = None if plan is None else [serial - 1, str(digest64("cluster map", msgpack.packb([serial - 1, plan[2], shards])))]
        assert former == golden["former_serial_and_digest"]
        runs = list(struct.iter_unpack("<HH", nodes))
        owners = [max(run for run in runs if run[0] <= slot)[1] for slot in (0, 8191, 8192, 16383)]
        assert owners == golden["nodes_of_slots_0_8191_8192_16383"]
    first = GOLDEN["maps"][0]
    whole = ["kvemb-marker", 5, bytes(range(16)), 1, bytes(8), int(first["digest"]), first["serial"], "a" * 40]
    assert GOLDEN["marker"]["whole"] == msgpack.packb(whole).hex()
    assert GOLDEN["marker"]["repaired"] == msgpack.packb(["kvemb-marker", 6, *whole[2:], "0" * 16, False]).hex()


def test_the_registry() -> None:
    magic, form, serial, definitions, dropped = msgpack.unpackb(bytes.fromhex(GOLDEN["registry"]))
    assert (magic, form, serial) == ("kvemb-tables", 2, 3)
    assert definitions == [TABLES["user"][0]]
    assert [[one["name"], gone] for one, gone in dropped] == [["one bucket", True]]
