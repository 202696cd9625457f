"""Tables that get another definition, on real servers: no push is lost or counts twice, and a kill leaves the old table or the new one."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb.alter import table_alteration
from kvemb.alter.alter_messages import ALTER_TABLE
from kvemb.alter.altered_table import AlteredTable, TableChanges
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.cli import main
from kvemb.client.all_shards import AllShards
from kvemb.client.shard_client import ShardClient
from kvemb.errors import (
    CheckpointError,
    FeedBehindError,
    InvalidInputError,
    KvembError,
    LostRowError,
    MoveRefusedError,
    ShardUnavailableError,
    TableAlteredError,
)
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import STEP, TableRequest
from kvemb.stores.row_io import ReadPart, WritePart
from tests.integration.table_clusters import names, start
from tests.real_servers import redis_client

ROOT = Path(__file__).resolve().parents[2]
N = 400
IDS = np.arange(N) * 7919
SGD, ZEROS = kvemb.optim.sgd(lr=1.0), kvemb.init.zeros()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_alteration, "block_rows", lambda definition: 100)


def restart(local: LocalCluster, *shards: int) -> None:
    for shard in shards or (0, 1):
        local.shards[shard].kill()
        local.start_shard(shard)


def stored(cluster: Cluster, name: str, ids: np.ndarray = IDS) -> tuple[np.ndarray, np.ndarray]:
    """Weights and state of rows as they lie in storage."""
    definition = cluster.table(name).definition
    record, bits = definition.record, ids.astype(np.uint64)
    keys = definition.keys(bits, pages=cluster.store.capabilities.pages)
    read = cluster.store.rows.read([ReadPart(keys, record.size_bytes, record.size_bytes)], Deadline.after(10))[0].in_key_order()
    assert read.found.all()
    record.check(read.records, bits, read.found)
    return record.weights(read.records).copy(), record.state(read.records).copy()


def trained(cluster: Cluster, name: str, optimizer: Any = SGD, **options: Any) -> Table:
    """A table of dim 4 with N rows, after three pushes of different gradients."""
    table = cluster.create_table(name, **{"dim": 4, "optimizer": optimizer, "initializer": kvemb.init.normal(std=1.0)} | options)
    rng = np.random.default_rng(5)
    for _ in range(3):
        table.push(IDS, rng.standard_normal((N, 4))).wait_applied()
    return table


def failures(cluster: Cluster) -> str:
    return "".join(shard.reply.failure for shard in cluster.status().shards if shard.reply is not None)


@pytest.mark.parametrize("num_ids", [None, int(IDS[-1]) + 1])
def test_rows_and_state_are_copied_bit_for_bit_and_new_columns_are_as_the_rule_says(
    local: LocalCluster, cluster: Cluster, num_ids: int | None
) -> None:
    name = next(names)
    trained(cluster, name, kvemb.optim.adam(lr=0.1), num_ids=num_ids)
    weights, state = stored(cluster, name)
    new = cluster.alter_table(name, dim=7, optimizer=kvemb.optim.adamw(lr=0.1, amsgrad=True))
    assert (new.dim, new.definition.optimizer.kind, len(new), new.steps()) == (7, "adamw", N, 3)
    wider, moments = stored(cluster, name)
    first = new.definition.initial_rows(IDS.astype(np.uint64))
    assert wider.tobytes() == np.concatenate([weights, first[:, 4:]], axis=1).tobytes()
    assert moments.reshape(N, 3, 7)[:, :2, :4].tobytes() == state.reshape(N, 2, 4).tobytes()
    assert not moments.reshape(N, 3, 7)[:, :, 4:].any()
    assert not moments.reshape(N, 3, 7)[:, 2].any()
    new.push(IDS, np.ones((N, 7))).wait_applied()
    restart(local)  # their journals name both
    assert cluster.table(name).steps(60) == 4
    weights = stored(cluster, name)[0]
    cluster.alter_table(name, dim=9, new_columns="zeros", dtype="bfloat16")
    cut = stored(cluster, name)[0]
    assert not cut[:, 7:].any()
    np.testing.assert_allclose(cut[:, :7], weights, rtol=2**-8)
    cluster.alter_table(name, dim=2, optimizer=kvemb.optim.adagrad(lr=0.1, initial_accumulator_value=0.25), dtype="float32")
    less, sums = stored(cluster, name)
    assert less.tobytes() == cut[:, :2].tobytes()
    assert (sums == 0.25).all()
    assert cluster.table(name).steps() == 0
    assert failures(cluster) == ""


def test_training_goes_on_as_if_nothing_had_happened_where_only_the_place_of_rows_changes(local: LocalCluster, cluster: Cluster) -> None:
    one, other = next(names), next(names)
    tables = [cluster.create_table(name, dim=4, optimizer=kvemb.optim.adam(lr=0.1), initializer=ZEROS) for name in (one, other)]
    rng = np.random.default_rng(7)
    for at in range(6):
        grads = rng.standard_normal((N, 4))
        for table in tables:
            table.push(IDS, grads).wait_applied()
        if at == 2:
            tables[0] = cluster.alter_table(one, expected_rows=100_000_000)
            assert tables[0].definition.n_buckets != tables[1].definition.n_buckets
        if at == 4:
            restart(local)  # the journal says from which step on the new table counted
    for mine, expected in zip(stored(cluster, one), stored(cluster, other), strict=True):
        assert mine.tobytes() == expected.tobytes()
    assert tables[0].steps() == tables[1].steps() == 6


class PushingTrainer(threading.Thread):
    """Pushes ones to all rows with sgd(lr=1) until it is told to stop, and opens the table again when it was altered."""

    def __init__(self, url: str, name: str, number: int) -> None:
        super().__init__()
        self._url, self._name, self._number = url, name, number
        self.acked = self.n_altered = 0
        self.errors: list[BaseException] = []
        self.over = threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set():
                with suppress(TableAlteredError), kvemb.connect(self._url, trainer=f"{self._name}-{self._number}") as cluster:
                    self._push(cluster.table(self._name))
        except BaseException as error:
            self.errors.append(error)

    def _push(self, table: Table) -> None:
        while not self.over.is_set():
            try:
                table.push(IDS, np.ones((N, table.dim))).wait_applied(60)
                self.acked += 1
            except TableAlteredError:
                self.n_altered += 1
                raise


def test_every_acknowledged_push_counts_once_and_pulls_go_on_meanwhile(
    local: LocalCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(names)
    table = cluster.create_table(name, dim=4, optimizer=SGD, initializer=ZEROS)
    table.push(IDS, np.ones((N, 4))).wait_applied()
    trainers = [PushingTrainer(local.url, name, number) for number in range(2)]
    pulled: list[np.ndarray] = []
    assign = table_alteration.copy_rows

    def slowly(self: ShardClient, rows: Any, timeout_s: float | None = None) -> None:
        with kvemb.connect(local.url, read_only=True) as reader:
            pulled.append(reader.table(name).pull(IDS))
        assign(self, rows, timeout_s)

    monkeypatch.setattr(table_alteration, "copy_rows", slowly)
    for trainer in trainers:
        trainer.start()
    try:
        for dim in (6, 3, 5):
            before = [trainer.acked for trainer in trainers]
            wait_for(lambda: all(trainer.acked > n + 3 for trainer, n in zip(trainers, before, strict=True)))  # noqa: B023
            pulled.clear()
            assert cluster.alter_table(name, dim=dim, new_columns="zeros").dim == dim
            assert len(pulled) >= 4
            assert all(rows.tobytes() == pulled[0].tobytes() for rows in pulled)  # pushes waited
            assert not trainers[0].errors
    finally:
        for trainer in trainers:
            trainer.over.set()
        for trainer in trainers:
            trainer.join(120)
    assert [trainer.errors for trainer in trainers] == [[], []]
    assert all(trainer.n_altered for trainer in trainers)
    rows = cluster.table(name).pull(IDS)
    assert np.unique(rows[:, :3], axis=1).shape == (N, 1)
    n_acked, refused = 1 + sum(trainer.acked for trainer in trainers), sum(trainer.n_altered for trainer in trainers)
    applied = -rows[:, 0].astype(int)  # a refused push counts, as any without an ack, on each shard once or not at all
    assert ((applied >= n_acked) & (applied <= n_acked + refused)).all()


def wait_for(happened: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = Deadline.after(timeout_s)
    while not happened():
        assert not deadline.expired
        time.sleep(0.02)


def test_a_shard_that_is_killed_in_mid_copy_leaves_the_old_table_and_the_next_call_alters_it(
    local: LocalCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(names)
    trained(cluster, name, kvemb.optim.adam(lr=0.1))
    before, calls, assign = stored(cluster, name), count(), table_alteration.copy_rows

    def killing(self: ShardClient, rows: Any, timeout_s: float | None = None) -> None:
        if next(calls) == 2:
            local.shards[1].kill()
        assign(self, rows, 3.0)

    with monkeypatch.context() as patch:
        patch.setattr(table_alteration, "copy_rows", killing)
        with pytest.raises(ShardUnavailableError) as raised:
            cluster.alter_table(name, dim=6, timeout_s=5)
    assert any("is as it was" in note for note in raised.value.__notes__)
    assert cluster.table(name).dim == 4
    local.start_shard(1)
    for mine, expected in zip(stored(cluster, name), before, strict=True):
        assert mine.tobytes() == expected.tobytes()
    cluster.table(name).push(IDS, np.zeros((N, 4))).wait_applied(60)
    weights, _ = stored(cluster, name)
    cluster.alter_table(name, dim=6, new_columns="zeros")
    assert stored(cluster, name)[0][:, :4].tobytes() == weights.tobytes()
    assert failures(cluster) == ""  # also the rows of the first try are gone


# Each is a point at which the process that alters dies: function or method, which call of it, before or behind it.
DEATHS = [
    ("begin_alter", 0, False),
    ("hold_for_alter", 0, False),
    ("copy_rows", 1, True),
    ("hold_for_alter", 1, False),
    ("end_alter", 0, True),
    ("end_drop", 0, True),
    ("end_drop", 0, False),
]
SELDOM = [death for death in DEATHS if death[0] not in ("copy_rows", "end_drop")]
ABORTED = [pytest.param(*death, True, marks=[pytest.mark.full] * (death in SELDOM)) for death in DEATHS]
DYING = str(Path(__file__).with_name("dying_alteration.py"))


@pytest.mark.parametrize(("method", "nth", "before", "aborted"), [*((*death, False) for death in DEATHS), *ABORTED])
def test_a_command_that_is_killed_leaves_one_whole_table_and_is_repeated_or_aborted(
    local: LocalCluster, cluster: Cluster, method: str, nth: int, before: bool, aborted: bool
) -> None:
    name = next(names)
    held = trained(cluster, name)
    rows = held.pull(IDS)
    command = [sys.executable, DYING, local.url, name, method, str(nth), str(before)]
    assert subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120, check=False).returncode == -9
    switched = method == "end_drop"
    assert f"table {name!r}" in failures(cluster) or (switched and not before)
    ack = held.push(IDS, np.ones((N, 4)))
    if switched:
        with pytest.raises(TableAlteredError, match="connects again"):
            ack.wait(30)
        rows = np.concatenate([rows, np.zeros((N, 2), np.float32)], axis=1)
    else:
        with pytest.raises(ShardUnavailableError, match="is being altered"):
            ack.wait(1)
    restart(local, nth % 2)  # a shard that starts holds or refuses as before
    with kvemb.connect(local.url) as other:
        assert other.table(name).dim == (6 if switched else 4)
        there = other.table(name).pull(IDS)
        heard = method != "begin_alter"  # else a shard that had not heard of it took its part of the push, ahead of the copy
        assert ((there == rows) | ((there == rows - 1) & (not heard))).all()
    if aborted:
        cluster.abort_alter_table(name)
    else:
        new = cluster.alter_table(name, dim=6, new_columns="zeros")
    if not switched:
        ack.wait_applied(60)
        rows = rows - 1
    if not aborted:
        assert new.pull(IDS)[:, : rows.shape[1]].tobytes() == rows.tobytes()
        assert not new.pull(IDS)[:, 4:].any()
        with pytest.raises(TableAlteredError):
            held.push(IDS, np.ones((N, 4))).wait(60)
    assert failures(cluster) == ""
    with kvemb.connect(local.url) as other:
        table = other.table(name)
        now = table.pull(IDS)
        table.push(IDS, np.ones((N, table.dim))).wait_applied(60)
        assert (table.pull(IDS) == now - 1).all()
        assert len(table) == N


@pytest.mark.parametrize("step", ["begin", "hold", "switch"])
def test_a_command_that_hears_no_answer_lets_pushes_go_on(
    local: LocalCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    name = next(names)
    table = trained(cluster, name)
    call, follow = AllShards.call, table_alteration.hold_for_alter

    def unheard(self: AllShards, shard: int, verb: Any, request: Any, *arguments: Any) -> Any:
        reply = call(self, shard, verb, request, *arguments)
        if verb is ALTER_TABLE and request.step == step:
            raise ShardUnavailableError("no answer")
        return reply

    def held(*arguments: Any, **options: Any) -> None:
        follow(*arguments, **options)
        raise ShardUnavailableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(table_alteration, "hold_for_alter", held) if step == "hold" else patch.setattr(AllShards, "call", unheard)
        with pytest.raises(ShardUnavailableError, match="no answer"):
            cluster.alter_table(name, dim=6)
    assert failures(cluster) == ""
    with kvemb.connect(local.url) as other:
        assert other.table(name).dim == (6 if step == "switch" else 4)
        other.table(name).push(IDS, np.ones((N, other.table(name).dim))).wait_applied(60)
    if step != "switch":
        table.push(IDS, np.ones((N, 4))).wait_applied(60)


@pytest.mark.parametrize("shard", [0, 1])
def test_shards_that_are_killed_around_the_switch_know_the_table_that_the_registry_names(
    local: LocalCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    name = next(names)
    rows = trained(cluster, name).pull(IDS)
    end = table_alteration.end_alter

    def killing(self: ShardClient, *arguments: Any) -> int:
        killer = threading.Timer(0.01, lambda: restart(local, shard))
        killer.start()
        try:
            return end(self, *arguments)
        finally:
            killer.join()

    with monkeypatch.context() as patch, suppress(KvembError):
        patch.setattr(table_alteration, "end_alter", killing)
        cluster.alter_table(name, dim=6, new_columns="zeros", timeout_s=20)
    with kvemb.connect(local.url) as other:
        dim = other.table(name).dim
        assert (other.table(name).pull(IDS) == np.concatenate([rows, np.zeros((N, 2))], axis=1)[:, :dim]).all()
    new = cluster.alter_table(name, dim=6, new_columns="zeros")
    assert (new.pull(IDS) == np.concatenate([rows, np.zeros((N, 2))], axis=1)).all()
    assert len(new) == N
    assert failures(cluster) == ""
    new.push(IDS, np.ones((N, 6))).wait_applied(60)


def test_two_commands_at_once_leave_one_whole_table(local: LocalCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(names)
    rows = trained(cluster, name).pull(IDS)
    assign, second = table_alteration.copy_rows, []

    def in_between(self: ShardClient, block: Any, timeout_s: float | None = None) -> None:
        if not second:
            second.append(True)
            with kvemb.connect(local.url) as other:
                other.alter_table(name, dim=8, new_columns="zeros")
        assign(self, block, timeout_s)

    monkeypatch.setattr(table_alteration, "copy_rows", in_between)
    with pytest.raises(TableAlteredError):
        cluster.alter_table(name, dim=6)
    with kvemb.connect(local.url) as other:
        new = other.table(name)
        assert (new.dim, len(new)) == (8, N)
        assert (new.pull(IDS)[:, :4] == rows).all()
        new.push(IDS, np.ones((N, 8))).wait_applied()
    assert failures(cluster) == ""


def test_a_push_of_the_process_that_alters_waits_for_no_copy_and_the_copy_for_no_push(
    local: LocalCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(names)
    table = trained(cluster, name)
    rows, copy, acks, first = table.pull(IDS), table_alteration.copy_rows, [], iter([True])

    def pushing(self: ShardClient, block: Any, timeout_s: float | None = None) -> None:
        if next(first, False):  # several threads copy
            acks.append(table.push(IDS, np.ones((N, 4))))
        copy(self, block, timeout_s)

    monkeypatch.setattr(table_alteration, "copy_rows", pushing)
    new = cluster.alter_table(name, dim=6, timeout_s=60)
    assert (new.pull(IDS)[:, :4] == rows).all()
    with pytest.raises(TableAlteredError):
        acks[0].wait(60)
    with kvemb.connect(local.url) as other:
        other.table(name).push(IDS, np.ones((N, 6))).wait_applied()


def begun(cluster: Cluster, name: str, **changes: Any) -> tuple[ShardClient, AlteredTable]:
    """An alteration that was begun and goes no further."""
    shards = cluster._connection.require_shards("alter_table")
    change = AlteredTable.of(cluster.table(name).definition, TableChanges(**changes))
    staged = table_alteration.begin_alter(shards, change.old, change.new, None)
    table_alteration.hold_for_alter(shards, change.old, staged, None, begin=True)
    return shards, AlteredTable(change.old, staged, change.new_columns)


def test_what_would_be_lost_or_mixed_is_refused_while_a_table_is_being_altered(
    local: LocalCluster, cluster: Cluster, tmp_path: Path
) -> None:
    name, kept = next(names), next(names)
    table, other = trained(cluster, name), trained(cluster, kept)
    cluster.save(str(tmp_path / "before"))
    begun(cluster, name, dim=6)
    with pytest.raises(ShardUnavailableError, match="is being altered"):
        table.assign(IDS[:1], np.ones((1, 4)), timeout_s=5)
    with pytest.raises(ShardUnavailableError, match="is being altered"):
        table.erase(IDS[:1], timeout_s=5)
    with pytest.raises(InvalidInputError, match="is being altered"):
        cluster.drop_table(name)
    with pytest.raises(CheckpointError, match="is being altered"):
        cluster.load(str(tmp_path / "before"))
    with pytest.raises(MoveRefusedError, match="is being altered"):
        cluster.shards.begin(cluster.shards.rebalance({cluster.shards.addresses()[0]: 3.0}))
    other.push(IDS, np.zeros((N, 4))).wait_applied(30)  # other tables are not concerned
    cluster.save(str(tmp_path / "meanwhile"))  # the table as it was
    assert cluster.tables().count(name) == 1
    assert cluster.abort_alter_table(name) == 0
    table.assign(IDS[:1], np.ones((1, 4)))
    cluster.alter_table(name, dim=6)
    cluster.save(str(tmp_path / "after"))
    with pytest.raises(CheckpointError):  # an increment of a table that is another one now
        cluster.save(str(tmp_path / "increment"), base=str(tmp_path / "meanwhile"))
    assert failures(cluster) == ""


def test_a_row_that_storage_has_lost_is_not_taken_for_a_new_one(local: LocalCluster, cluster: Cluster) -> None:
    name = next(names)
    table = trained(cluster, name)
    rows = table.pull(IDS)
    definition = table.definition
    keys = definition.keys(IDS[7:8].astype(np.uint64), pages=cluster.store.capabilities.pages)
    cluster.store.rows.erase([WritePart(keys, np.empty((0, 0), np.uint8))], Deadline.after(60))
    with pytest.raises(LostRowError, match=f"id {IDS[7]}"):
        cluster.alter_table(name, dim=6)
    assert main(["repair", "--config", str(local.config_path), "--all"]) == 0
    assert (cluster.alter_table(name, dim=6).pull(IDS)[:, :4] == rows).all()


def test_policies_go_on_and_a_table_of_the_old_definition_says_so_to_who_only_pulls(local: LocalCluster, cluster: Cluster) -> None:
    name = next(names)
    trained(cluster, name)
    cluster.table(name).set_policies(admission=kvemb.admit.after(3))
    with kvemb.connect(local.url) as other:
        held = other.table(name)
        held.pull(IDS)
        new = cluster.alter_table(name, optimizer=kvemb.optim.adagrad(lr=0.1))
        assert str(new.policies().admission) == "after(3)"
        assert new.push([10**9], np.ones((1, 4))).wait_applied() is None
        assert len(new) == N

        def told() -> bool:
            try:
                held.pull(IDS)
            except TableAlteredError:
                return True
            return False

        wait_for(told)


def test_a_feed_begins_again_and_then_tells_the_altered_table_as_it_is(local: LocalCluster, cluster: Cluster) -> None:
    name, kept = next(names), next(names)
    trained(cluster, name)
    other = trained(cluster, kept)
    with cluster.feed.open([name]) as mine, cluster.feed.open([kept]) as others:
        new = cluster.alter_table(name, dim=6)
        with pytest.raises(FeedBehindError, match="was altered"):
            mine.take(30)
        other.push(IDS, np.zeros((N, 4))).wait_applied()
        event = others.take(30)
        assert event is not None
        assert (event.kind, event.table) == ("apply", kept)
    new.push(IDS, np.zeros((N, 6))).wait_applied()
    with cluster.feed.open([name], from_="start", weights=True) as feed:
        told: dict[int, int] = {}
        _, versions = new.pull(IDS, return_versions=True)
        deadline = Deadline.after(60)
        while told != dict(zip(IDS.tolist(), versions.tolist(), strict=True)):
            assert not deadline.expired
            event = feed.take(1)
            if event is not None:
                assert event.kind not in ("erase", "drop")
                told |= dict(zip(event.ids.tolist(), event.versions.tolist(), strict=True))
                assert event.weights is None or event.weights.shape[1] == 6


def test_a_table_that_kvemb_yaml_declares_is_altered_once_it_is_taken_out_there(require_server: Callable[[str], str]) -> None:
    with start("valkey", require_server) as local, kvemb.connect(local.url) as cluster:
        path = str(local.config_path)
        text = Path(path).read_text(encoding="utf-8")
        Path(path).write_text(text + "\ntables: {user: {dim: 4, optimizer: {kind: sgd}, initializer: {kind: zeros}}}\n", encoding="utf-8")
        restart(local)
        with pytest.raises(InvalidInputError, match="declared in kvemb"):
            cluster.alter_table("user", dim=6)
        assert cluster.table("user").dim == 4
        Path(path).write_text(text, encoding="utf-8")
        restart(local)
        assert cluster.alter_table("user", dim=6).dim == 6


class StepTrainer(threading.Thread):
    """A trainer of a sync job: pushes ones to three tables, step by step, so many times, or until the first is altered."""

    def __init__(self, url: str, name: str, number: int, n_steps: int) -> None:
        super().__init__()
        self._url, self._name, self._number, self._n_steps = url, name, number, n_steps
        self.acked, self.outcome = 0, ""

    def run(self) -> None:
        try:
            with kvemb.connect(self._url, trainer=f"{self._number}") as cluster:
                tables = {name: (IDS, np.ones((N, cluster.table(name).dim))) for name in (self._name, "beside", "moments")}
                while self.acked < self._n_steps:
                    cluster.push(tables).wait_applied(90)
                    self.acked += 1
            self.outcome = "done"
        except KvembError as error:
            self.outcome = type(error).__name__


def test_a_sync_job_waits_and_either_goes_on_or_connects_again(require_server: Callable[[str], str]) -> None:
    with start("valkey", require_server, mode="sync", trainers=2) as local, kvemb.connect(local.url) as cluster:
        for name in ("user", "beside"):
            cluster.create_table(name, dim=4, optimizer=SGD, initializer=ZEROS)
        cluster.create_table("moments", dim=4, optimizer=kvemb.optim.adam(), initializer=ZEROS)

        def steps() -> set[int]:
            servers = cluster._connection.require_shards("steps").servers
            return {reply.step for reply in servers.call_each(STEP, TableRequest("moments"), Deadline.after(60)).values()}

        def run(n_steps: int) -> list[StepTrainer]:
            trainers = [StepTrainer(local.url, "user", number, n_steps) for number in range(2)]
            for trainer in trainers:
                trainer.start()
            wait_for(lambda: any(trainer.acked > 3 for trainer in trainers))
            return trainers

        trainers = run(60)
        begun(cluster, "user", dim=6)
        at = cluster.table("user").pull(IDS)
        assert len(np.unique(at)) == 1  # all shards stand at the same step
        time.sleep(0.5)
        assert (cluster.table("user").pull(IDS) == at).all()
        restart(local, 1)
        assert cluster.abort_alter_table("user") == 0
        for trainer in trainers:
            trainer.join(120)
        assert [(trainer.outcome, trainer.acked) for trainer in trainers] == [("done", 60)] * 2
        assert (cluster.table("user").pull(IDS) == -120).all()

        trainers = run(100_000)
        new = cluster.alter_table("user", dim=6, new_columns="zeros")
        for trainer in trainers:
            trainer.join(120)
        assert [trainer.outcome for trainer in trainers] == ["TableAlteredError"] * 2
        n_steps = {trainer.acked for trainer in trainers}
        rows = new.pull(IDS)
        assert len(n_steps) == 1  # the refused step counts on no shard
        assert (rows[:, :4] == -120 - 2 * n_steps.pop()).all()
        assert (cluster.table("beside").pull(IDS) == rows[:, :4]).all()
        trainers = run(10)
        for trainer in trainers:
            trainer.join(120)
        assert [trainer.outcome for trainer in trainers] == ["done"] * 2
        assert (new.pull(IDS)[:, :4] == rows[:, :4] - 20).all()

        trainers = run(100_000)
        cluster.alter_table("moments", expected_rows=100_000_000)
        for trainer in trainers:
            trainer.join(120)
        at = steps()
        assert at == {int(-cluster.table("beside").pull(IDS[:1])[0, 0]) // 2}
        restart(local)
        assert steps() == at


def test_the_command_says_what_would_become_of_the_rows_and_alters_the_table(
    local: LocalCluster, cluster: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name, path = next(names), str(local.config_path)
    rows = trained(cluster, name, kvemb.optim.adam()).pull(IDS)
    words = ["alter", name, "--config", path, "--dim", "6", "--optimizer", "adagrad,lr=0.5"]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "dim 4 -> 6: 4 columns kept, the 2 new ones are those of the initializer, normal" in said
    assert "state: sum begins anew" in said
    assert "no checkpoint is saved first" in said
    assert main(words) == 1  # nobody has said yes
    assert cluster.table(name).dim == 4
    assert main([*words, "--yes", "--save", str(tmp_path / "before")]) == 0
    with kvemb.connect(local.url) as other:
        new = other.table(name)
        assert (new.dim, new.hyper["lr"]) == (6, 0.5)
        assert (new.pull(IDS)[:, :4] == rows).all()
    assert main(["verify", "--config", path, str(tmp_path / "before")]) == 0
    assert main([*words, "--yes"]) == 0  # nothing is left to be done
    assert main(["alter", name, "--config", path, "--abort"]) == 0
    assert "no alteration is under way" in capsys.readouterr().out
    for wrong in (["--dim", "6", "--abort"], [], ["--optimizer", "adagrad,lr"], ["--optimizer", "sgdd"]):
        assert main(["alter", name, "--config", path, *wrong]) == 1


def test_on_redis_the_buckets_of_the_old_definition_go_whole(require_server: Callable[[str], str]) -> None:
    with start("redis", require_server) as local, kvemb.connect(local.url) as cluster:
        rows = trained(cluster, "user").pull(IDS)
        clients = [redis_client(server) for server in local.servers]
        before = sum(client.dbsize() for client in clients)
        new = cluster.alter_table("user", dim=16, new_columns="zeros")
        assert (new.pull(IDS)[:, :4] == rows).all()
        assert abs(sum(client.dbsize() for client in clients) - before) < 10
        for client in clients:
            client.close()
