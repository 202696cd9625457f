"""Redis Cluster while its slots move: right rows in the ASK phase, in the MOVED phase, through a reshard; markers of single slots."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from kvemb.errors import NodeLostError, NotProvisionedError, WrongNodeError
from kvemb.hashing import mix64
from kvemb.keys import N_SLOTS, RowKeys, slot_tags, text_slot
from kvemb.stores.base import Store, WritePart
from kvemb.stores.cluster_map import marker_keys
from kvemb.stores.markers import Marker
from kvemb.testing.servers import ServerNodes, redis_client
from kvemb.testing.store_contract import CLUSTER, GENERATION, TAG, read, records_of, require_rows, row_keys, within, write

ALL = RowKeys(TAG, mix64(np.arange(1, 1_000_000, dtype=np.uint64)))
SLOTS = ALL.slots()
SLOT = 1234


def rows_in(slot: int) -> RowKeys:
    """About sixty rows of one slot."""
    return ALL.take(np.flatnonzero(slot == SLOTS))


def mixed(slot: int) -> RowKeys:
    """Rows of one slot between rows of all others."""
    keys = RowKeys(TAG, np.concatenate([rows_in(slot).ids, row_keys(1500).ids]))
    order = np.unique(keys.ids, return_index=True)[1]
    return keys.take(order)


class Mover:
    """Moves single slots from one node to another, a phase at a time."""

    def __init__(self, nodes: ServerNodes, stack: ExitStack) -> None:
        self.clients = [stack.enter_context(redis_client(server)) for server in nodes.servers]
        self.ports = [server.port for server in nodes.servers]
        self.begun: set[int] = set()
        self.names = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]

    def owner(self, slot: int) -> int:
        for first, last, primary, *_ in self.clients[0].execute_command("CLUSTER SLOTS"):
            if first <= slot <= last:
                return self.ports.index(int(primary[1]))
        raise AssertionError(f"slot {slot} has no owner")

    def begin(self, slot: int, to: int) -> int:
        """From now on the owner answers ASK for keys of the slot that it does not hold; return the owner."""
        source = self.owner(slot)
        self.begun.add(slot)
        self.clients[to].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.names[source])
        self.clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.names[to])
        return source

    def migrate(self, source: int, to: int, keys: list[bytes]) -> None:
        if keys:
            self.clients[source].execute_command("MIGRATE", "127.0.0.1", self.ports[to], "", 0, 5000, "KEYS", *keys)

    def finish(self, slot: int, source: int, to: int) -> None:
        """Move what is left, then tell everybody: from now on the old owner answers MOVED."""
        while keys := self.clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 1000):
            self.migrate(source, to, keys)
        for index in (to, source, *range(len(self.clients))):
            self.clients[index].execute_command("CLUSTER SETSLOT", slot, "NODE", self.names[to])

    def move(self, slot: int, to: int) -> None:
        source = self.begin(slot, to)
        self.finish(slot, source, to)


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


def encoded(keys: RowKeys) -> list[bytes]:
    return [bytes(key) for key in keys.encode()]


@pytest.mark.parametrize("moved", ["no row", "half of the rows", "every row", "rows and marker"])
def test_rows_are_right_while_their_slot_is_on_its_way(store: Store, mover: Mover, moved: str) -> None:
    keys, inside = mixed(SLOT), rows_in(SLOT)
    write(store, keys, records_of(keys))
    to = (mover.owner(SLOT) + 1) % 3
    source = mover.begin(SLOT, to)
    share = {"no row": 0, "half of the rows": len(inside) // 2}.get(moved, len(inside))
    mover.migrate(source, to, encoded(inside)[:share] + ([marker_keys()[SLOT]] if moved == "rows and marker" else []))
    require_rows(store, keys, records_of(keys))
    require_rows(store, inside, records_of(inside))
    write(store, keys, records_of(keys, salt=1))
    require_rows(store, keys, records_of(keys, salt=1))
    gone = inside.take(np.arange(0, len(inside), 3))
    store.erase([WritePart(gone, np.empty((len(gone), 0), np.uint8))], within())
    left = ~np.isin(keys.ids, gone.ids)
    np.testing.assert_array_equal(read(store, keys).found, left)
    mover.finish(SLOT, source, to)
    result = read(store, keys)
    np.testing.assert_array_equal(result.found, left)
    np.testing.assert_array_equal(result.records[left], records_of(keys, salt=1)[left])


def test_after_a_move_reads_writes_erases_and_meta_follow(store: Store, running: ServerNodes, mover: Mover) -> None:
    name = f"kvemb:test:{{{slot_tags()[SLOT].decode()}}}"
    assert text_slot(name.encode()) == SLOT
    keys = mixed(SLOT)
    with running.store() as writer, running.store() as eraser, running.store() as asker:
        for other in (writer, eraser, asker):
            other.open(within())
        write(store, keys, records_of(keys))
        asker.put_meta(name, b"before", within())
        mover.move(SLOT, (mover.owner(SLOT) + 1) % 3)
        require_rows(store, keys, records_of(keys))
        writer.write([WritePart(keys, records_of(keys, salt=1))], within())
        require_rows(store, keys, records_of(keys, salt=1))
        assert asker.get_meta(name, within()) == [b"before"]
        mover.move(SLOT, (mover.owner(SLOT) + 1) % 3)
        asker.put_meta(name, b"after", within())
        assert store.get_meta(name, within()) == [b"after"]
        eraser.erase([WritePart(keys, np.empty((len(keys), 0), np.uint8))], within())
        assert not read(store, keys).found.any()
    with running.store() as late:
        assert len(late.open(within())) == N_SLOTS


def test_meta_is_right_while_its_slot_is_on_its_way(store: Store, mover: Mover) -> None:
    name = f"kvemb:test:{{{slot_tags()[SLOT].decode()}}}"
    store.put_meta(name, b"before", within())
    to = (mover.owner(SLOT) + 1) % 3
    source = mover.begin(SLOT, to)
    assert store.get_meta(name, within()) == [b"before"]
    mover.migrate(source, to, [name.encode()])
    try:
        assert store.get_meta(name, within(5)) == [b"before"]
        store.put_meta(name, b"after", within(5))
        assert store.get_meta(name, within(5)) == [b"after"]
    finally:
        mover.finish(SLOT, source, to)


def test_a_move_under_full_use_loses_and_mixes_nothing(store: Store, mover: Mover) -> None:
    slots = [100 + 500 * index for index in range(12)]
    keys = RowKeys(TAG, np.unique(np.concatenate([rows_in(slot).ids for slot in slots] + [row_keys(500).ids])))
    write(store, keys, records_of(keys))
    done = threading.Event()
    failures: list[BaseException] = []

    def reshard() -> None:
        try:
            for slot in slots:
                to = (mover.owner(slot) + 1) % 3
                source = mover.begin(slot, to)
                inside = encoded(rows_in(slot))
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
        with pytest.raises(WrongNodeError, match="1 keys"):
            store.provision(CLUSTER, GENERATION, within())
        with pytest.raises(NotProvisionedError):
            store.open(within())
