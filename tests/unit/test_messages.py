"""Messages: golden bytes of protocol version 1, round trips, and bytes that a reader must not trust.

The goldens in golden/messages_v1.json are the messages of release 0.1 and never change: another protocol version gets a file of its own.
"""

import importlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.alter import alter_messages as alters
from kvemb.arrays.rounding import round_nearest
from kvemb.checkpoint import checkpoint_messages as checkpoints
from kvemb.errors import MessageError
from kvemb.feed import feed_messages as feed
from kvemb.life import eviction_messages as life
from kvemb.operate import inspection_messages as inspection
from kvemb.protocol import messages as m
from kvemb.protocol.message_format import MAGIC, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, ChangedRowsBlock, Message, TableRows, digest_tables
from kvemb.sample import row_sample as samples
from kvemb.scaling import move_messages as moves

F32 = "float32"
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((Path(__file__).parent / "golden" / "messages_v1.json").read_text())


def rows(n: int = 2, dim: int = 3, *, versions: bool = True, hyper: dict[str, float] | None = None, dtype: str = "float32") -> TableRows:
    ids = np.arange(n, dtype=np.uint64) + np.uint64(2**63)
    values = round_nearest(np.arange(n * dim, dtype=np.float32).reshape(n, dim) / 4, dtype)
    return TableRows("user", 0xAB, ids, values, ids[: n if versions else 0], hyper or {}, dtype)


def changed(at: list[int], versions: list[int], data: bytes) -> ChangedRowsBlock:
    return ChangedRowsBlock(np.array(at, np.uint32), np.array(versions, np.uint64), data)


def part(tables: list[TableRows]) -> m.PushPart:
    return m.PushPart("trainer-0", 3, 17, 5, False, tables, 2**64 - 1)


EXAMPLES: dict[str, Message] = {
    "Empty": m.Empty(),
    "HelloRequest": m.HelloRequest("trainer-0", 0, b"0123456789abcdef", 2),
    "HelloReply": m.HelloReply(1, 0, "async"),
    "PushPart": part([rows(hyper={"lr": 0.5}), rows(0)]),
    "PushPart without tables": part([]),
    "PushPart of 16-bit gradients": part([rows(dtype="float16"), rows(dtype="bfloat16")]),
    "PushPart with held rows": replace(part([rows()]), prefetched=[rows(3, 0)]),
    "PushReply": m.PushReply(17, "applied", 9, 0.25, 3),
    "PushReply with fresh rows": m.PushReply(17, "applied", 9, 0.25, 3, {}, 2, [changed([0, 7], [0, 2**63 + 1], b"\x00" * 6)]),
    "PushReply failed": m.PushReply(17, "failed", error={"type": "PushRejectedError", "message": "no"}),
    "Reply": m.Reply({}, b"\x00\xff"),
    "DescribeReply": m.DescribeReply("demo", b"0123456789abcdef", 0, 2, "sync", 4, [{"name": "user", "dim": 3}]),
    "CreateTableRequest": m.CreateTableRequest({"name": "user", "dim": 3, "optimizer": {"kind": "adam"}}, True),
    "TableReply": m.TableReply({"name": "user"}),
    "SetPoliciesRequest": m.SetPoliciesRequest("user", {"admission": {"kind": "after", "n": 3}}, 7),
    "RowsRequest": m.RowsRequest(rows(2, 0, versions=False), 2.5),
    "TableRequest": m.TableRequest("user"),
    "FlushRequest": m.FlushRequest(1.5),
    "FlushReply": m.FlushReply("step 3 of b, which waits for a"),
    "CountReply": m.CountReply(2**40),
    "StepReply": m.StepReply(2**40, 2**41),
    "IdsRequest": m.IdsRequest("user", True, 2**64 - 1, 1000),
    "IdsReply": m.IdsReply(bytes(16)),
    "StatusReply": m.StatusReply(0, 1, 2, 3, 4, 0.5, 6, 7, 8, 9, 5, "", 10, 11, 0.25, "n:1: in repair", "5 of 9 rows", "it joins"),
    "ProgressReply": m.ProgressReply(2, 2**40),
    "CompareRequest": m.CompareRequest("user", b"\x01" + bytes(7), 200),
    "EraseTableRequest": m.EraseTableRequest("user\n2", 28.5),
    "EraseTableReply": m.EraseTableReply(2**19, 7),
    "AlterTableRequest": alters.AlterTableRequest("user", "begin", "user", {"name": "user", "dim": 32}),
    "AlterTableReply": alters.AlterTableReply({"name": "user", "dim": 32, "life": 1}, ["user\n2"]),
    "FollowAlterRequest": alters.FollowAlterRequest("user", "user\n1", True, False, 7, 28.5),
    "FollowAlterReply": alters.FollowAlterReply(2**40, 2**39, 3, 7, True),
    "RepairRequest": m.RepairRequest(["n:1", "n:2"], False, 60.0),
    "RepairReply": m.RepairReply(1, 2**40, 0.5),
    "ByeRequest": m.ByeRequest("trainer-0", 3),
    "SaveRequest": checkpoints.SaveRequest("1" * 32, "s3://bucket/run", 2**63, False, 1.5),
    "SaveStatusRequest": checkpoints.SaveStatusRequest("1" * 32, True),
    "SaveReply": checkpoints.SaveReply("running", "", 3, 2**40, 5),
    "ShowRowRequest": inspection.ShowRowRequest("user", 2**63),
    "ShowRowReply": inspection.ShowRowReply(1 << 48 | 7, b"\x01" * 16, 9, ["anna"]),
    "ExamineReply": inspection.ExamineReply("0.1.0", 1.75e9, ["h:1"], ["n:1", "n:2"], "fsync", 0.002, 2**33, 2**34, 90, 1024, 2**32),
    "SampleIdsRequest": samples.SampleIdsRequest("user", 1000),
    "EvictionsRequest": life.EvictionsRequest(True, 600.0),
    "EvictionsReply": life.EvictionsReply([{"table": "user", "evicted": 2**40, "by_policy": {"keep(10)": 2**40}, "oldest_s": 0.5}]),
    "MoveRequest": moves.MoveRequest(7, bytes(4), ["n:3"], ["n:1"], 2**33, b"", ["s:3"], [0, 2]),
    "ReplaceNodeRequest": moves.ReplaceNodeRequest(7, "n:1", "n:4"),
    "AbortMoveRequest": moves.AbortMoveRequest("too slow"),
    "MoveStatusReply": m.MoveStatusReply(b"map", [b"", b"report"], ["n:1", ""]),
    "SlotSizesReply": moves.SlotSizesReply(bytes(8), bytes(8)),
    "SlotEntriesRequest": moves.SlotEntriesRequest(7, 2, 2**19),
    "SlotEntriesReply": moves.SlotEntriesReply(
        True, 3, [{"definition": {"name": "user"}, "step": 4, "rows": 1}], bytes(8), bytes(8), ["trainer-0"], [3]
    ),
    "WatermarksRequest": moves.WatermarksRequest(7),
    "WatermarksReply": m.WatermarksReply(True, b"\x90"),
    "LeftSessionsRequest": m.LeftSessionsRequest(2),
    "FeedRequest": feed.FeedRequest("position", ["user"], 2, 9, 1, 3, 4096),
    "FeedReply": feed.FeedReply("apply", True, 2, 10, 1, 3, 8192, [rows(2, 0, versions=False)]),
    "FeedReply of a move": feed.FeedReply("moved", True, 2, 10, 2, 3, 8300, [], {"gone": [[1, b"\x07\x00"]], "came": [], "left": False}),
    "LeftSessionRequest": m.LeftSessionRequest(2, "trainer-0", 3),
    "LoadRequest": checkpoints.LoadRequest("2" * 32, "s3://bucket/run", "1" * 32, True),
}


def plain(value: Any) -> Any:
    """A message as comparable values."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, TableRows | ChangedRowsBlock | Message):
        return type(value).__name__, [plain(item) for item in vars(value).values()]
    return [plain(item) for item in value] if isinstance(value, list) else value


def packed(kind: str, *values: Any, magic: Any = MAGIC, version: Any = PROTOCOL_VERSION) -> bytes:
    return msgpack.packb([magic, version, kind, *values])  # type: ignore[no-any-return]


def refused(kind: type[Message], data: bytes) -> None:
    with pytest.raises(MessageError):
        kind.decode(data)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_is_that_of_release_0_1_with_at_most_further_fields_behind(name: str) -> None:
    """Then the two releases understand each other: each leaves the fields unread that it does not know."""
    assert PROTOCOL_VERSION == 1
    golden = bytes.fromhex(GOLDEN[name])
    n_items = len(msgpack.unpackb(golden))
    assert msgpack.packb(msgpack.unpackb(EXAMPLES[name].encode())[:n_items]) == golden
    n_known = n_items - len([MAGIC, "version", "type"])
    assert plain(type(EXAMPLES[name]).decode(golden))[1][:n_known] == plain(EXAMPLES[name])[1][:n_known]


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_of_a_later_release_are_left_unread(name: str) -> None:
    later = msgpack.packb([*msgpack.unpackb(EXAMPLES[name].encode()), "more", [{"yet": b"more"}]])
    assert plain(type(EXAMPLES[name]).decode(later)) == plain(EXAMPLES[name])


def test_fields_that_an_earlier_release_did_not_send_have_their_defaults_and_others_are_missed_by_name() -> None:
    assert plain(m.HelloReply.decode(packed("HelloReply", 1, 7, "sync"))) == plain(m.HelloReply(1, 7, "sync", first_step=0))
    assert m.PushReply.decode(packed("PushReply", 1, "applied")).changed_rows == []
    with pytest.raises(MessageError, match="HelloReply: 2 fields, expected at least 3"):
        m.HelloReply.decode(packed("HelloReply", 1, 7))


def test_every_message_type_has_a_golden() -> None:
    """Of all modules that declare one."""
    for path in sorted((ROOT / "kvemb").rglob("*.py")):
        if "(Message):" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    declared = {kind.__name__ for kind in Message.__subclasses__() if kind.__module__.startswith("kvemb.")}
    assert {type(example).__name__ for example in EXAMPLES.values()} == declared


@pytest.mark.parametrize(("n", "dim"), [(0, 0), (0, 8), (1, 1), (1000, 64)])
def test_rows_of_any_shape_and_dtype_come_back(n: int, dim: int) -> None:
    for versions in (False, True):
        for dtype in ("float32", "float16", "bfloat16"):
            sent = part([rows(n, dim, versions=versions, dtype=dtype)])
            assert plain(m.PushPart.decode(sent.encode())) == plain(sent)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_take_half_the_bytes_on_the_wire(dtype: str) -> None:
    full, half = (len(part([rows(1000, 64, versions=False, dtype=d)]).encode()) for d in ("float32", dtype))
    assert full - half == 1000 * 64 * 2 + len("float32") - len(dtype)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_cut_short_or_with_more_behind_it_is_refused(name: str) -> None:
    data, kind = EXAMPLES[name].encode(), type(EXAMPLES[name])
    for size in range(len(data)):
        refused(kind, data[:size])
    refused(kind, data + b"\x00")


def test_another_protocol_magic_or_type_is_refused_by_name() -> None:
    with pytest.raises(MessageError, match="protocol version 2, expected 1"):
        m.Empty.decode(packed("Empty", version=2))
    with pytest.raises(MessageError, match="type 'Empty', expected ByeRequest"):
        m.ByeRequest.decode(packed("Empty"))
    for data in (packed("Empty", magic="other"), msgpack.packb({}), msgpack.packb([]), msgpack.packb(["kvemb", 1]), b"\xc1", b""):
        refused(m.Empty, data)
    refused(m.Empty, packed("Empty", version=True))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (m.HelloRequest, ["t", "1", b"", 2]),
        (m.HelloRequest, ["t", True, b"", 2]),
        (m.HelloRequest, ["t", 1.0, b"", 2]),
        (m.HelloRequest, [b"t", 1, b"", 2]),
        (m.HelloRequest, ["t", 1, "", 2]),
        (m.HelloRequest, ["t", 1, None, 2]),
        (m.FlushRequest, [1]),
        (m.Reply, [{"type": 1}, b""]),
        (m.PushReply, [1, "applied", 1, -1.0, 0, {}, 0, 0, ["x"], []]),
        (m.PushReply, [1, "applied", 1, -1.0, 0, {}, 0, 0, b"", []]),
        (m.PushReply, [1, "applied", 1, -1.0, 0, {}, 0, 0, [], b""]),
        (m.PushReply, [1, "applied", 1, -1.0, 0, {}, 0, 0, [], [b""]]),
        (m.Reply, [{1: "x"}, b""]),
        (m.Reply, [[], b""]),
        (m.DescribeReply, ["c", b"", 0, 1, "async", 0, [1]]),
        (m.DescribeReply, ["c", b"", 0, 1, "async", 0, {}]),
        (m.TableReply, ["user"]),
        (m.PushPart, ["t", 1, 1, 1, 0, [], 0, False, [], 1]),
        (m.PushPart, ["t", 1, 1, 1, False, {}, 0, False, [], 1]),
        (m.PushPart, ["t", 1, 1, 1, False, [None], 0, False, [], 1]),
        (m.PushPart, ["t", 1, 1, 1, False, [], 0, 1, [], 1]),
        (m.PushPart, ["t", 1, 1, 1, False, [], 0, False, {}, 1]),
        (m.PushPart, ["t", 1, 1, 1, False, [], 0, False, [None], 1]),
    ],
)
def test_a_field_of_another_type_is_refused(kind: type[Message], values: list[Any]) -> None:
    refused(kind, packed(kind.__name__, *values))


@pytest.mark.parametrize(
    "table",
    [
        ["user", 1, bytes(8), 1, F32, bytes(4), b""],
        [1, 1, bytes(8), 1, F32, bytes(4), b"", {}],
        ["user", 256, bytes(8), 1, F32, bytes(4), b"", {}],
        ["user", -1, bytes(8), 1, F32, bytes(4), b"", {}],
        ["user", True, bytes(8), 1, F32, bytes(4), b"", {}],
        ["user", 1, bytes(7), 1, F32, bytes(4), b"", {}],
        ["user", 1, "x" * 8, 1, F32, bytes(4), b"", {}],
        ["user", 1, bytes(8), 2, F32, bytes(4), b"", {}],
        ["user", 1, bytes(8), -1, F32, b"", b"", {}],
        ["user", 1, bytes(8), True, F32, bytes(4), b"", {}],
        ["user", 1, bytes(8), 2**40, F32, bytes(4), b"", {}],
        ["user", 1, b"", 2**62, F32, b"", b"", {}],
        ["user", 1, b"", 2**64 - 1, F32, b"", b"", {}],
        ["user", 1, bytes(8), 1, F32, bytes(4), bytes(16), {}],
        ["user", 1, bytes(8), 1, F32, bytes(4), b"", {"lr": "x"}],
        ["user", 1, bytes(8), 1, F32, bytes(4), b"", {1: 0.5}],
        ["user", 1, bytes(8), 1, F32, bytes(4), b"", []],
        ["user", 1, bytes(8), 1, "float16", bytes(4), b"", {}],
        ["user", 1, bytes(8), 1, "bfloat16", bytes(4), b"", {}],
        ["user", 1, bytes(8), 1, F32, bytes(2), b"", {}],
        ["user", 1, bytes(8), 1, "float64", bytes(8), b"", {}],
        ["user", 1, bytes(8), 1, 4, bytes(4), b"", {}],
        ["user", 1, bytes(8), 1, [], bytes(4), b"", {}],
    ],
)
def test_rows_that_do_not_fit_together_are_refused(table: list[Any]) -> None:
    refused(m.RowsRequest, packed("RowsRequest", table))


@pytest.mark.parametrize(
    "changed",
    [
        [bytes(4), bytes(8)],
        [bytes(3), bytes(8), b""],
        [bytes(4), bytes(7), b""],
        [bytes(4), bytes(16), b""],
        [bytes(8), bytes(16), b""],  # one row twice
        [b"\x01\x00\x00\x00" + bytes(4), bytes(16), b""],  # not ascending
        [bytes(4), bytes(8), "x"],
        ["xxxx", bytes(8), b""],
    ],
)
def test_changed_rows_that_do_not_fit_together_are_refused(changed: list[Any]) -> None:
    refused(m.PushReply, packed("PushReply", 1, "applied", 1, -1.0, 0, {}, 0, 0, [], [changed]))


@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_damaged_bytes_are_refused_with_the_one_error_or_read_as_a_message(name: str, data: st.DataObject) -> None:
    damaged = bytearray(EXAMPLES[name].encode())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    kind = type(EXAMPLES[name])
    try:
        message = kind.decode(bytes(damaged))
    except MessageError:
        return
    assert isinstance(message, kind)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_the_one_error(data: bytes) -> None:
    for kind in (m.Empty, m.PushPart):
        refused(kind, data)


BOMBS = {
    "array of 2**32": b"\xdd\xff\xff\xff\xff",
    "map of 2**32": b"\xdf\xff\xff\xff\xff",
    "bin of 2**32": b"\xc6\xff\xff\xff\xff",
    "text of 2**32": b"\xdb\xff\xff\xff\xff",
    "ext of 2**32": b"\xc9\xff\xff\xff\xff\x01",
    "4 MiB of empty maps": b"\xdd" + (4 << 20).to_bytes(4, "big") + b"\x80" * (4 << 20),
    "empty maps in lists of 4096": b"\xdc\x10\x00" + (b"\xdc\x10\x00" + b"\x80" * 4096) * 1023,
    "deep lists": b"\x91" * 100_000 + b"\x90",
    "deep maps": b"\x81\xa1a" * 100_000 + b"\x80",
    "an extension type": b"\xd4\x05\x00",
    "a timestamp": packed("FlushRequest", msgpack.Timestamp(1)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_bytes_cannot_claim_much_memory(name: str) -> None:
    tracemalloc.start()
    try:
        refused(m.PushPart, BOMBS[name])
        refused(m.Reply, BOMBS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_a_message_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(MessageError, match=f"at most {MAX_MESSAGE_BYTES}"):
        m.Reply.decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_the_digest_tells_other_data() -> None:
    base = digest_tables([rows()])
    changed = rows()
    changed.rows[1, 2] += 1
    others = [rows(3), rows(versions=False), rows(hyper={"lr": 0.5}), rows(hyper={"lr": 0.25}), changed]
    halves = rows(dtype="float16")
    others += [halves, replace(halves, rows=halves.rows.view(np.uint16), dtype="bfloat16")]  # the same bytes under another name
    digests = [digest_tables([other]) for other in others] + [digest_tables([]), digest_tables([rows(), rows()])]
    assert base == digest_tables([rows()])
    assert len({base, *digests}) == len(digests) + 1
    decoded = m.PushPart.decode(part([rows()]).encode())
    assert digest_tables(decoded.tables) == base


def test_the_digest_tells_ids_from_versions() -> None:
    ids = np.array([1, 2], dtype=np.uint64)
    none, nothing = np.empty(0, dtype=np.uint64), np.empty((2, 0), dtype=np.float32)
    first = TableRows("t", 0, ids, nothing, none)
    second = TableRows("t", 0, none, nothing[:0], ids)
    assert digest_tables([first]) != digest_tables([second])


def test_the_digest_tells_prefetched_rows_from_pushed_ones() -> None:
    pushed, prefetched = rows(), rows(2, 0)
    digests = {
        digest_tables([pushed], []),
        digest_tables([pushed], [prefetched]),
        digest_tables([pushed, prefetched]),
        digest_tables([], [prefetched]),
    }
    assert len(digests) == 4


def test_decoded_arrays_are_views_nobody_can_write_through() -> None:
    decoded = m.PushPart.decode(part([rows()]).encode())
    assert not decoded.tables[0].rows.flags.writeable
    assert decoded.tables[0].size_bytes == 2 * 8 + 2 * 3 * 4 + 2 * 8


@pytest.mark.parametrize("n_rows", [-1, 2**63, 2**64 - 1])
def test_a_number_of_rows_that_cannot_be_is_refused(n_rows: int) -> None:
    """len(table) would raise an error that is not ours."""
    packed = msgpack.unpackb(m.CountReply(3).encode())
    with pytest.raises(MessageError, match="n_rows"):
        m.CountReply.decode(msgpack.packb([*packed[:-1], n_rows]))
