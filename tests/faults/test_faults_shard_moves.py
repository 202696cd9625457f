"""Slots on their way from shard to shard, and processes that die in the middle: the move ends, and no push is lost or made twice."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from chaos.cluster import FaultyCluster
from chaos.node_moves import MOVE_KINDS
from chaos.proxy import DOWN, UP, Flow
from jobs import eventually
from matrix import one_of
from shard_moves import IDS, PATIENCE_S, HastyTrainer, ShardMoves

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.schema.cluster_map import ClusterMap, equal_runs
from kvemb.schema.move_plan import ABORTING, DRAINING, FLIPPED, MOVING, SERVING
from kvemb.stores.storage_kinds import KINDS as STORES

LAUNCHER = Path(__file__).with_name("shard_launcher.py")
KINDS = {"redis": "redis-server", "memcached": "memcached", "redis-cluster": "redis-server"}
GIVER, TAKER = 2, 1  # of every second move; of the others the other way round
SHARES = equal_runs(3)
GIVEN = np.where(SHARES == GIVER, TAKER, SHARES)


class MovingTraining:
    """A cluster of three shards whose third one's slots go to the second, or come back; trainers that push all the while."""

    def __init__(self, kind: str, folder: Path, mode: str = "async") -> None:
        self.points, trainers = folder, 2 if mode == "sync" else 0
        program = [sys.executable, str(LAUNCHER), str(folder)]
        n_nodes, storage = max(2, STORES[kind].least_nodes), {"timeout_s": 2 if kind in MOVE_KINDS else 6}  # to read thousands of markers
        # A shard that starts again on a busy machine takes its time: no trainer that waits for it may lose its lease.
        servers = {"barrier_timeout_s": 2 * PATIENCE_S} if mode == "sync" else {}
        self.cluster = FaultyCluster(
            kind, n_nodes, shards=3, mode=mode, trainers=trainers, storage=storage, servers=servers, shard_program=program
        )
        self.n_tables = 0

    def begin_move(self) -> tuple[int, int]:
        """Begin the next move; return the giver and the taker."""
        there = (self.moves.now().slot_shards == GIVER).any()
        self.moves.begin(GIVEN if there else SHARES)
        return (GIVER, TAKER) if there else (TAKER, GIVER)

    def next_pair(self) -> tuple[int, int]:
        return (GIVER, TAKER) if (self.moves.now().slot_shards == GIVER).any() else (TAKER, GIVER)

    def start(self) -> None:
        """Begin to push."""
        self.n_tables += 1
        self.moves = ShardMoves(self.cluster.url)
        self.trainers = [HastyTrainer(self.cluster.url, f"t{self.n_tables}", seed) for seed in (1, 2)]
        self.require_progress()

    def require_progress(self) -> None:
        """Wait until every trainer has had answers to pushes of from now on."""
        for trainer in self.trainers:
            before = trainer.n_pushed
            eventually(lambda t=trainer, n=before: t.n_pushed > n + 80, "a trainer does not go on")

    def finish(self) -> None:
        """End the trainers, and look at every row."""
        try:
            counts = [trainer.stop() for trainer in self.trainers]
        finally:
            self.moves.close()
        with kvemb.connect(self.cluster.url, read_only=True, timeout_s=PATIENCE_S) as reader:
            rows = reader.table(f"t{self.n_tables}").pull(IDS, timeout_s=PATIENCE_S)
        np.testing.assert_array_equal(-rows[:, 0], sum(counts))

    def dies_and_comes_back(self, shard: int, point: str) -> None:
        process = self.cluster.shards[shard]
        eventually(lambda: process.poll() is not None, f"shard {shard} never came to the point {point!r}")
        assert process.poll() == -signal.SIGKILL
        self.cluster.start_shard(shard)


@pytest.fixture(scope="module", params=[*one_of("redis", "memcached"), pytest.param("redis-cluster", marks=pytest.mark.long)])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]
) -> Iterator[MovingTraining]:
    require_server(KINDS[request.param])
    made = MovingTraining(request.param, tmp_path_factory.mktemp("points"))
    with made.cluster:
        yield made


@pytest.fixture(scope="module")
def shared_in_steps(tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]) -> Iterator[MovingTraining]:
    require_server("redis-server")
    made = MovingTraining("redis", tmp_path_factory.mktemp("points"), "sync")
    with made.cluster:
        yield made


@pytest.fixture
def in_steps(shared_in_steps: MovingTraining) -> Iterator[MovingTraining]:
    shared_in_steps.start()
    yield shared_in_steps
    shared_in_steps.finish()


@pytest.fixture
def training(shared: MovingTraining) -> Iterator[MovingTraining]:
    shared.start()
    yield shared
    shared.finish()


POINTS_OF = [
    ("taker", "before slots are taken over"),
    ("taker", "after a flush counts"),
    ("taker", "after slots are taken over"),
    ("giver", "before slots are dropped"),
    ("giver", "after a flush counts"),
    ("giver", "after slots are dropped"),
]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_shard_killed_at_any_point_of_a_hand_over_goes_on_with_it(training: MovingTraining) -> None:
    for who, point in POINTS_OF:
        giver, taker = training.next_pair()
        shard = giver if who == "giver" else taker
        (training.points / f"{point} {shard}").touch()
        training.begin_move()
        training.dies_and_comes_back(shard, point)
        now = training.moves.wait()
        assert (now.slot_shards == giver).sum() == 0 or giver == TAKER, (who, point)
        training.require_progress()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_shard_0_killed_between_two_phases_carries_the_move_on(training: MovingTraining) -> None:
    for phase, point in (
        (MOVING, "before a phase is on the nodes"),
        (DRAINING, "before a phase is kept"),
        (DRAINING, "before a phase is on the nodes"),
        (SERVING, "before a phase is kept"),
    ):
        _, taker = training.begin_move()
        if phase_of(training.moves.wait(lambda now: phase_of(now) in after(phase))) != "":  # noqa: B023  # else nobody could look in time
            (training.points / f"{point} 0").touch()
            training.dies_and_comes_back(0, point)
        now = training.moves.wait()
        assert (now.slot_shards == taker).any(), (phase, point)
        training.require_progress()


@pytest.mark.parametrize("who", one_of("giver", "taker"))
def test_a_shard_killed_while_rows_are_read_ahead_is_waited_for(training: MovingTraining, who: str) -> None:
    giver, taker = training.begin_move()
    training.moves.wait(lambda now: phase_of(now) in after(MOVING))
    shard = giver if who == "giver" else taker
    training.cluster.shards[shard].kill()
    training.cluster.start_shard(shard)
    assert (training.moves.wait().slot_shards == taker).any()
    training.require_progress()


@pytest.mark.full
@pytest.mark.parametrize("silent", ["taker", "giver"])
def test_a_move_is_taken_back_while_slots_are_on_their_way(training: MovingTraining, silent: str) -> None:
    giver, taker = training.next_pair()
    before = training.moves.now().slot_shards
    shard = giver if silent == "giver" else taker
    process = training.cluster.shards[shard]
    (training.points / f"before slots are taken over {taker}").touch()
    training.begin_move()
    eventually(lambda: training.cluster.shards[taker].poll() is not None, "the taker never came so far")
    assert phase_of(training.moves.now()) == DRAINING
    if silent == "giver":
        process.kill()
    training.moves.abort()
    assert phase_of(training.moves.now()) == ABORTING
    for index in {taker, shard}:
        training.cluster.start_shard(index)
    now = training.moves.wait()
    np.testing.assert_array_equal(now.slot_shards, before)
    training.require_progress()


SYNC_POINTS = {
    "giver": ("after steps are held", "before all come to one step", "before slots are dropped"),
    "taker": ("after steps are held", "before all come to one step", "after slots are taken over"),
    "shard 0": ("after steps are held", "before all come to one step", "before the last step is told", "before a flip"),
}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", SYNC_POINTS)
def test_a_shard_killed_while_the_shards_of_a_sync_job_stop_at_one_step_ends_the_move_or_goes_on_with_it(
    in_steps: MovingTraining, who: str
) -> None:
    for point in SYNC_POINTS[who]:
        giver, taker = in_steps.next_pair()
        before = in_steps.moves.now().slot_shards
        shard = {"giver": giver, "taker": taker, "shard 0": 0}[who]
        (in_steps.points / f"{point} {shard}").touch()
        in_steps.begin_move()
        in_steps.dies_and_comes_back(shard, point)
        now = in_steps.moves.wait()
        in_steps.require_progress()
        if point == "before slots are dropped":
            assert (now.slot_shards != before).any(), point
        if not (now.slot_shards != before).any():  # taken back: the next one is done
            in_steps.begin_move()
            assert (in_steps.moves.wait().slot_shards != before).any(), point
            in_steps.require_progress()


def phase_of(cluster_map: ClusterMap) -> str:
    return "" if cluster_map.plan is None else cluster_map.plan.phase


def after(phase: str) -> tuple[str, ...]:
    order = (MOVING, DRAINING, FLIPPED, SERVING, "")
    return order[order.index(phase) :]


def test_what_a_shard_had_taken_before_it_left_is_heard_of_from_shard_0(
    require_server: Callable[[str], str],
) -> None:
    require_server("redis-server")
    ones = np.ones((len(IDS), 2), np.float32)
    with FaultyCluster("redis", 1, shards=3, storage={"timeout_s": 2}) as cluster, kvemb.connect(cluster.url) as trainer:
        table = trainer.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        cluster.shard_proxies[GIVER].reset_all()  # what other shards have opened to it at their start: theirs is not to be held
        table.push(IDS, ones).wait_applied(PATIENCE_S)
        cluster.shard_proxies[GIVER].set_open(Flow(hold=True), DOWN)
        taken = [table.push(IDS, ones) for _ in range(3)]
        eventually(lambda: bool((table.pull(IDS, timeout_s=PATIENCE_S) == -4).all()), "the pushes are not applied")
        cluster.shard_proxies[GIVER].set_open(Flow(hold=True), UP)
        on_its_way = table.push(IDS, ones)
        moves = ShardMoves(cluster.url)
        moves.begin(GIVEN, leave_shards=[GIVER])
        moves.wait()
        moves.close()
        cluster.shards[GIVER].kill()
        cluster.shard_proxies[GIVER].reset_all()
        for ack in (*taken, on_its_way, table.push(IDS, ones)):
            ack.wait_applied(PATIENCE_S)
        assert np.unique(table.pull(IDS, timeout_s=PATIENCE_S)).tolist() == [-6]


@pytest.mark.full
def test_what_was_on_its_way_while_slots_went_and_came_back_is_applied_once(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    ones = np.ones((len(IDS), 2), np.float32)
    with FaultyCluster("redis", 1, shards=3, storage={"timeout_s": 5}) as cluster, kvemb.connect(cluster.url) as trainer:
        table = trainer.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, ones).wait_applied(PATIENCE_S)
        cluster.shard_proxies[GIVER].set_open(Flow(hold=True), DOWN)
        unanswered = [table.push(IDS, ones) for _ in range(3)]
        eventually(lambda: bool((table.pull(IDS, timeout_s=PATIENCE_S) == -4).all()), "the pushes are not applied")
        cluster.shard_proxies[GIVER].set_open(Flow(hold=True), UP)
        on_its_way = table.push(IDS, ones)
        moves = ShardMoves(cluster.url)
        for owners in (GIVEN, SHARES):
            moves.begin(owners)
            assert (moves.wait().slot_shards == owners).all()
        moves.close()
        cluster.shard_proxies[GIVER].reset_all()
        for ack in (*unanswered, on_its_way, table.push(IDS, ones)):
            ack.wait_applied(PATIENCE_S)
        assert np.unique(table.pull(IDS, timeout_s=PATIENCE_S)).tolist() == [-6]
