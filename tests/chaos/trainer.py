"""A trainer of the ledger, as a process of its own: `python -m chaos.trainer …`. Pushes until SIGTERM, whatever happens;
rests for a while at SIGUSR1.

It trusts what the errors promise: after "nothing was sent", and after "nothing was accepted" because a table was closed, it sends the same
push again; after anything else a push that was not acknowledged stays as it is. What must not live here: what a push consists of (ledger).
"""

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy as np

import kvemb
from chaos.ledger import (
    ACKED,
    BAD_READ,
    CLOSING,
    DIM,
    DRIFT,
    FAILED,
    MAX_TRAINERS,
    SENT,
    STARTED,
    STEP_IDS,
    STEPS,
    TABLE,
    LedgerFile,
    Plan,
    Record,
    step_of,
    torn,
)
from kvemb.client.ack import Ack
from kvemb.errors import KvembError, ShardUnavailableError, StorageError, TableDroppedError
from kvemb.net.deadline import Deadline
from kvemb.process.interrupts import StopFlag

_CREATE_S = 30.0
_TRY_S = 1.0
_PAUSE_S = 0.2
_END_S = 15.0
_FLUSH_S = 120.0  # longer than what counts as stuck
REST_S = 5.0
_DRIFT_BATCHES = 300  # of a shard: seconds
_STUCK = 3  # exit code: it hung, and has told where


class LedgerTrainer:
    """Sends one trainer's pushes.

    Args:
        config: kvemb.yaml.
        plan: of the run.
        trainer: number.
        path: of its ledger file; it goes on where the file ends.
        depth: pushes on their way at once.
        pause_s: between two pushes.
        check_every: pushes between two looks at what pulls return.
        closing: whether it pushes to the table that may be altered and dropped, too.
    """

    def __init__(
        self,
        config: str,
        plan: Plan,
        trainer: int,
        path: Path,
        *,
        depth: int = 6,
        pause_s: float = 0.005,
        check_every: int = 25,
        closing: bool = False,
    ) -> None:
        self._config, self._plan, self._trainer = config, plan, trainer
        self._depth, self._pause_s, self._check_every = depth, pause_s, check_every
        self._n = Record.read(path).next_push
        self._noted = self._reopen = False
        self._closing, self._again = closing, deque[int]()
        self._random = random.Random(f"{plan.seed} {trainer} {self._n}")
        self._file = LedgerFile(path)
        self._waiting: deque[tuple[int, Ack]] = deque()
        self._late = threading.Event()
        self.stop = StopFlag()
        self.rest = False
        """Set by a handler: push nothing for `REST_S`."""

    def run(self, grace_s: float) -> None:
        """Push until `stop` is set, then wait so long for pushes on their way."""
        threading.Thread(target=self._give_up_late, args=(grace_s,), name="ledger-grace", daemon=True).start()
        while not (self.stop.is_set() and not self._waiting) and not self._late.is_set():
            try:
                with kvemb.connect(self._config, trainer=trainer_name(self._trainer), timeout_s=20) as cluster:
                    self._push_all(cluster)
            except KvembError as error:
                print(f"{time.monotonic():.3f} {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                self._settle_failed()
                self.stop.wait(_PAUSE_S)
        self._file.close()

    def _give_up_late(self, grace_s: float) -> None:
        while not self.stop.wait(_TRY_S):
            pass
        time.sleep(grace_s)
        self._late.set()
        time.sleep(_END_S)
        print(f"does not come to its end; pushes on their way: {[n for n, _ in self._waiting]}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(_STUCK)

    def _push_all(self, cluster: kvemb.Cluster) -> None:
        self._file.note(STARTED, self._n)
        table, self._reopen = cluster.table(TABLE), False
        while not self.stop.is_set() and not self._reopen:
            self._push_one(cluster)
            while len(self._waiting) >= self._depth or (self.rest and self._waiting):
                self._await_oldest()
            if self._n % self._check_every == 0 and self._waiting:
                self._look(table)
            if self._random.random() < 0.02:
                cluster.flush(timeout_s=_FLUSH_S)
            if self.rest:
                self.stop.wait(REST_S)
                self.rest = False
            self.stop.wait(self._random.choice((0, 0, 3)) * self._pause_s)
        while self._waiting and not self._late.is_set():
            self._await_oldest()

    def _push_one(self, cluster: kvemb.Cluster) -> None:
        n = self._again[0] if self._again else self._n
        ids, grads = self._plan.push(self._trainer, n)
        if self._random.random() < 0.5:
            with suppress(StorageError):
                cluster.table(TABLE).pull(ids, timeout_s=_TRY_S)  # as training does: it hears of a newer map between any two pushes
        if not self._noted and n == self._n:
            self._file.note(SENT, self._n)
            self._noted = True
        try:
            rows = {TABLE: (ids, grads), DRIFT: (ids, grads), STEPS: step_of(self._trainer)}
            if self._closing:
                rows[CLOSING] = STEP_IDS, np.ones((len(STEP_IDS), cluster.table(CLOSING).dim), np.float32)
            ack = cluster.push(rows, timeout_s=_TRY_S)
        except ShardUnavailableError:
            return  # nothing was sent: the same again
        except TableDroppedError:  # of an earlier push; nothing was sent of this one
            self._reopen = True
            return
        self._waiting.append((n, ack))
        if n == self._n:
            self._n, self._noted = n + 1, False
        else:
            self._again.popleft()

    def _await_oldest(self) -> None:
        n, ack = self._waiting[0]
        try:
            ack.wait(timeout_s=_TRY_S)
        except ShardUnavailableError:
            if self._late.is_set():
                raise
            return  # the client goes on sending it
        except TableDroppedError:  # nothing of it was accepted: it is pushed again once the table is open
            self._waiting.popleft()
            self._again.append(n)
            self._reopen = True
            return
        self._file.note(ACKED, n)
        self._waiting.popleft()

    def _look(self, table: kvemb.Table) -> None:
        """Once a push is applied, every pull must see it, and whole rows."""
        n, ack = self._waiting[-1]
        try:
            ack.wait_applied(timeout_s=_TRY_S)
            ids = self._plan.ids(n // self._plan.pushes_per_generation)
            rows = table.pull(ids, timeout_s=_TRY_S)
        except (ShardUnavailableError, StorageError):
            return
        counts = self._plan.counts(rows, self._trainer, n)
        if torn(rows).any() or (counts != self._plan.members(self._trainer, n)).any():
            self._file.note(BAD_READ, n)
            print(f"bad read of push {n}: {counts.tolist()} torn {torn(rows).sum()}", file=sys.stderr, flush=True)

    def _settle_failed(self) -> None:
        """The session is over: keep the pushes acknowledged before."""
        for n, ack in self._waiting:
            self._file.note(ACKED if ack.accepted else FAILED, n)
        self._waiting.clear()


def trainer_name(trainer: int) -> str:
    """Name a trainer; it is the same after each start."""
    return f"ledger-{trainer}"


def create_closing(cluster: kvemb.Cluster) -> None:
    """Create the table that is altered and dropped, if it is not there."""
    if CLOSING not in cluster.tables():
        cluster.create_table(CLOSING, dim=MAX_TRAINERS, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), exist_ok=True)


def create_tables(url: str, *, closing: bool = False) -> None:
    """Create the ledger's tables; on a machine that is busy the shards' own short deadlines of storage may need several tries."""
    deadline = Deadline.after(_CREATE_S)
    while True:
        try:
            with kvemb.connect(url, timeout_s=_CREATE_S) as cluster:
                options = {"optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros(), "exist_ok": True}
                cluster.create_table(TABLE, dim=DIM, **options)  # type: ignore[arg-type]
                cluster.create_table(DRIFT, dim=DIM, eviction=kvemb.evict.older_than(batches=_DRIFT_BATCHES), **options)  # type: ignore[arg-type]
                # Its first steps are held back; of one step all trainers' parts, or none.
                cluster.create_table(STEPS, dim=MAX_TRAINERS, admission=kvemb.admit.after(5), **options)  # type: ignore[arg-type]
                if closing:
                    create_closing(cluster)
                return
        except KvembError:
            if deadline.expired:
                raise
            time.sleep(_PAUSE_S)


def main() -> int:
    """Run one trainer."""
    parser = argparse.ArgumentParser(prog="python -m chaos.trainer", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--trainer", type=int, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--pause-s", type=float, default=0.005)
    parser.add_argument("--grace-s", type=float, default=60.0)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--closing", action="store_true")
    args = parser.parse_args()
    plan = Plan(args.seed, args.trainers)
    options = {"depth": args.depth, "pause_s": args.pause_s, "closing": args.closing}
    trainer = LedgerTrainer(args.config, plan, args.trainer, args.file, **options)
    signal.signal(signal.SIGTERM, lambda *_: trainer.stop.set())
    signal.signal(signal.SIGUSR1, lambda *_: setattr(trainer, "rest", True))
    trainer.run(args.grace_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
