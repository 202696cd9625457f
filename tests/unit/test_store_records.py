"""Small records beside the rows: owners of shards, whole primaries, row keys among others; and links that a doubt outdates."""

import socket
from collections.abc import Iterator
from functools import partial

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.config import StorageConfig, parse
from kvemb.coordination.registry_format import encode_registry, newest_registry
from kvemb.coordination.replicated_values import are_damaged
from kvemb.coordination.shard_owners import Owner, newest_owner, owner_name, require_not_fenced
from kvemb.errors import (
    ConfigError,
    DeadlineExceededError,
    FencedError,
    NodeLostError,
    NodeRefusesError,
    NodeUnavailableError,
    ProtocolError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import SAY_AFTER_S, Absence, Deadline
from kvemb.net.link import Link
from kvemb.net.pool import Doubts, LinkPool
from kvemb.schema.keys import RowKeys
from kvemb.stores import read_retry
from kvemb.stores.read_retry import retry_read
from kvemb.stores.redis_cluster.whole_primaries import decode_members, process_of
from kvemb.stores.redis_server.stored_rows import row_keys_in
from kvemb.wire.replies import FOREIGN

SOON = Deadline.after(3600)


def test_golden_owner_record() -> None:
    assert Owner(3, 2).encode().hex() == "82a565706f636803a86e5f73686172647302"
    assert owner_name(7) == "kvemb:owner:7"


def test_the_highest_epoch_of_all_copies_counts() -> None:
    copies = [None, Owner(2, 4).encode(), Owner(5, 4).encode(), Owner(3, 4).encode()]
    assert newest_owner(copies, 1) == Owner(5, 4)
    assert newest_owner([None], 1) is None
    require_not_fenced(copies, 1, 5)
    require_not_fenced([None], 1, 1)
    with pytest.raises(FencedError, match=r"shard 1.*epoch 5.*epoch 4"):
        require_not_fenced(copies, 1, 4)


@pytest.mark.parametrize(
    "data",
    [b"", b"text", b"\x81\xa1a\x01", msgpack.packb({"epoch": "1", "n_shards": 1}), msgpack.packb([1, 2]), b"\xdf\xff\xff\xff\xff"],
)
def test_what_is_no_record_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="owner record of shard 3"):
        newest_owner([data], 3)
    assert decode_members(data) == frozenset()  # no node is known to be whole: every primary is compared


def test_damaged_copies_are_passed_over_and_named_as_long_as_one_is_good(caplog: pytest.LogCaptureFixture) -> None:
    copies, nodes = [b"junk", Owner(5, 4).encode(), None, FOREIGN], ["node a:1", "node b:1", "node c:1", "node d:1"]
    assert newest_owner(copies, 1, nodes) == Owner(5, 4)
    assert "key kvemb:owner:1" in caplog.text
    assert "node a:1" in caplog.text
    assert "node d:1" in caplog.text
    assert "node b:1" not in caplog.text
    with pytest.raises(ProtocolError, match=r"key kvemb:owner:1 .*node a:1.*node d:1.* No node has a good copy"):
        newest_owner([b"junk", None, None, b"\x82"], 1, nodes)
    assert are_damaged(copies, partial(Owner.decode, where="")) == [True, False, False, True]


def test_a_registry_of_another_release_is_refused_and_not_passed_over() -> None:
    good = encode_registry(3, [])
    assert newest_registry([b"junk", good])[:2] == (3, {})
    with pytest.raises(ProtocolError, match=r"node b:1.*not a table registry of this release"):
        newest_registry([good, msgpack.packb(["kvemb-tables", 2, 9, []])], ["node a:1", "node b:1"])


def test_a_promoted_replica_is_another_process_and_so_is_one_promoted_again() -> None:
    first = {"run_id": "r", "master_replid2": "0" * 40}
    names = [process_of(fields) for fields in (first, {**first, "master_replid2": "a" * 40}, {**first, "master_replid2": "b" * 40})]
    assert len(set(names)) == 3
    assert all(len(name) <= 64 for name in names)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.lists(st.binary(max_size=16), max_size=10))
def test_row_keys_are_found_among_others(ids: list[int], others: list[bytes]) -> None:
    keys = RowKeys(b"tab", np.array(ids, dtype=np.uint64)).encode()
    found = list(row_keys_in([*others, *(bytes(key) for key in keys), b"kvemb:marker:{a}", b"tab\xffAAAAAAAAAA", b"tab_AAAAAAAAAA"]))
    mine = [int(one) for block in found for one in block.ids if block.tag == b"tab"]
    assert set(ids) <= set(mine)
    for block in found:
        assert {bytes(key) for key in block.encode()} <= {*others, *(bytes(key) for key in keys)}


# --- links ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def far_ends() -> Iterator[list[socket.socket]]:
    ends: list[socket.socket] = []
    yield ends
    for end in ends:
        end.close()


def test_a_link_that_was_idle_while_another_was_given_up_is_not_lent_again(far_ends: list[socket.socket]) -> None:
    made: list[Link] = []
    dropped: list[Link] = []

    def connect(address: str, deadline: Deadline) -> Link:
        near, far = socket.socketpair()
        far_ends.append(far)
        made.append(Link(near, address))
        return made[-1]

    doubts = Doubts()
    pool, other = LinkPool(connect, dropped.append, doubts), LinkPool(connect, dropped.append, doubts)

    def fail() -> None:
        with pool.lease(["a:1"], SOON), pool.lease(["a:1"], SOON):
            raise KeyboardInterrupt

    for one in (pool, other):
        with one.lease(["a:1", "b:1"], SOON):
            pass
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {link.address for link in dropped} == {"a:1", "b:1"}
    n_before = len(made)
    with other.lease(["a:1", "b:1"], SOON) as links:
        assert all(link not in made[:n_before] for link in links.values())
    with other.lease(["a:1", "b:1"], SOON):
        assert len(made) == n_before + 2  # and these are kept
    pool.close()
    other.close()


# --- waiting --------------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes in calls of sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []
        monkeypatch.setattr(read_retry.time, "sleep", self.sleep)
        monkeypatch.setattr(read_retry.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(Deadline, "remaining_s", lambda deadline: max(0.0, deadline.at_s - self.now_s))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def test_waiting_ends_with_the_first_success(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    failures: list[Exception] = [
        NodeLostError("node a:1: gone"),
        NodeUnavailableError("node a:1: refused"),
        NodeLostError("node a:1: gone"),
    ]

    def call() -> str:
        if failures:
            raise failures.pop(0)
        return "rows"

    assert retry_read(call, Deadline(clock.now_s + 10, 10), away=Absence()) == "rows"
    assert clock.slept == [0.02, 0.04, 0.08]


def test_waiting_ends_with_the_deadline_and_says_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def call() -> str:
        raise NodeLostError("node a:1: gone.")

    with pytest.raises(NodeLostError, match=r"node a:1: gone\. Waited 10 s"):
        retry_read(call, Deadline(clock.now_s + 10, 10), away=Absence())
    assert 8 < sum(clock.slept) <= 10
    assert max(clock.slept) <= 1


def test_a_node_that_is_silent_is_asked_again_and_the_log_says_once_that_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, n_tries = Clock(monkeypatch), 0

    def call() -> str:
        nonlocal n_tries
        n_tries += 1
        clock.now_s += SAY_AFTER_S
        if n_tries < 4:
            raise DeadlineExceededError("no answer within 5 s from node a:1")
        return "rows"

    away = Absence()
    assert retry_read(call, Deadline(clock.now_s + 600, 600, SAY_AFTER_S), away=away) == "rows"
    waited, back = [record.getMessage() for record in caplog.records]
    assert waited == "storage has been away for 5 s, and is waited for, for 595 s more at most: no answer within 5 s from node a:1"
    assert back == "storage answers again, after 20 s"

    n_tries = -1000
    with pytest.raises(DeadlineExceededError, match=r"node a:1 Waited 12 s for it"):
        retry_read(call, Deadline(clock.now_s + 12, 12, SAY_AFTER_S), away=away)
    assert n_tries == -997


@pytest.mark.parametrize("error", [WrongNodeError("node a:1: another node's marker"), NodeRefusesError("node a:1: another node's marker")])
def test_what_may_never_have_been_right_is_not_waited_for_when_connecting(error: StorageError, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def call() -> str:
        raise error

    with pytest.raises(type(error), match=r"marker$"):
        retry_read(call, Deadline(clock.now_s + 10, 10), away=Absence(), connecting=True)
    assert clock.slept == []


def test_on_lost_node_is_read_from_the_file_and_checked() -> None:
    tree = {"cluster": "c", "storage": {"kind": "redis", "nodes": ["h:1"]}, "parameter_servers": {"shards": ["h:2"]}}
    assert parse(tree, {}).storage == StorageConfig("redis", ("h:1",), on_lost_node="wait")
    tree["storage"]["on_lost_node"] = "fail"  # type: ignore[index]
    assert parse(tree, {}).storage.on_lost_node == "fail"
    tree["storage"]["on_lost_node"] = "ignore"  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"storage\.on_lost_node.*'ignore'.*wait, fail"):
        parse(tree, {})
