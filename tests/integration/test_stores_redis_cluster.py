"""Redis Cluster while its slots move: right rows in the ASK phase, in the MOVED phase, through a reshard; markers of single slots."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb.coordination.markers import Identity, Marker
from kvemb.errors import DeadlineExceededError, NodeLostError, NodeUnavailableError, NotProvisionedError, WrongNodeError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.schema.pages import page_layout, paged_keys
from kvemb.schema.slots import N_SLOTS, slot_tags, text_slot
from kvemb.stores.redis_cluster.redis_cluster_store import RedisClusterStore
from kvemb.stores.redis_cluster.slot_map import SlotMap, fetch_slot_map, marker_keys
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.row_io import WritePart
from kvemb.stores.store import Store
from kvemb.testing.repair_contract import LOST, begun, eventually_reads, lost, repair, rows_of, write_back
from kvemb.testing.store_contract import (
    CLUSTER,
    GENERATION,
    SIZE,
    TAG,
    bucket_keys,
    read,
    records_of,
    require_rows,
    row_keys,
    within,
    write,
)
from tests.integration.moving_slots import (
    PAGES,
    SLOT,
    Mover,
    encoded,
    keys_of,
    mixed,
    mixed_paged,
    paged_rows_in,
    rows_in,
)
from tests.real_servers import ServerNodes

pytestmark = pytest.mark.full  # Redis Cluster beyond its contract


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]) -> Iterator[ServerNodes]:
    require_server("redis-server")
    nodes = ServerNodes("redis-cluster", 3, tmp_path_factory.mktemp("moving"))
    yield nodes
    nodes.close()


@pytest.fixture
def mover(running: ServerNodes) -> Iterator[Mover]:
    running.reset()
    with ExitStack() as stack:
        mover = Mover(running, stack)
        yield mover
        for slot in mover.begun:
            for client in mover.clients:
                client.execute_command("CLUSTER SETSLOT", slot, "STABLE")


@pytest.fixture
def store(running: ServerNodes, mover: Mover) -> Iterator[Store]:
    with running.store() as store:
        store.provision(CLUSTER, GENERATION, within())
        store.open(within())
        yield store


@pytest.mark.parametrize("layout", ["buckets", "paged"])
@pytest.mark.parametrize("moved", ["no row", "half of the rows", "every row", "rows and marker"])
def test_rows_are_right_while_their_slot_is_on_its_way(store: Store, mover: Mover, moved: str, layout: str) -> None:
    keys, inside = (mixed(SLOT), rows_in(SLOT)) if layout == "buckets" else (mixed_paged(SLOT), paged_rows_in(SLOT))
    write(store, keys, records_of(keys))
    to = (mover.owner(SLOT) + 1) % 3
    source = mover.begin(SLOT, to)
    n_keys = len(encoded(inside))
    share = {"no row": 0, "half of the rows": n_keys // 2}.get(moved, n_keys)
    mover.migrate(source, to, encoded(inside)[:share] + ([marker_keys()[SLOT]] if moved == "rows and marker" else []))
    require_rows(store, keys, records_of(keys))
    require_rows(store, inside, records_of(inside))
    write(store, keys, records_of(keys, salt=1))
    require_rows(store, keys, records_of(keys, salt=1))
    gone = inside[np.arange(0, len(inside), 3)]
    store.rows.erase([WritePart(gone, np.empty((len(gone), 0), np.uint8))], within())
    left = ~np.isin(keys.ids, gone.ids)
    np.testing.assert_array_equal(read(store, keys).found, left)
    new = gone if layout == "buckets" else paged_keys(TAG, gone.ids, page_layout(SIZE), np.ones(len(gone), dtype=bool))
    assert store.rows.write([WritePart(new, records_of(gone, salt=2))], within())[0].stored.all()
    require_rows(store, gone, records_of(gone, salt=2))
    store.rows.erase([WritePart(gone, np.empty((len(gone), 0), np.uint8))], within())
    mover.finish(SLOT, source, to)
    result = read(store, keys)
    np.testing.assert_array_equal(result.found, left)
    np.testing.assert_array_equal(result.records[left], records_of(keys, salt=1)[left])


def test_a_store_can_be_opened_while_slots_are_on_their_way(store: Store, running: ServerNodes, mover: Mover) -> None:
    keys = mixed(SLOT)
    write(store, keys, records_of(keys))
    to = (mover.owner(SLOT) + 1) % 3
    source = mover.begin(SLOT, to)
    mover.migrate(source, to, [*encoded(rows_in(SLOT))[::2], marker_keys()[SLOT]])
    with running.store() as late:
        late.open(within())
        for _ in range(2):
            require_rows(late, keys, records_of(keys))
        write(late, keys, records_of(keys, salt=1))
        mover.finish(SLOT, source, to)
        require_rows(late, keys, records_of(keys, salt=1))
        mover.clients[to].delete(marker_keys()[SLOT])
        with pytest.raises(NodeLostError, match=f"slot {SLOT}"):
            read(late, rows_in(SLOT), deadline=within(1))
    mover.move(SLOT, source)  # other tests rely on its node


@pytest.mark.parametrize("layout", ["buckets", "paged"])
def test_after_a_move_reads_writes_erases_and_meta_follow(store: Store, running: ServerNodes, mover: Mover, layout: str) -> None:
    name = f"kvemb:test:{{{slot_tags()[SLOT].decode()}}}"
    assert text_slot(name.encode()) == SLOT
    keys = mixed(SLOT) if layout == "buckets" else mixed_paged(SLOT)
    with running.store() as writer, running.store() as eraser, running.store() as asker:
        for other in (writer, eraser, asker):
            other.open(within())
        write(store, keys, records_of(keys))
        asker.values.put(name, b"before", within())
        mover.move(SLOT, (mover.owner(SLOT) + 1) % 3)
        require_rows(store, keys, records_of(keys))
        writer.rows.write([WritePart(keys, records_of(keys, salt=1))], within())
        require_rows(store, keys, records_of(keys, salt=1))
        assert asker.values.get(name, within()) == [b"before"]
        mover.move(SLOT, (mover.owner(SLOT) + 1) % 3)
        asker.values.put(name, b"after", within())
        assert store.values.get(name, within()) == [b"after"]
        eraser.rows.erase([WritePart(keys, np.empty((len(keys), 0), np.uint8))], within())
        assert not read(store, keys).found.any()
    with running.store() as late:
        assert len(late.open(within())) == N_SLOTS


def test_a_batch_follows_slots_that_have_moved_without_asking_for_the_whole_map(
    store: Store, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = SLOT + 9
    keys, name, source = rows_in(slot), marker_keys()[slot].decode(), mover.owner(slot)
    write(store, keys, records_of(keys))
    asked: list[object] = []

    def fetch(candidates: Iterable[str], access: RedisAccess, deadline: Deadline) -> SlotMap:
        asked.append(candidates)
        return fetch_slot_map(candidates, access, deadline)

    monkeypatch.setattr("kvemb.stores.redis_cluster.slot_map.fetch_slot_map", fetch)
    for to in ((source + 1) % 3, source):
        mover.move(slot, to)
        require_rows(store, keys, records_of(keys))
        assert store.values.get(name, within()) != [None]
        assert store.rows.node_of(keys) == f"127.0.0.1:{mover.ports[to]}"
    assert not asked


def test_a_node_that_has_not_heard_of_a_move_sends_nobody_in_circles(store: Store, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = SLOT + 7  # other tests begin with that one and its neighbour on the same node
    keys, name = rows_in(slot), marker_keys()[slot].decode()
    write(store, keys, records_of(keys))
    assert isinstance(store, RedisClusterStore)
    before, source = store._topology.slot_map(within()), mover.owner(slot)
    to, third = (source + 1) % 3, f"127.0.0.1:{mover.ports[(source + 2) % 3]}"

    def fetch(asked: Iterable[str], access: RedisAccess, deadline: Deadline) -> SlotMap:
        return replace(before, source=third) if next(iter(asked)) == third else fetch_slot_map(asked, access, deadline)

    monkeypatch.setattr("kvemb.stores.redis_cluster.slot_map.fetch_slot_map", fetch)
    store._topology._answered = (third,)
    mover.move(slot, to)
    assert store.values.get(name, within()) != [None]
    store._topology.known, store._topology._answered = before, (third,)
    require_rows(store, keys, records_of(keys))


def test_a_small_value_that_is_redirected_until_the_deadline_is_late_which_passes_by_itself(store: Store) -> None:
    """A shard that starts waits for what passes, and ends at anything else."""
    assert isinstance(store, RedisClusterStore)
    with pytest.raises(DeadlineExceededError, match="redirected"):
        store.values._try_again(b"kvemb:x", b"-MOVED 1 127.0.0.1:1", "127.0.0.1:2", within(0))


def test_meta_is_right_while_its_slot_is_on_its_way(store: Store, mover: Mover) -> None:
    name = f"kvemb:test:{{{slot_tags()[SLOT].decode()}}}"
    store.values.put(name, b"before", within())
    to = (mover.owner(SLOT) + 1) % 3
    source = mover.begin(SLOT, to)
    assert store.values.get(name, within()) == [b"before"]
    mover.migrate(source, to, [name.encode()])
    try:
        assert store.values.get(name, within()) == [b"before"]
        store.values.put(name, b"after", within())
        assert store.values.get(name, within()) == [b"after"]
    finally:
        mover.finish(SLOT, source, to)


@pytest.mark.parametrize("layout", ["buckets", "paged"])
def test_a_move_under_full_use_loses_and_mixes_nothing(store: Store, mover: Mover, layout: str) -> None:
    slots = [100 + 500 * index for index in range(12)]
    rows = rows_in if layout == "buckets" else paged_rows_in
    keys = keys_of(np.unique(np.concatenate([rows(slot).ids for slot in slots] + [row_keys(500).ids * (layout == "buckets")])))
    keys = keys if layout == "buckets" else PAGES[keys.ids.astype(np.intp)]
    write(store, keys, records_of(keys))
    done = threading.Event()
    failures: list[BaseException] = []

    def reshard() -> None:
        try:
            for slot in slots:
                to = (mover.owner(slot) + 1) % 3
                source = mover.begin(slot, to)
                inside = encoded(rows(slot))
                mover.migrate(source, to, inside[: len(inside) // 2])
                mover.finish(slot, source, to)
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=reshard, name="reshard")
    thread.start()
    salt = 0
    while not done.is_set():
        salt += 1
        write(store, keys, records_of(keys, salt=salt))
        require_rows(store, keys, records_of(keys, salt=salt))
    thread.join()
    assert failures == []
    require_rows(store, keys, records_of(keys, salt=salt))


def test_slots_that_move_while_trainers_push_lose_no_push_and_apply_none_twice(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    ids = np.arange(60_000)
    counts, numbers = np.zeros(len(ids)), np.random.default_rng(1)
    with ExitStack() as stack:
        local = stack.enter_context(LocalCluster("redis-cluster", 3, shards=2, durability="os"))
        cluster = stack.enter_context(kvemb.connect(local.url))
        table = cluster.create_table("user", dim=16, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        slots = np.unique(table.definition.keys(ids.astype(np.uint64), pages=True).slots())[::8].tolist()
        mover = Mover(local, stack)
        stop = threading.Event()

        def reshard() -> None:
            while counts.max() < 2 and not stop.is_set():  # pushes may be slow beside the moves
                for slot in slots:
                    if not stop.is_set():
                        mover.move(slot, (mover.owner(slot) + 1) % 3)

        with ThreadPoolExecutor(1) as threads:
            moves = threads.submit(reshard)
            try:
                while not moves.done():
                    some = np.unique(numbers.integers(0, len(ids), 20_000))
                    table.push(some, np.full((len(some), 16), -1, np.float32), timeout_s=60)
                    counts[some] += 1
                    cluster.flush()
            finally:
                stop.set()
            moves.result()
        assert {mover.owner(slot) for slot in slots} == {0, 1, 2}
        np.testing.assert_array_equal(table.pull(ids, timeout_s=60), np.repeat(counts[:, None], 16, axis=1))
        assert len(slots) >= 32


def test_the_marker_of_a_batchs_slot_is_checked_for_each_slot(store: Store, running: ServerNodes, mover: Mover) -> None:
    for slot in (0, SLOT, N_SLOTS - 1):
        inside, client = rows_in(slot), mover.clients[mover.owner(slot)]
        write(store, inside, records_of(inside))
        good = client.get(marker_keys()[slot])
        client.delete(marker_keys()[slot])
        with pytest.raises(NodeLostError, match=rf"slot {slot}\b"):
            read(store, inside)
        with running.store() as another, pytest.raises(NodeLostError, match=rf"slot {slot}\b"):
            another.open(within())
        client.set(marker_keys()[slot], replace(Marker.decode(good, "here"), node=slot ^ 1).encode())
        with pytest.raises(WrongNodeError, match=rf"slot {slot}\b"):
            read(store, inside)
        client.set(marker_keys()[slot], good)
        require_rows(store, inside, records_of(inside))


def test_a_broken_off_provisioning_is_completed_and_a_foreign_key_refused(running: ServerNodes, mover: Mover) -> None:
    with running.store() as store:
        store.provision(CLUSTER, GENERATION, within())
        mover.clients[mover.owner(SLOT)].delete(marker_keys()[SLOT])
        with pytest.raises(NodeLostError):
            store.open(within())
        store.provision(CLUSTER, GENERATION, within())
        assert len(store.open(within())) == N_SLOTS
    running.reset()
    running.put_foreign(b"foreign", b"x")
    with running.store() as store:
        with pytest.raises(WrongNodeError, match="holds 1 key,"):
            store.provision(CLUSTER, GENERATION, within())
        with pytest.raises(NotProvisionedError):
            store.open(within())


def move_without_keys(mover: Mover, slot: int, to: int) -> None:
    """What another primary holds of a dead one's slots, after `redis-cli --cluster fix`: nothing."""
    client = mover.clients[mover.owner(slot)]
    client.delete(*client.execute_command("CLUSTER GETKEYSINSLOT", slot, 10_000))
    mover.move(slot, to)


def test_rows_of_slots_that_came_without_their_keys_are_never_new(store: Store, mover: Mover) -> None:
    keys = keys_of(np.concatenate([rows_in(SLOT).ids, rows_in(SLOT + 1).ids, row_keys(1500).ids]))
    keys = keys[np.unique(keys.ids, return_index=True)[1]]
    write(store, keys, records_of(keys))
    source = mover.owner(SLOT)
    to = (source + 1) % 3
    other = rows_in(N_SLOTS * to // 3 + 700)
    assert mover.owner(N_SLOTS * to // 3 + 700) == to
    mover.move(SLOT + 1, to)
    require_rows(store, keys, records_of(keys))  # a slot that came with its keys is as good as before
    move_without_keys(mover, SLOT, to)
    for _ in range(3):
        with pytest.raises(NodeLostError, match=rf"slot {SLOT}\b"):
            read(store, keys)
    with pytest.raises(NodeLostError, match=rf"slot {SLOT}\b"):
        read(store, keys_of(np.concatenate([rows_in(SLOT).ids, other.ids])))  # whose last slot is another one
    (lost,) = store.repair.lost_nodes(within())
    assert (lost.address, lost.why) == (f"127.0.0.1:{mover.ports[to]}", "empty")


def test_an_importing_node_that_was_emptied_says_nothing_about_rows(store: Store, mover: Mover) -> None:
    inside = rows_in(SLOT)
    write(store, inside, records_of(inside))
    to = (mover.owner(SLOT) + 1) % 3
    mover.migrate(mover.begin(SLOT, to), to, encoded(inside))
    require_rows(store, inside, records_of(inside))
    mover.clients[to].flushall()
    with pytest.raises(NodeLostError, match=f"127.0.0.1:{mover.ports[to]}"):
        read(store, inside)


@pytest.fixture
def standing_open(store: Store, mover: Mover) -> Iterator[tuple[int, int]]:
    """The node that gives a slot and the one that takes it, after a change was broken off: its marker and a half of its keys have moved."""
    inside = rows_in(SLOT)
    write(store, inside, records_of(inside))
    to = (mover.owner(SLOT) + 1) % 3
    source = mover.begin(SLOT, to)
    mover.migrate(source, to, [marker_keys()[SLOT], *encoded(inside)[::2]])
    yield source, to
    mover.finish(SLOT, source, to)
    mover.move(SLOT, source)  # other tests rely on its node


@pytest.mark.parametrize("how", ["started again empty", "flushed", "sent back to an old snapshot"])
@pytest.mark.parametrize("which", ["gives", "takes"])
def test_rows_of_a_slot_that_stands_open_come_back_when_a_node_of_it_has_lost_them(
    store: Store, running: ServerNodes, standing_open: tuple[int, int], which: str, how: str
) -> None:
    node, inside = standing_open[which == "takes"], rows_in(SLOT)
    running.save(node)
    write(store, inside, records_of(inside, salt=1))
    if how == "flushed":
        running.flush(node)
    else:
        running.restart(node, saved=how.endswith("snapshot"))
    found, deadline = lost(store), within(20)
    while found:
        with pytest.raises((*LOST, DeadlineExceededError, NodeUnavailableError)):  # never an old row, nor one that is missing
            read(store, inside, deadline=within(1))
        assert not deadline.expired
        address = found[0].address
        nonce = begun(store, address)
        write_back(store, address, nonce, rows_of(store, address, inside), salt=1)
        store.repair.report(address, nonce, 0, within())
        assert store.repair.finish(address, nonce, range(1), within())
        found = store.repair.lost_nodes(within())
    eventually_reads(store, 1, inside)
    with running.store() as late:
        late.open(within())
        require_rows(late, inside, records_of(inside, salt=1))


def test_an_importing_node_without_slots_vouches_by_the_marker_of_the_slot(running: ServerNodes, mover: Mover) -> None:
    inside = rows_in(SLOT)
    written = inside[np.arange(1, len(inside))]
    source = mover.owner(SLOT)
    to = (source + 1) % 3
    with running.store() as store:
        store.provision(CLUSTER, GENERATION, within())
        store.open(within())
        write(store, written, records_of(written))
        assert isinstance(store, RedisClusterStore)
        markers, settled = store._markers, store._markers.any_settled_slot
        here = f"127.0.0.1:{mover.ports[to]}"
        markers.any_settled_slot = lambda address, *more: None if address == here else settled(address, *more)  # type: ignore[method-assign]
        mover.begin(SLOT, to)
        mover.migrate(source, to, encoded(written))
        require_rows(store, written, records_of(written))  # a row that is found is a row
        # Which of them is told depends on where the time runs out; none of them is an answer.
        with pytest.raises(DeadlineExceededError, match=r"marker of a slot has not moved|redirected rows|no complete answer"):
            read(store, inside, deadline=within(0.5))
        mover.migrate(source, to, [marker_keys()[SLOT]])
        np.testing.assert_array_equal(read(store, inside).found, np.arange(len(inside)) > 0)


def test_a_node_that_hangs_lets_the_next_batch_ask_for_the_map(store: Store, running: ServerNodes, mover: Mover) -> None:
    keys = bucket_keys(100)
    write(store, keys, records_of(keys))
    assert isinstance(store, RedisClusterStore)
    before = store._topology.known
    running.pause(2)
    try:
        with pytest.raises(DeadlineExceededError):
            read(store, keys, deadline=within(0.3))
    finally:
        running.resume(2)
    require_rows(store, keys, records_of(keys))
    assert store._topology.known is not before


def test_a_small_value_is_sought_at_the_nodes_that_are_known_once_its_own_has_gone(store: Store) -> None:
    assert isinstance(store, RedisClusterStore)
    store.values.put("kvemb:test", b"value", within())
    known = store._topology.known
    assert known is not None
    store._topology.known = replace(known, addresses=tuple("127.0.0.1:1" for _ in known.addresses))
    with pytest.raises(NodeUnavailableError, match=r"127\.0\.0\.1:1"):
        store.values.get("kvemb:test", within())
    assert store.values.get("kvemb:test", within()) == [b"value"]


def test_two_threads_may_take_the_same_renewed_primary(store: Store) -> None:
    class Taken(set[str]):
        """As another thread leaves it that was faster."""

        def __bool__(self) -> bool:
            return True

    assert isinstance(store, RedisClusterStore)
    store._markers.changed = Taken()
    assert not read(store, bucket_keys(10)).found.any()


@pytest.mark.parametrize("seen", ["its markers when they are renewed", "the list of whole primaries before they are"])
def test_a_shard_that_looks_while_another_finishes_a_repair_does_not_begin_it_again(
    store: Store, running: ServerNodes, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    assert isinstance(store, RedisClusterStore)
    running.restart(0)
    address = lost(store)[0].address
    with running.store() as other:
        other.open(within(), Identity(CLUSTER, GENERATION, store.nodes.cluster_map))
        for number, one in enumerate((store, other)):
            nonce = begun(one, address)
            one.repair.report(address, nonce, number, within())

        def looks() -> None:
            assert [node for node in other.repair.lost_nodes(within()) if node.why != "repairing"] == []
            assert other.repair.begin(address, within()) in (None, nonce)

        if seen.startswith("its"):
            swap = store.repair._nodes.swap

            def swapped(*args: Any) -> bool:
                done = swap(*args)
                looks()
                return done

            monkeypatch.setattr(store.repair._nodes, "swap", swapped)
            assert store.repair.finish(address, nonce, range(2), within())
        else:
            state = other.repair._nodes.state

            def late(*args: Any) -> Any:
                monkeypatch.setattr(other.repair._nodes, "state", state)
                assert store.repair.finish(address, nonce, range(2), within())
                return state(*args)

            monkeypatch.setattr(other.repair._nodes, "state", late)
        looks()


@pytest.mark.parametrize("how", ["started again empty", "flushed"])
def test_a_glance_at_the_primaries_tells_of_one_that_lost_its_rows(store: Store, running: ServerNodes, how: str) -> None:
    assert not store.repair.looks_lost(within())
    running.flush(1) if how == "flushed" else running.restart(1)
    deadline = within()
    while not store.repair.looks_lost(within()):
        assert not deadline.expired
    address = lost(store)[0].address
    repair(store, address)
    assert not store.repair.looks_lost(within())


def test_a_repair_of_a_node_that_another_has_replaced_meanwhile_ends_by_name(store: Store, running: ServerNodes, mover: Mover) -> None:
    """A shard that met anything but an error of storage there would stop for good."""
    running.restart(0)
    address = lost(store)[0].address
    nonce = begun(store, address)
    store.repair.report(address, nonce, 0, within())
    source = mover.ports.index(int(address.rpartition(":")[2]))
    other = (source + 1) % 3
    its = [line[:2] for line in mover.clients[source].execute_command("CLUSTER SLOTS") if line[2][1] == mover.ports[source]]
    give(mover, other, its)
    try:
        deadline = within()
        while address in {node.address for node in store.repair.lost_nodes(within())}:
            assert not deadline.expired
        with pytest.raises(NodeUnavailableError, match="holds no slot"):
            store.repair.finish(address, nonce, range(1), within())
    finally:
        give(mover, source, its)


def test_a_slot_that_was_on_its_way_when_the_repair_of_its_node_ended_is_repaired_behind_it(
    store: Store, running: ServerNodes, mover: Mover
) -> None:
    running.restart(mover.owner(SLOT))
    address, client, key = lost(store)[0].address, mover.clients[mover.owner(SLOT)], marker_keys()[SLOT]
    nonce = begun(store, address)
    in_repair = client.get(key)
    store.repair.report(address, nonce, 0, within())
    assert store.repair.finish(address, nonce, range(1), within())
    client.set(key, in_repair)  # as it comes back: another shard had taken it into the repair, and it was left out at the end
    with running.store() as other:
        other.open(within(), Identity(CLUSTER, GENERATION, store.nodes.cluster_map))
        (found,) = lost(other)
        assert (found.address, found.why) == (address, "repairing")
        assert begun(other, address) == nonce
        other.repair.report(address, nonce, 0, within())
        assert other.repair.finish(address, nonce, range(1), within())
        assert not other.repair.lost_nodes(within())


def test_slots_that_keep_coming_to_a_node_in_repair_do_not_keep_that_from_its_end(store: Store, running: ServerNodes, mover: Mover) -> None:
    to = mover.owner(SLOT)
    source, coming = (to + 1) % 3, iter(range(N_SLOTS * ((to + 1) % 3) // 3 + 800, N_SLOTS))
    running.restart(to)
    address, moved = lost(store)[0].address, list[int]()
    with running.store() as other:
        other.open(within(), Identity(CLUSTER, GENERATION, store.nodes.cluster_map))
        for shard in (0, 1) * 3:  # each begins behind a slot that the other has not reported
            one = (store, other)[shard]
            if (nonce := one.repair.begin(address, within())) is not None:
                one.repair.report(address, nonce, shard, within())
                one.repair.finish(address, nonce, range(2), within())
            moved.append(next(coming))
            assert mover.owner(moved[-1]) == source
            mover.move(moved[-1], to)
        assert not store.repair.lost_nodes(within())
        assert not other.repair.lost_nodes(within())
    for slot in moved:  # other tests rely on their node
        mover.move(slot, source)


def test_a_repair_begins_and_ends_while_slots_leave_its_node(
    store: Store, running: ServerNodes, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = mover.owner(SLOT)
    first, to, left = N_SLOTS * at // 3 + 2, (at + 1) % 3, list[int]()
    running.restart(at)
    address, nodes = lost(store)[0].address, store.repair._nodes
    state = nodes.state

    def then_one_leaves(*args: Any) -> Any:
        found = state(*args)
        if args[0] == address and len(left) < 5:
            left.append(first + len(left))
            mover.move(left[-1], to)
        return found

    monkeypatch.setattr(nodes, "state", then_one_leaves)
    nonce = begun(store, address)
    store.repair.report(address, nonce, 0, within())
    assert store.repair.finish(address, nonce, range(1), within())
    monkeypatch.setattr(nodes, "state", state)
    (found,) = store.repair.lost_nodes(within())
    assert found.address == f"127.0.0.1:{mover.ports[to]}"  # they took their state with them
    repair(store, found.address)
    assert not store.repair.lost_nodes(within())
    for slot in left:  # other tests rely on their node
        mover.move(slot, at)


def test_a_slot_that_came_to_a_node_after_its_loss_does_not_vouch_for_what_that_has_lost(
    store: Store, running: ServerNodes, mover: Mover
) -> None:
    to = mover.owner(SLOT)
    source, came = (to + 1) % 3, N_SLOTS * ((to + 1) % 3) // 3 + 800
    inside, new = rows_in(SLOT), rows_in(came)
    assert mover.owner(came) == source
    keys = keys_of(np.concatenate([inside.ids, new.ids]))
    write(store, keys, records_of(keys))
    running.flush(to)
    mover.move(came, to)
    try:
        for both in (new, keys, keys_of(keys.ids[::-1])):
            with pytest.raises(NodeLostError):
                read(store, both)
    finally:
        mover.move(came, source)


def give(mover: Mover, to: int, ranges: list[list[int]]) -> None:
    """Let a node have slots without what is stored in them, and wait until every node has heard of it."""
    words = [slot for ends in ranges for slot in ends]
    for client in mover.clients:
        client.execute_command("CLUSTER DELSLOTSRANGE", *words)
    mover.clients[to].execute_command("CLUSTER ADDSLOTSRANGE", *words)
    firsts, deadline = {first for first, _ in ranges}, within()
    while not all(firsts <= held_by(client, mover.ports[to]) for client in mover.clients):
        assert not deadline.expired


def held_by(client: Any, port: int) -> set[int]:
    lines = client.execute_command("CLUSTER SLOTS")
    return {slot for first, last, primary, *_ in lines if primary[1] == port for slot in range(first, last + 1)}
