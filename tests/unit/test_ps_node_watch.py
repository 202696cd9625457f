"""How often the node watch looks: rarely where looking is dear, soon again where a node did not answer."""

import logging
import threading
import time
from collections.abc import Callable

import pytest

from kvemb.errors import ConfigError, FencedError, NodeUnavailableError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.stores.marked_nodes import LostNode
from kvemb.stores.store_nodes import NodeStats
from paramserver.ingest.ingest_state import Trouble
from paramserver.repair.node_watch import NodeWatch


class SlowStore:
    """A store, its nodes and its repair. Each look at the markers is so many seconds of work; a negative one fails without any."""

    def __init__(self, took_s: list[float]) -> None:
        self.repair = self.nodes = self
        self.now_s, self._took_s = 0.0, iter(took_s)
        self.pauses = Pauses()
        self.n_glances = 0

    addresses, away = ("watch-slow:1",), ()

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        return []

    def open_slots(self, deadline: Deadline) -> list[int]:
        return []

    def looks_lost(self, deadline: Deadline) -> bool:
        self.n_glances += 1
        return self.n_glances == 3

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        took_s = next(self._took_s, None)
        if took_s is None:
            self.pauses.over = True
            return []
        self.pauses.said.append(0.0)
        self.now_s += max(0.0, took_s)
        if took_s < 0:
            raise NodeUnavailableError("node watch-slow:1: connection refused")
        return [LostNode("watch-slow:1", "empty")] if took_s == 0 else []


class Pauses:
    """Stands for the event that stops the watch: writes down how long it is waited for before each look."""

    def __init__(self) -> None:
        self.said = [0.0]
        self.over = False

    def wait(self, pause_s: float) -> bool:
        if not self.over:
            self.said[-1] += pause_s
        return self.over


def watched(store: SlowStore, lost: Callable[[], object] = lambda: None) -> list[float]:
    watch = NodeWatch(store, 1.0, lost=lost, clock=lambda: store.now_s)
    watch.thread = store.pauses  # type: ignore[assignment]
    watch._run()
    return store.pauses.said


def test_the_next_look_comes_no_sooner_than_fifty_times_what_the_last_one_took() -> None:
    store = SlowStore([0.0078125, 0.25, 0.03125])
    store.n_glances = 10  # none of them sees anything
    assert watched(store) == [1.0, 1.0, 12.5, 1.5625]


def test_what_a_glance_sees_is_looked_at_within_a_second() -> None:
    assert watched(SlowStore([0.25, 0.0078125])) == [1.0, 3.0, 1.0]


def test_time_in_which_a_look_waits_for_a_node_is_no_work() -> None:
    store = SlowStore([])
    watch, began_s = NodeWatch(store, 1.0), time.monotonic()
    before_s = watch._clock()
    threading.Event().wait(0.1)
    assert watch._clock() - before_s < (time.monotonic() - began_s) / 2


def test_one_long_look_does_not_put_off_the_next_one_for_minutes() -> None:
    store = SlowStore([3.0, 0.01])
    store.n_glances = 10
    assert watched(store) == [1.0, 20.0, 1.0]


def test_a_look_that_failed_is_soon_made_again() -> None:
    assert watched(SlowStore([-5.0, 0.01])) == [1.0, 1.0, 1.0]


def test_a_node_that_refuses_the_credentials_ends_no_watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = SlowStore([])

    def refuse(deadline: Deadline) -> list[LostNode]:
        store.pauses.said.append(0.0)
        store.pauses.over = len(store.pauses.said) > 3
        raise ConfigError("storage.password_env: node watch-slow:1 refused the credentials")

    monkeypatch.setattr(store, "lost_nodes", refuse)
    assert watched(store)[:3] == [1.0, 1.0, 1.0]
    assert "refused the credentials" in caplog.text


def test_a_look_that_failed_is_trouble_of_the_shard_until_one_succeeds_and_the_log_says_both(caplog: pytest.LogCaptureFixture) -> None:
    store, trouble = SlowStore([-1.0, 0.01]), Trouble()
    watch = NodeWatch(store, 1.0, looking=trouble.looking)
    watch.look_for_lost_nodes()
    assert str(trouble) != ""
    with caplog.at_level(logging.INFO):
        watch.look_for_lost_nodes()
    assert (str(trouble), [record.levelname for record in caplog.records]) == ("", ["WARNING", "INFO"])
    assert "again" in caplog.records[-1].message


def test_a_node_that_gave_no_answer_is_told_of_as_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = SlowStore([0.01, 0.01]), list[str]()
    watch = NodeWatch(store, 1.0, away=lambda: told.append("away"), whole=lambda: told.append("whole"))
    watch.look_for_lost_nodes()
    monkeypatch.setattr(store, "away", ["watch-slow:1"])
    watch.look_for_lost_nodes()
    assert told == ["whole", "away"]


def test_lost_nodes_are_told_of_at_every_look() -> None:
    told: list[int] = []
    watched(SlowStore([0, 0.5, 0]), lambda: told.append(1))
    assert len(told) == 2


def test_a_watch_that_is_fenced_ends() -> None:
    said: list[FencedError] = []

    class Fenced(SlowStore):
        def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
            raise FencedError("shard 0 has epoch 4 now")

    watch = NodeWatch(Fenced([]), 1.0, lost=lambda: None, fenced=said.append)
    watch.thread = Pauses()  # type: ignore[assignment]
    watch._run()
    assert [str(error) for error in said] == ["shard 0 has epoch 4 now"]


def test_a_shard_without_batches_learns_that_another_process_has_taken_it_over(caplog: pytest.LogCaptureFixture) -> None:
    damaged = ParameterServerError("epoch: expected a number")
    answers: list[Exception] = [OSError(5, "Input/output error"), damaged, damaged, FencedError("a process with epoch 4 owns it")]
    said: list[FencedError] = []

    def still_ours() -> None:
        raise answers.pop(0)

    watch = NodeWatch(SlowStore([]), 1.0, still_ours=still_ours, fenced=said.append)
    watch.thread = Pauses()  # type: ignore[assignment]
    watch._run()
    assert (len(said), answers) == (1, [])
    assert len(caplog.records) == 2, "the same trouble is told once"


def test_a_watch_goes_on_although_the_shards_own_folder_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    def copies() -> None:
        raise OSError(5, "Input/output error", "data/tables")

    NodeWatch(SlowStore([]), 1.0, copies=copies).look_at_copies()
    assert "data/tables" in caplog.text


def test_a_node_that_stays_away_is_said_once_until_it_is_back_and_away_again(caplog: pytest.LogCaptureFixture) -> None:
    watched(SlowStore([-0.5, -0.5, -0.5, 0.0078125, -0.5, -0.5]))
    assert [record.getMessage() for record in caplog.records].count("node watch-slow:1: connection refused") == 2


def test_a_look_that_fails_as_nobody_expected_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    store, told = SlowStore([0.0, 0.0]), list[str]()

    def lost() -> None:
        told.append("lost")
        if len(told) == 1:
            raise IndexError("tuple index out of range")

    watched(store, lost)
    assert told == ["lost", "lost"]
    assert "IndexError" in caplog.text
