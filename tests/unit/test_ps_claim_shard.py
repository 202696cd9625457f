"""The owner of a shard: epochs in the data folder and on the nodes, the state that the last owner left, and when a start is refused."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from memory_store import MemoryStore

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.coordination.replicated_values import Change
from kvemb.coordination.shard_notes import ShardNote, note_name
from kvemb.coordination.shard_owners import Owner, newest_owner, owner_name
from kvemb.errors import DeadlineExceededError, FencedError, LostRowError, NodeUnavailableError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.recovery import claim_shard as claims
from paramserver.recovery.claim_shard import EPOCH, Claim, claim_shard, read_epoch, require_owner
from paramserver.recovery.join_cluster import StorageWait, join_cluster, keep_identity
from paramserver.recovery.start_report import StartReport
from paramserver.row_log.state_file import STATE, LoggedTable, RunEntry, SavedState, ShardState, decode_state, encode_state
from paramserver.shard_process.data_dir import DataDir

_NUMBERS = count()
Folder = Callable[[Path, int], DataDir]
TABLE = TableDef("user", 4, kvemb.optim.adam(), kvemb.init.normal())
IDS = np.arange(3, dtype=np.uint64)


def addresses() -> tuple[str, ...]:
    number = next(_NUMBERS)
    return f"claim-{number}-a:1", f"claim-{number}-b:1"


def make_store(nodes: tuple[str, ...]) -> MemoryStore:
    return MemoryStore(StorageConfig("memory", nodes), role="shard:0")


def join(nodes: tuple[str, ...], data: DataDir, shard: int = 0) -> bytes:
    store = make_store(nodes)
    again = StorageWait(Deadline.after(0), lambda pause_s: None, StartReport())
    found = join_cluster(store, data, shard, 1, name="test", timeout_s=5, again=again)
    keep_identity(data, found)
    return found.cluster_id


def opened_store(nodes: tuple[str, ...]) -> MemoryStore:
    store = make_store(nodes)
    store.open(Deadline.after(60))
    return store


def start(nodes: tuple[str, ...], data: DataDir, shard: int = 0) -> ShardState:
    cluster_id = join(nodes, data, shard)
    return claim_shard(opened_store(nodes), data, shard, cluster_id, 5)


def test_a_claim_rises_on_nodes_that_have_lost_the_owner_record(folder: Folder, tmp_path: Path) -> None:
    data, nodes = folder(tmp_path / "ours", 0), addresses()
    epoch = start(addresses(), data).epoch
    join(nodes, folder(tmp_path / "theirs", 0))
    risen: list[int] = []
    Claim(data, opened_store(nodes), 0, epoch, 5).rise_above(7, risen.append)
    assert (risen, read_epoch(data), stored_epoch(nodes)) == ([8], 8, 8)


def test_a_claim_that_was_told_to_some_nodes_only_goes_on_rising_and_is_still_ours(folder: Folder, tmp_path: Path) -> None:
    data, nodes, risen = folder(tmp_path, 0), addresses(), list[int]()
    epoch, store = start(nodes, data).epoch, opened_store(nodes)
    claim, put_meta = Claim(data, store, 0, epoch, 5), store.values.update

    def told_and_no_answer(name: str, change: Change, deadline: Deadline) -> None:
        put_meta(name, change, deadline)
        raise DeadlineExceededError("no complete answer within 2 s from node x")

    store.values.update = told_and_no_answer  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceededError):
        claim.rise_above(7, risen.append)
    store.values.update = put_meta  # type: ignore[method-assign]
    claim.rise_above(7, risen.append)
    assert (risen, claim.epoch, read_epoch(data), stored_epoch(nodes)) == ([8], 8, 8, 8)


def save(data: DataDir, state: ShardState) -> None:
    SavedState(data, state, lambda: require_owner(data, state.epoch)).replace(state)


def left(first: ShardState, k: int = 7, journal: tuple[int, int] = (0, 0)) -> ShardState:
    """What a process leaves at its end."""
    tables = (LoggedTable(TABLE, 2, 3, (RunEntry(1, 99, 5),)),)
    return ShardState(first.cluster_id, 0, 2, first.epoch, k, 0, 4, tables, (("a", 3, 9),), journal=journal)


def stored_epoch(nodes: tuple[str, ...]) -> int:
    owner = newest_owner(make_store(nodes).values.get(owner_name(0), Deadline.after(60)), 0)
    return owner.epoch if owner is not None else 0


def test_every_start_raises_the_epoch_in_the_folder_and_on_the_nodes(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    for epoch in (1, 2, 3):
        assert start(nodes, data).epoch == epoch
        assert (read_epoch(data), stored_epoch(nodes)) == (epoch, epoch)


def test_a_start_that_cannot_reach_the_nodes_leaves_them_behind_the_folder_and_the_next_one_goes_on(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    first, store = start(nodes, data), opened_store(nodes)
    store.values.update = lambda *args: (_ for _ in ()).throw(NodeUnavailableError("node x: refused"))  # type: ignore[method-assign]
    with pytest.raises(NodeUnavailableError):
        claim_shard(store, data, 0, first.cluster_id, 5)
    assert (read_epoch(data), stored_epoch(nodes)) == (2, 1)
    assert start(nodes, data).epoch == 3


def test_a_process_does_not_rise_above_another_one_that_has_claimed_its_number_from_another_folder(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    start(nodes, data)
    old, new = folder(tmp_path / "old", 2), folder(tmp_path / "new", 2)
    claims = []
    for waiting in (old, new):
        store = opened_store(nodes)
        state = claim_shard(store, waiting, 2, join(nodes, waiting, 2), 5)
        claims.append(Claim(waiting, store, 2, state.epoch, 5))
    assert [claim.epoch for claim in claims] == [1, 2]
    with pytest.raises(FencedError):
        claims[0].rise_above(7, lambda epoch: None)
    claims[1].rise_above(7, lambda epoch: None)
    assert claims[1].epoch == 8


def test_a_number_that_has_left_goes_on_in_an_empty_folder_with_the_sessions_that_were_left(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    start(nodes, data)
    store, empty = opened_store(nodes), folder(tmp_path / "new", 2)
    store.values.put(owner_name(2), Owner(4, 3).encode(), Deadline.after(60))
    store.values.put(note_name(2), ShardNote(4, 90).encode(), Deadline.after(60))
    state = claim_shard(store, empty, 2, join(nodes, empty, 2), 5, left=lambda: [("never", 1, 1)])
    assert (state.epoch, state.k, state.sessions) == (5, 90, ())  # this map has no such number: it never had a slot
    assert state.cut == make_version(4, 90)


def test_the_state_of_a_journaled_shard_is_kept(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    first = start(nodes, data)
    assert (first.k, first.tables, first.journal) == (0, (), (0, 0))
    save(data, left(first, journal=(3, 48)))
    for epoch in (2, 3):
        state = start(nodes, data)
        assert (state.epoch, state.k, state.next_incarnation, state.sessions, state.journal) == (epoch, 7, 4, (("a", 3, 9),), (3, 48))
        assert state.tables == left(first).tables


def test_a_process_that_lost_the_shard_cannot_save_over_its_successor(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    old = start(nodes, data)
    require_owner(data, old.epoch)
    new = start(nodes, data)
    save(data, left(new, k=9, journal=(5, 48)))
    for write in (lambda: require_owner(data, old.epoch), lambda: save(data, left(old, journal=(2, 48)))):
        with pytest.raises(FencedError, match=r"epoch 2 has taken the shard over from this one \(epoch 1\)"):
            write()
    assert decode_state(data.read(STATE) or b"", "f").k == 9


def test_a_folder_that_is_gone_is_no_owner_after_this_one(folder: Folder, tmp_path: Path) -> None:
    data = folder(tmp_path, 0)
    epoch = start(addresses(), data).epoch
    data.remove(EPOCH)
    for write in (lambda: require_owner(data, epoch), lambda: save(data, left(ShardState(bytes(16), 0, 1, epoch)))):
        with pytest.raises(FileNotFoundError):
            write()


@pytest.mark.parametrize(("told", "advice"), [(None, False), (ShardNote(1, 7), True), (ShardNote(2, 7), False)])
def test_a_folder_behind_the_nodes_is_told_the_way_back_where_no_later_owner_has_told_of_a_batch(
    told: ShardNote | None, advice: bool, folder: Folder, tmp_path: Path
) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    start(nodes, data)
    store = opened_store(nodes)
    store.values.put(owner_name(0), Owner(2, 1).encode(), Deadline.after(60))
    if told is not None:
        store.values.put(note_name(0), told.encode(), Deadline.after(60))
    with pytest.raises(ParameterServerError) as refused:
        start(nodes, data)
    assert (f"write 2 to {data.path / EPOCH}." in str(refused.value)) == advice
    data.write(EPOCH, [b"2\n"])
    assert start(nodes, data).epoch == 3


def test_a_folder_that_is_behind_the_nodes_is_refused(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    start(nodes, data)
    before = {name: data.read(name) for name in (EPOCH, STATE)}
    start(nodes, data)
    for name, content in before.items():
        data.write(name, [content or b""])
    with pytest.raises(ParameterServerError, match=r"the nodes say that epoch 2 owned the shard last \(this folder: 1\)"):
        start(nodes, data)


def test_a_damaged_epoch_is_named(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    start(nodes, data)
    data.write(EPOCH, [b"x"])
    with pytest.raises(ParameterServerError, match="epoch: expected a number"):
        start(nodes, data)


def test_a_folder_without_a_state_is_refused(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    start(nodes, data)
    data.remove(STATE)
    with pytest.raises(LostRowError, match=r"epoch 1\) ended without saving"):
        start(nodes, data)


def test_a_start_that_was_given_up_can_be_repeated(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    first = start(nodes, data)
    save(data, left(first, journal=(3, 48)))
    for epoch in (2, 3):
        state = claim_shard(opened_store(nodes), data, 0, first.cluster_id, 5)
        assert (state.epoch, state.k) == (epoch, 7)


def test_a_state_that_an_older_process_replaced_in_mid_start_is_the_one_that_counts(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    first = start(nodes, data)
    save(data, left(first, journal=(3, 48)))
    swept = claims.sweep
    monkeypatch.setattr(claims, "sweep", lambda path: (data.write(STATE, [encode_state(left(first, k=9, journal=(5, 48)))]), swept(path)))
    state = start(nodes, data)
    assert (state.epoch, state.k, state.journal) == (2, 9, (5, 48))


def test_a_damaged_state_is_refused_and_kept(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    start(nodes, data)
    data.write(STATE, [b"kvembsst" + bytes(40)])
    with pytest.raises(ParameterServerError):
        start(nodes, data)
    assert data.read(STATE) is not None


def test_a_shard_that_the_map_does_not_have_claims_its_number(folder: Folder, tmp_path: Path) -> None:
    nodes = addresses()
    start(nodes, folder(tmp_path, 0))
    assert start(nodes, folder(tmp_path / "other", 2), 2).epoch == 1


def test_a_process_that_hung_in_the_middle_of_a_file_does_not_touch_its_successors(tmp_path: Path) -> None:
    old = DataDir(tmp_path, 0)
    old.write(EPOCH, [b"1\n"])
    successors: list[DataDir] = []

    def hanging() -> Iterator[bytes]:
        yield b"old " * 5000
        successors.append(new := DataDir(tmp_path, 0, take_over=True))
        new.write(EPOCH, [b"2\n"])
        new.write(STATE, [b"new"])
        yield b"old " * 5000

    with pytest.raises(FencedError):
        old.write(STATE, hanging(), check=lambda: require_owner(old, 1))
    assert successors[0].read(STATE) == b"new"
    assert {path.name for path in old.path.iterdir()} == {"lock", EPOCH, STATE}
    old.close()
    successors[0].close()


def test_a_process_that_hung_right_after_it_was_asked_whether_it_owns_the_shard_replaces_nothing(tmp_path: Path) -> None:
    nodes = addresses()
    old = DataDir(tmp_path, 0)
    cluster_id = join(nodes, old)
    claim_shard(opened_store(nodes), old, 0, cluster_id, 5)
    left = old.read(STATE)
    successors: list[DataDir] = []

    def check() -> None:
        require_owner(old, 1)
        successors.append(new := DataDir(tmp_path, 0, take_over=True))
        claim_shard(opened_store(nodes), new, 0, cluster_id, 5)

    with pytest.raises(FileNotFoundError):
        old.write(STATE, [b"old"], check)
    assert successors[0].read(STATE) == left
    assert not list(old.path.glob("*.tmp"))
    old.close()
    successors[0].close()


def test_a_file_that_could_not_be_written_leaves_nothing_behind(tmp_path: Path, folder: Folder) -> None:
    data = folder(tmp_path, 0)
    data.write(STATE, [b"whole"])

    def full() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        data.write(STATE, full())
    assert data.read(STATE) == b"whole"
    assert {path.name for path in data.path.iterdir()} == {"lock", STATE}


def test_what_a_crash_left_half_written_is_deleted_by_the_next_owner(tmp_path: Path, folder: Folder) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    (data.path / "state.0123.tmp").write_bytes(b"half")
    start(nodes, data)
    assert not list(data.path.glob("*.tmp"))
