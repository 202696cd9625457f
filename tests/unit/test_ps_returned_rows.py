"""What comes back with the ack of a part: its own rows as they were written, and how often others were at work."""

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES
from kvemb.protocol.messages import MAX_PART_BYTES, PushReply
from kvemb.schema.table_def import TableDef
from paramserver.apply.returned_rows import OthersCount, returned_rows
from paramserver.model.batch import APPLY, Batch, CheckedRows, PartTicket, Push, ReceivedPart
from paramserver.rpc import answer_queue

USER = TableDef("user", 3, optim.adam(), init.zeros())
ITEM = TableDef("item", 2, optim.sgd(), init.zeros(), dtype="bfloat16")


def checked(table: TableDef, ids: list[int]) -> CheckedRows:
    return CheckedRows(table, np.array(ids, np.uint64), np.zeros((len(ids), table.dim), np.float32), np.empty(0, np.uint64), {})


def part(*tables: CheckedRows) -> ReceivedPart:
    return ReceivedPart(tables, PartTicket(1, 0, 0))


def written(table: TableDef, ids: list[int]) -> np.ndarray:
    """Rows that are their ids."""
    return round_nearest(np.repeat(np.array(ids, np.float32)[:, None], table.dim, axis=1), table.dtype).view(np.uint8)


def values(table: TableDef, data: bytes) -> list[float]:
    stored = np.frombuffer(data, "<u2" if table.dtype == "bfloat16" else "<f4").reshape(-1, table.dim)
    rows = to_float32(stored, table.dtype)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


@pytest.mark.parametrize("ids", [[2, 4, 6, 8], [4, 8], [8, 2, 6], [6]])
def test_a_part_gets_its_rows_in_its_order(ids: list[int]) -> None:
    batch = Batch(APPLY, (checked(ITEM, [1, 3]), checked(USER, [2, 4, 6, 8])))
    weights = {"user": written(USER, [2, 4, 6, 8]), "item": written(ITEM, [1, 3])}
    user, nothing, item = returned_rows(part(checked(USER, ids), checked(ITEM, []), checked(ITEM, [3])), batch, weights)
    assert values(USER, user) == ids
    assert nothing == b""
    assert values(ITEM, item) == [3]


def test_a_part_gets_nothing_when_a_table_is_not_at_hand() -> None:
    batch = Batch(APPLY, (checked(ITEM, [1]), checked(USER, [2])))
    assert returned_rows(part(checked(USER, [2]), checked(ITEM, [1])), batch, {"user": written(USER, [2])}) == []
    assert returned_rows(part(checked(USER, [2]), checked(ITEM, [])), batch, {"user": written(USER, [2])}) != []


def push(trainer: str, incarnation: int = 1) -> Push:
    return Push(trainer, incarnation, 1, ())


def test_batches_of_one_trainer_alone_count_for_all_others() -> None:
    count = OthersCount()
    for pushes in ([push("a")], [push("a"), push("a")], [push("b")], [push("a"), push("b")], []):
        count.add(pushes)
    assert [count.of(push(name)) for name in "abc"] == [3, 4, 5]


def test_another_incarnation_is_somebody_else() -> None:
    count = OthersCount()
    count.add([push("a", 1)])
    assert [count.of(push("a", incarnation)) for incarnation in (1, 2)] == [0, 1]


def test_a_trainer_that_is_forgotten_counts_as_if_others_had_been_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.apply.returned_rows.MAX_TRAINERS", 2)
    count = OthersCount()
    for name in ("a", "b", "a", "c"):
        count.add([push(name)])
    assert [count.of(push(name)) for name in "abc"] == [2, 4, 3]


def test_a_part_that_is_asked_about_again_comes_back_without_rows() -> None:
    ticket, heard = PartTicket(1, 0, 0, return_rows=True), []
    ticket.answer(heard.append)
    ticket.finish(PushReply(1, "applied", 5, rows=[b"abcd"]))
    ticket.answer(heard.append)
    assert [(reply.k, reply.rows) for reply in heard] == [(5, [b"abcd"]), (5, [])]


def test_rows_that_a_trainer_does_not_take_are_left_out_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_queue, "_MAX_ROW_BYTES", 10)
    outbox = answer_queue.AnswerQueue()
    outbox.end_input()
    for sequence in (1, 2, 3):
        outbox.expect()
        outbox.put(PushReply(sequence, "applied", rows=[b"1234", b"5"]))
    replies = iter(outbox)
    assert [next(replies).rows, next(replies).rows] == [[b"1234", b"5"]] * 2
    outbox.expect()
    outbox.put(PushReply(4, "applied", rows=[b"1234"]))
    assert [reply.rows for reply in replies] == [[], [b"1234"]]


def test_the_rows_of_the_largest_part_fit_a_message() -> None:
    widest = 4 / 2  # float32 rows of gradients in 16 bits
    assert MAX_PART_BYTES * widest + (1 << 20) < MAX_MESSAGE_BYTES
