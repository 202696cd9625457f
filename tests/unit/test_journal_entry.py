"""An entry of the journal is read back whole or not at all."""

import json
import struct
import tracemalloc
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvemb.init
import kvemb.optim
from kvemb.errors import JournalDamagedError, UnknownTableError
from kvemb.optim import FROZEN
from kvemb.schema.table_def import TableDef
from paramserver.journal import BatchEntry, Entry, EventEntry, SessionEntry, Watermark, decode_entry, encode_entry
from paramserver.journal.entry import batch_head
from paramserver.journal.segment import SegmentHeader, frame
from paramserver.model.batch import APPLY, ASSIGN, DROPPED, ERASE, EVICTED, Batch, CheckedRows

GOLDEN = json.loads((Path(__file__).parent / "golden" / "journal_v1.json").read_text())
USER = TableDef("user", 3, kvemb.optim.adam(lr=0.1), kvemb.init.zeros(), dtype="float16")
ITEM = TableDef("item", 1, kvemb.optim.chain(kvemb.optim.clip_by_norm(1.0), kvemb.optim.sgd(0.5, momentum=0.9)), kvemb.init.zeros())
TABLES = {"user": USER, "item": ITEM}


def find(name: str, schema: int) -> TableDef:
    if name not in TABLES:
        raise UnknownTableError(f"no table {name!r}")
    return TABLES[name]


def rows(definition: TableDef, ids: list[int], values: object = 0.5, dim: int | None = None, **hyper: float) -> CheckedRows:
    dim = definition.dim if dim is None else dim
    array = np.broadcast_to(np.float32(values), (len(ids), dim)).copy()
    return CheckedRows(definition, np.array(ids, np.uint64), array, np.empty(0, np.uint64), definition.optimizer.check_hyper(hyper))


BATCH = BatchEntry(
    (3 << 48) + 7,
    Batch(APPLY, (rows(ITEM, [5, 2**64 - 1], [[1.5], [-0.0]], momentum=0.1 + 0.2), rows(USER, [9], lr=1e-300))),
    (11, 2**40),
    (Watermark("trainer-ä", 4, 2**50), Watermark("t2", 1, 1)),
)
SESSION = SessionEntry("trainer-ä", 9)
EVENT = EventEntry("moved", "", 3, ((1, (7, 16383)),), ((0, (2,)), (2, (5,))), left=True)


def packed(entry: Entry) -> bytes:
    return b"".join(bytes(piece) for piece in encode_entry(entry))


def same(mine: BatchEntry, theirs: BatchEntry) -> bool:
    heads = [(e.version, e.batch.kind, e.batch.reason, e.steps, e.watermarks) for e in (mine, theirs)]
    tables = [
        [(t.definition, t.ids.tobytes(), t.rows.shape, t.rows.tobytes(), len(t.versions), dict(t.hyper)) for t in e.batch.tables]
        for e in (mine, theirs)
    ]
    return heads[0] == heads[1] and tables[0] == tables[1]


def decode_batch(data: bytes) -> BatchEntry:
    entry = decode_entry(data, find)
    assert isinstance(entry, BatchEntry)
    return entry


def test_an_assign_may_have_state_behind_its_weights_and_an_apply_may_not() -> None:
    wide = rows(USER, [9, 4], 0.25, dim=9)
    entry = BatchEntry(7, Batch(ASSIGN, (wide,)), (1,), ())
    assert same(entry, decode_batch(packed(entry)))
    with pytest.raises(JournalDamagedError, match="dim 9, expected one of"):
        decode_batch(packed(BatchEntry(7, Batch(APPLY, (wide,)), (1,), ())))


@pytest.mark.parametrize("reason", [EVICTED, DROPPED])
def test_an_erase_may_have_a_reason_and_nothing_else_may(reason: str) -> None:
    entry = BatchEntry(7, Batch(ERASE, (rows(USER, [9, 4], dim=0),), reason), (1,), ())
    assert same(entry, decode_batch(packed(entry)))
    assert batch_head(packed(entry)) == (7, [])
    for kind, why, dim in ((APPLY, reason, 3), (ERASE, "by chance", 0)):
        with pytest.raises(JournalDamagedError, match="reason"):
            decode_batch(packed(BatchEntry(7, Batch(kind, (rows(USER, [4, 9], dim=dim),), why), (1,), ())))


def test_rows_of_bytes_take_one_byte_a_value_and_come_back() -> None:
    width = 13  # no multiple of what arrays are aligned to
    memory = TableDef("memory", width, FROZEN, kvemb.init.zeros(), f"bytes:{width}")
    values = np.random.default_rng(0).integers(0, 256, (5, width), dtype=np.uint8)
    several = tuple(
        CheckedRows(table, np.arange(5, dtype=np.uint64), some, np.empty(0, np.uint64), table.optimizer.defaults())
        for table, some in ((memory, values), (USER, rows(USER, list(range(5)), 0.5).rows))
    )
    entry = BatchEntry(7, Batch(ASSIGN, several), (0, 0), ())
    tables = {memory.key: memory, USER.key: USER}
    back = decode_entry(packed(entry), lambda key, schema: tables[key])
    assert isinstance(back, BatchEntry)
    assert [one.rows.dtype for one in back.batch.tables] == [np.uint8, np.float32]
    np.testing.assert_array_equal(back.batch.tables[0].rows, values)
    np.testing.assert_array_equal(back.batch.tables[1].rows, several[1].rows)
    assert len(packed(entry)) < len(packed(BatchEntry(7, Batch(ASSIGN, several[1:]), (0,), ()))) + 5 * (8 + width) + 64


ID_LISTS = st.lists(st.integers(0, 2**64 - 1), max_size=20, unique=True)


@given(
    st.sampled_from([APPLY, ASSIGN, ERASE]),
    st.dictionaries(st.sampled_from(["user", "item"]), ID_LISTS),
    st.integers(1, 2**64 - 2),
    st.lists(st.tuples(st.text(max_size=20), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), max_size=4),
    st.integers(0, 2**63 - 1),
    st.randoms(use_true_random=False),
)
def test_everything_comes_back(kind: str, ids: dict, version: int, marks: list, step: int, random: object) -> None:
    tables = []
    for name, wanted in ids.items():
        definition = TABLES[name]
        one = rows(definition, sorted(wanted) if kind == APPLY else wanted, 0.0, 0 if kind == ERASE else None)
        one.rows[...] = np.random.default_rng(random.getrandbits(32)).normal(size=one.rows.shape)  # type: ignore[attr-defined]
        tables.append(one)
    entry = BatchEntry(version, Batch(kind, tuple(tables)), (step,) * len(tables), tuple(Watermark(*mark) for mark in marks))
    data = packed(entry)
    assert same(decode_batch(data), entry)
    assert packed(decode_entry(memoryview(data), find)) == data


def test_sessions_and_events_come_back() -> None:
    for entry in (SESSION, EVENT, EventEntry("drop", "user\n2"), EventEntry("load"), EventEntry("alter", "user\n1")):
        assert decode_entry(packed(entry), find) == entry


@pytest.mark.parametrize("change", [{2: "gone"}, {4: -1}, {5: [[1, 7]]}, {6: [[1, [-7]]]}, {7: 1}])
def test_an_event_with_a_wrong_field_is_refused(change: dict[int, object]) -> None:
    fields = [1, "event", "moved", "", 3, [], [], False]
    for at, value in change.items():
        fields[at] = value
    header = msgpack.packb(fields)
    with pytest.raises(JournalDamagedError):
        decode_entry(struct.pack("<I", len(header)) + header, find)


def test_arrays_are_views_of_the_payload_and_lie_at_multiples_of_their_size() -> None:
    data = packed(BATCH)
    for table in decode_batch(data).batch.tables:
        for array in (table.ids, table.rows):
            assert not array.flags.owndata
            assert not array.flags.writeable
            assert array.flags.aligned


def test_encoding_copies_no_rows() -> None:
    entry = BatchEntry(1, Batch(APPLY, (rows(USER, list(range(1000))),)), (0,), ())
    table = entry.batch.tables[0]
    held = [np.frombuffer(piece, np.uint8) for piece in encode_entry(entry)]
    assert any(np.shares_memory(piece, table.rows) for piece in held)
    assert any(np.shares_memory(piece, table.ids) for piece in held)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("batch entry", packed(BATCH)),
        ("session entry", packed(SESSION)),
        ("event entry", packed(EVENT)),
        ("segment header", SegmentHeader(3, 0x0123456789ABCDEF, 4096).pack()),
        ("entry header", frame(SegmentHeader(3, 0x0123456789ABCDEF, 4096), 48, 48, [b"payl", b"oad"])),
    ],
)
def test_golden_bytes(name: str, data: bytes) -> None:
    assert data.hex() == GOLDEN[name]


@given(st.integers(0, len(packed(BATCH)) - 1))
def test_a_truncated_entry_is_refused(size: int) -> None:
    with pytest.raises(JournalDamagedError):
        decode_entry(packed(BATCH)[:size], find)


def test_trailing_bytes_are_refused() -> None:
    for entry in (BATCH, SESSION, EVENT):
        with pytest.raises(JournalDamagedError):
            decode_entry(packed(entry) + bytes(8), find)


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    for framed in (data, struct.pack("<I", len(data)) + data):
        with pytest.raises(JournalDamagedError):
            decode_entry(framed, find)


@given(st.integers(0, 8 * len(packed(BATCH)) - 1))
def test_a_flipped_bit_is_refused_or_reads_as_a_valid_entry(bit: int) -> None:
    """Checksums are the frame's; here no bytes may cause another error than the one, or an entry that cannot be written again."""
    data = bytearray(packed(BATCH))
    data[bit // 8] ^= 1 << bit % 8
    try:
        entry = decode_entry(bytes(data), find)
    except JournalDamagedError:
        return
    assert isinstance(decode_entry(packed(entry), find), BatchEntry)


def batch_header(**change: object) -> bytes:
    fields = {
        "format": 1,
        "type": "batch",
        "version": 1,
        "kind": APPLY,
        "steps": [1],
        "marks": [["t", 1, 1]],
        "tables": [["item", ITEM.schema, 0, 1, {}]],
    }
    header: bytes = msgpack.packb(list((fields | change).values()))
    return struct.pack("<I", len(header)) + header + bytes(-(4 + len(header)) % 8)


def test_the_header_that_the_next_test_spoils_is_good() -> None:
    assert decode_batch(batch_header()).batch.tables[0].definition is ITEM


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": True},
        {"type": "bitch"},
        {"version": 0},
        {"version": 2**64 - 1},
        {"version": "1"},
        {"version": True},
        {"kind": "delete"},
        {"kind": ["apply"]},
        {"steps": []},
        {"steps": [-1]},
        {"steps": [1.0]},
        {"steps": {}},
        {"marks": [["t", 1]]},
        {"marks": [[b"t", 1, 1]]},
        {"marks": [["t", 1, -1]]},
        {"marks": {"t": 1}},
        {"tables": [["user", 0, 0, 3, {}], ["item", 0, 0, 1, {}]]},
        {"tables": [["nobody", ITEM.schema, 0, 1, {}]]},
        {"tables": [["item", ITEM.schema ^ 1, 0, 1, {}]]},
        {"tables": [["item", 256, 0, 1, {}]]},
        {"tables": [["item", ITEM.schema, 0, 2, {}]]},
        {"tables": [["item", ITEM.schema, 2**62, 1, {}]]},
        {"tables": [["item", ITEM.schema, 0, 2**62, {}]]},
        {"tables": [["item", ITEM.schema, -1, 1, {}]]},
        {"tables": [["item", ITEM.schema, 0, 1, {"speed": 1.0}]]},
        {"tables": [["item", ITEM.schema, 0, 1, {"lr": "1"}]]},
        {"tables": [["item", ITEM.schema, 0, 1, []]]},
        {"tables": [["item", ITEM.schema, 0, 1]]},
        {"tables": [[["item"], ITEM.schema, 0, 1, {}]]},
        {"tables": [["item", ITEM.schema, 0, 1, {}]] * 2, "steps": [1, 1]},
        {"kind": ERASE},
    ],
)
def test_a_wrong_field_is_refused(change: dict) -> None:
    with pytest.raises(JournalDamagedError):
        decode_entry(batch_header(**change), find)


@pytest.mark.parametrize(("kind", "ids"), [(APPLY, [2, 1]), (APPLY, [1, 1]), (ASSIGN, [1, 2, 1]), (ERASE, [3, 3])])
def test_ids_that_are_not_distinct_or_out_of_order_are_refused(kind: str, ids: list[int]) -> None:
    entry = BatchEntry(1, Batch(kind, (rows(ITEM, ids, dim=0 if kind == ERASE else 1),)), (0,), ())
    with pytest.raises(JournalDamagedError, match="'item'"):
        decode_entry(packed(entry), find)


BOMBS = {
    "2**32 elements": b"\xdd\xff\xff\xff\xff",
    "2**32 pairs": b"\xdf\xff\xff\xff\xff",
    "4 GiB of bytes": b"\xc6\xff\xff\xff\xff",
    "4 MiB of empty maps": b"\xdd\x00\x00\xff\xff" + (b"\xdd\x00\x00\xff\xff" + b"\x80" * 65535) * 64,
    "deep": b"\x91" * 100_000,
    "extension": b"\xc7\x08\x01" + bytes(8),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_in_bounded_memory(bomb: bytes) -> None:
    data = struct.pack("<I", len(bomb)) + bomb
    tracemalloc.start()
    try:
        with pytest.raises(JournalDamagedError):
            decode_entry(data, find)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_a_header_that_claims_more_than_there_is_is_refused() -> None:
    for size in (2**32 - 1, len(batch_header())):
        with pytest.raises(JournalDamagedError):
            decode_entry(struct.pack("<I", size) + batch_header()[4:], find)
