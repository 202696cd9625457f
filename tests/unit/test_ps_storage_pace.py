"""A write that storage did not take is tried again: waiting, repairing or mending in between, as the error says."""

from collections.abc import Callable, Iterable

import pytest

from kvemb.errors import (
    ForeignPageError,
    KvembError,
    LostRowError,
    NodeFullError,
    NodeLostError,
    NodeUnavailableError,
    RecordError,
    StorageError,
    UnsafeNodeError,
)
from kvemb.stores.server_errors import server_error
from paramserver.engine.storage_pace import AheadOfIndex, Pause, Tries
from tests.unit.lonely_engine import NoRepair

AWAY, FULL, LOST, ROW = NodeUnavailableError("x: away"), NodeFullError("x: full"), NodeLostError("x: flushed"), LostRowError("row 7")


class Journey(NoRepair):
    """Storage that answers with these errors, one a try, and the reaction to each."""

    def __init__(self, *errors: KvembError, mending: KvembError | None = None, n_repaired: int = 1) -> None:
        self.errors, self.mending, self.n_repaired = list(errors), mending, n_repaired
        self.done: list[object] = []

    def run(self) -> str:
        return stored(self, self.pause)

    def call(self) -> str:
        self.done.append("try")
        if self.errors:
            raise self.errors.pop(0)
        return "stored"

    def pause(self, error: StorageError, pause_s: float) -> None:
        self.done.append(pause_s)

    def mend(self, error: StorageError) -> None:
        self.done.append(f"mend {error}")
        mending, self.mending = self.mending, None
        if mending is not None:
            raise mending

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        self.done.append(["repair", *suspects])
        return self.n_repaired


def stored(it: Journey, pause: Pause) -> str:
    for attempt in Tries(pause, it, it.mend):
        with attempt:
            found = it.call()
    return found


def test_a_node_that_is_away_or_full_is_waited_for_longer_and_longer() -> None:
    it = Journey(AWAY, FULL, AWAY)
    assert (it.run(), it.done) == ("stored", ["try", 0.05, "try", 0.1, "try", 0.2, "try"])


def test_a_node_that_refuses_the_shards_user_is_waited_for() -> None:
    refusals = [server_error("x", line) for line in (b"-WRONGPASS invalid username-password pair", b"-NOPERM no permissions")]
    it = Journey(*refusals)
    assert (it.run(), it.done) == ("stored", ["try", 0.05, "try", 0.1, "try"])


def test_a_node_that_lost_its_rows_is_repaired_and_then_written_to() -> None:
    it = Journey(LOST)
    assert (it.run(), it.done) == ("stored", ["try", ["repair"], "try"])
    it = Journey(LOST, n_repaired=0)  # it was in order by then
    assert (it.run(), it.done) == ("stored", ["try", ["repair"], 0.05, "try"])


def test_a_node_with_another_programs_page_is_compared() -> None:
    it = Journey(ForeignPageError("x:1: a list", address="x:1"))
    assert (it.run(), it.done) == ("stored", ["try", ["repair", "x:1"], "try"])


@pytest.mark.parametrize("error", [ROW, RecordError("row 7")])
def test_rows_in_the_way_are_mended(error: StorageError) -> None:
    it = Journey(error)
    assert (it.run(), it.done) == ("stored", ["try", "mend row 7", "try"])


def test_a_node_that_goes_away_while_rows_are_mended_is_waited_for_too() -> None:
    it = Journey(ROW, mending=AWAY)
    assert (it.run(), it.done) == ("stored", ["try", "mend row 7", 0.05, "mend row 7", "try"])


@pytest.mark.parametrize("mending", [ROW, RecordError("no page")])
def test_rows_that_cannot_be_mended_are_an_error_at_once(mending: StorageError) -> None:
    it = Journey(ROW, mending=mending)
    with pytest.raises(type(mending)):
        it.run()
    assert it.done == ["try", "mend row 7"]


@pytest.mark.parametrize("make", [lambda: ROW, lambda: ForeignPageError("x:1: a list", address="x:1")])
def test_what_is_lost_again_and_again_is_an_error_in_the_end(make: Callable[[], StorageError]) -> None:
    it = Journey(*[make() for _ in range(100)])
    with pytest.raises((LostRowError, ForeignPageError)):
        it.run()
    assert it.done.count("try") == 9


def test_an_error_that_does_not_pass_is_raised_at_once() -> None:
    it = Journey(UnsafeNodeError("x: evicts"))
    with pytest.raises(UnsafeNodeError):
        it.run()
    assert it.done == ["try"]


def test_who_pauses_may_give_up() -> None:
    it = Journey(AWAY)

    def stop(error: StorageError, pause_s: float) -> None:
        raise error

    with pytest.raises(NodeUnavailableError):
        stored(it, stop)
