"""The ledger: pushes that say how often they were applied, a file of pushes sent and acknowledged, and the verifier.

SGD with lr 1 on rows of zeros: every push adds to a digit of its own, so that the final rows are counters. Push n of a trainer belongs to
generation n // pushes_per_generation; it touches about half of that generation's rows, which all trainers share, so that pushes are merged,
rows are hot and every write is a read-modify-write of others' counts. In those rows it owns one base-4 digit of one column: twelve
digits fill the 24 bits in which float32 is exact, each holds a count up to 3. The second half of the columns repeats the first, so that a
row of which only a part was written, or which was put together of two, shows at any time.

A second table gets the same pushes and lets rows go that were not pushed lately. There a row that is gone, or has begun anew, lacks the
first pushes of each trainer, and none behind one that it has.

What must not live here: processes (trainer), faults, clocks other than the time stamps of the file.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.slots import Placement

DIM = 16
TABLE, STEPS, DRIFT = "ledger", "ledger_steps", "ledger_drift"
CLOSING = "ledger_closing"
"""A table that may be altered and dropped while it is pushed to, beside the others."""
MAX_TRAINERS = 8
ROWS_PER_GENERATION = 256
_COLUMNS = DIM // 2
_DIGITS = 12
_PLACEMENT = Placement(256)  # of a table that was made without expected_rows
SENT, ACKED, FAILED, BAD_READ, STARTED = 1, 2, 3, 4, 5
_ENTRY = np.dtype([("kind", "u1"), ("n", "<u8"), ("at_s", "<f8")])
Ids = NDArray[np.int64]
STEP_IDS: Ids = np.arange(32)  # of all shards


@dataclass(frozen=True)
class Plan:
    """Which push touches which digits of which rows: a pure function of the seed.

    Args:
        seed: of ids and memberships.
        n_trainers: 1 to 8.

    Example:
        >>> ids, grads = Plan(seed=1, n_trainers=3).push(trainer=2, n=13)
        >>> grads.shape == (len(ids), DIM), 64 < len(ids) < 192, sorted(set(grads.ravel().tolist()))
        (True, True, [-4.0, 0.0])
    """

    seed: int
    n_trainers: int

    @property
    def columns(self) -> int:
        """Columns of each half that one trainer owns."""
        return _COLUMNS // self.n_trainers

    @property
    def pushes_per_generation(self) -> int:
        """Of one trainer."""
        return self.columns * _DIGITS

    def ids(self, generation: int) -> Ids:
        """The rows of a generation."""
        rows = np.arange(ROWS_PER_GENERATION, dtype=np.uint64)
        return (_mix(self.seed, 1, generation, rows) >> np.uint64(1)).astype(np.int64)

    def members(self, trainer: int, n: int) -> NDArray[np.bool_]:
        """Which of its generation's rows a push touches: bool [ROWS_PER_GENERATION]."""
        rows = np.arange(ROWS_PER_GENERATION, dtype=np.uint64)
        return (_mix(self.seed, 2 + trainer, n, rows) & np.uint64(1)).astype(bool)

    def place(self, trainer: int, n: int) -> tuple[int, int]:
        """The column and digit that a push owns."""
        slot = n % self.pushes_per_generation
        return trainer * self.columns + slot // _DIGITS, slot % _DIGITS

    def push(self, trainer: int, n: int) -> tuple[Ids, NDArray[np.float32]]:
        """Return ids int64 [m] and gradients float32 [m, DIM] of one push."""
        ids = self.ids(n // self.pushes_per_generation)[self.members(trainer, n)]
        column, digit = self.place(trainer, n)
        grads = np.zeros((len(ids), DIM), np.float32)
        grads[:, [column, _COLUMNS + column]] = -float(4**digit)
        return ids, grads

    def counts(self, rows: NDArray[np.float32], trainer: int, n: int) -> NDArray[np.int64]:
        """How often a push was applied to each of its generation's rows: int64 [ROWS_PER_GENERATION]."""
        column, digit = self.place(trainer, n)
        return (rows[:, column].astype(np.int64) >> (2 * digit)) & 3


def step_of(trainer: int) -> tuple[Ids, NDArray[np.float32]]:
    """Return what each of a trainer's pushes adds to the table of steps: 1 to its own column of every row."""
    grads = np.zeros((len(STEP_IDS), MAX_TRAINERS), np.float32)
    grads[:, trainer] = -1
    return STEP_IDS, grads


class StepsApartError(Exception):
    """Trainers of a sync job are not in step any more."""


class StepsTogether:
    """Whether a sync job's steps are applied whole: in each row every trainer's count rises as the others' do.

    That holds while no trainer starts. A restarted trainer adds nothing to steps that only some shards have had of its predecessor.

    Args:
        n_trainers: of the job.

    Example:
        >>> steps = StepsTogether(2)
        >>> for rows in ([[4, 4], [4, 3]], [[7, 7], [6, 5]], [[8, 8], [8, 8]]):
        ...     steps.look(np.array(rows), n_starts=3)
        Traceback (most recent call last):
            ...
        chaos.ledger.StepsApartError: row 1: trainers had [6, 5] steps there and have [8, 8]: one was applied by half
    """

    def __init__(self, n_trainers: int) -> None:
        self._n_trainers = n_trainers
        self._before: NDArray[np.number] = np.zeros((len(STEP_IDS), n_trainers))
        self._n_starts = -1

    def look(self, rows: NDArray[np.number], n_starts: int) -> None:
        """Compare with the last look, unless a trainer has started since.

        Args:
            rows: of the table of steps: [n, at least n_trainers].
            n_starts: of all trainers so far.

        Raises:
            StepsApartError: naming a row.
        """
        now, before = rows[:, : self._n_trainers], self._before
        self._before = now
        if n_starts != self._n_starts:
            self._n_starts = n_starts
            return
        rose = now - before
        for row in np.flatnonzero((rose != rose[:, :1]).any(axis=1)):
            told = f"trainers had {before[row].astype(int).tolist()} steps there and have {now[row].astype(int).tolist()}"
            raise StepsApartError(f"row {row}: {told}: one was applied by half")


def torn(rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows were not written as a whole, or hold what no push added."""
    whole = (rows[:, :_COLUMNS] == rows[:, _COLUMNS:]).all(axis=1)
    counters = (rows >= 0) & (rows == np.floor(rows)) & (rows < 4.0**_DIGITS)
    return np.asarray(~(whole & counters.all(axis=1)))


class LedgerFile:
    """One trainer's record; survives its SIGKILL, because every entry is handed to the system at once.

    Args:
        path: appended to.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, kind: int, n: int) -> None:
        """Write one entry."""
        os.write(self._fd, np.array([(kind, n, time.monotonic())], _ENTRY).tobytes())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@dataclass(frozen=True, eq=False)
class Record:
    """What one trainer's file says."""

    entries: NDArray[np.void]

    @staticmethod
    def read(path: Path) -> "Record":
        """Read a file; an entry that was cut short by a kill is left out."""
        data = path.read_bytes() if path.exists() else b""
        return Record(np.frombuffer(data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY))

    def numbers(self, kind: int) -> NDArray[np.uint64]:
        """The distinct pushes with an entry of that kind."""
        return np.unique(self.entries["n"][self.entries["kind"] == kind])

    def times(self, kind: int) -> NDArray[np.float64]:
        """When, on the monotonic clock of the machine."""
        return np.asarray(self.entries["at_s"][self.entries["kind"] == kind])

    @property
    def next_push(self) -> int:
        """The first number that was never sent."""
        sent = self.numbers(SENT)
        return int(sent[-1]) + 1 if len(sent) else 0


@dataclass
class Verdict:
    """What the rows say about the record. Everything but the first seven must be 0."""

    pushes_sent: int = 0
    pushes_acked: int = 0
    parts_unacked_applied: int = 0
    parts_unacked_not_applied: int = 0
    rows_verified: int = 0
    rows_let_go: int = 0  # of the table that drifts, by its policy
    rows_begun_anew: int = 0  # there, which came back later
    lost: int = 0  # acknowledged parts that a row lacks
    duplicated: int = 0  # parts that a row has more than once
    halved: int = 0  # unacknowledged parts that some of their rows have and others lack
    invented: int = 0  # counts where nothing was ever pushed
    gaps: int = 0  # rows of the table that drifts that lack a push between two that they have, or have one too many
    torn_rows: int = 0
    bad_reads: int = 0  # what trainers saw on the way
    examples: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether the promise was kept."""
        return not (self.lost or self.duplicated or self.halved or self.invented or self.gaps or self.torn_rows or self.bad_reads)

    def __str__(self) -> str:
        words = [f"{f.name.replace('_', ' ')} {getattr(self, f.name)}" for f in fields(self) if f.name != "examples"]
        return ", ".join(words) + "".join(f"\n  {example}" for example in self.examples[:20])


def fates_of(slot_shards: Sequence[NDArray[np.uint16]]) -> tuple[NDArray[np.uint16], NDArray[np.intp]]:
    """Return the fates of parts, [maps, n] shards, and the fate of each slot.

    A push is a part of each shard, applied as a whole or not at all; a shard that has given slots away refuses a part as a whole, and it is
    split again by the next map. So rows whose shards were the same in every map share their fate.

    Args:
        slot_shards: uint16 [16384] of each cluster map that there was, the writer of each slot.
    """
    fates, fate_of_slot = np.unique(np.stack(slot_shards), axis=1, return_inverse=True)
    return fates, fate_of_slot.reshape(-1)


def fates_of_rows(fate_of_slot: NDArray[np.intp], ids: Ids) -> NDArray[np.intp]:
    """Return the fate of each row."""
    return fate_of_slot[_PLACEMENT.slots(ids.view(np.uint64))]


class Verifier:
    """Compares rows with records.

    Args:
        plan: of the run.
        records: one per trainer, in order.
        slot_shards: see `fates_of`.
        pull: int64 [m] ids to float32 [m, DIM] rows.
        pull_drift: the same of the table that drifts.
    """

    def __init__(
        self,
        plan: Plan,
        records: Sequence[Record],
        slot_shards: Sequence[NDArray[np.uint16]],
        pull: Callable[[Ids], NDArray[np.float32]],
        pull_drift: Callable[[Ids], NDArray[np.float32]],
    ) -> None:
        self._plan, self._pull, self._pull_drift = plan, pull, pull_drift
        self._fates, self._fate_of_slot = fates_of(slot_shards)
        self._sent = [set(record.numbers(SENT).tolist()) for record in records]
        self._acked = [set(record.numbers(ACKED).tolist()) for record in records]
        self._bad_reads = sum(len(record.numbers(BAD_READ)) for record in records)

    def run(self) -> Verdict:
        """Read every row that any push may have touched, and judge every push."""
        verdict = Verdict(pushes_sent=sum(map(len, self._sent)), pushes_acked=sum(map(len, self._acked)), bad_reads=self._bad_reads)
        per = self._plan.pushes_per_generation
        last = max((n for sent in self._sent for n in sent), default=-1)
        for generation in range(last // per + 1):
            ids = self._plan.ids(generation)
            rows = self._pull(ids)
            verdict.rows_verified += int(rows.any(axis=1).sum())
            broken = torn(rows)
            verdict.torn_rows += int(broken.sum())
            for row in np.flatnonzero(broken):
                verdict.examples.append(f"row {ids[row]} of generation {generation} is torn: {rows[row].tolist()}")
            self._judge_drift(verdict, generation, rows, self._pull_drift(ids))
            fates = fates_of_rows(self._fate_of_slot, ids)
            for trainer in range(self._plan.n_trainers):
                for n in range(generation * per, (generation + 1) * per):
                    self._judge(verdict, trainer, n, self._plan.counts(rows, trainer, n), fates)
        return verdict

    def _judge_drift(self, verdict: Verdict, generation: int, rows: NDArray[np.float32], drifted: NDArray[np.float32]) -> None:
        """Compare the same rows in both tables: of each trainer's pushes the one that lets rows go has the last ones, or none."""
        verdict.torn_rows += int(torn(drifted).sum())
        wrong = np.zeros(len(rows), bool)
        for trainer in range(self._plan.n_trainers):
            had = np.zeros(len(rows), bool)  # whether the row has an earlier push of this trainer
            per = self._plan.pushes_per_generation
            for n in range(generation * per, (generation + 1) * per):
                kept, drift = (self._plan.counts(some, trainer, n) for some in (rows, drifted))
                wrong |= (drift > kept) | (had & (drift < kept))
                had |= drift > 0
        gone = rows.any(axis=1) & ~drifted.any(axis=1)
        verdict.rows_let_go += int(gone.sum())
        verdict.rows_begun_anew += int(((rows != drifted).any(axis=1) & ~gone).sum())
        verdict.gaps += int(wrong.sum())
        for row in np.flatnonzero(wrong):
            verdict.examples.append(f"row {row} of generation {generation} drifts to {drifted[row].tolist()}, pushed {rows[row].tolist()}")

    def _judge(self, verdict: Verdict, trainer: int, n: int, counts: NDArray[np.int64], fates: NDArray[np.integer]) -> None:
        members = self._plan.members(trainer, n) if n in self._sent[trainer] else np.zeros(len(counts), bool)
        verdict.invented += int((counts[~members] != 0).sum())
        for fate in range(self._fates.shape[1]):
            part = counts[members & (fates == fate)]
            if not len(part):
                continue
            least, most = int(part.min()), int(part.max())
            trouble = ""
            if most > 1:
                verdict.duplicated, trouble = verdict.duplicated + 1, "duplicated"
            if n in self._acked[trainer]:
                if least == 0:
                    verdict.lost, trouble = verdict.lost + 1, "lost"
            elif least != most:
                verdict.halved, trouble = verdict.halved + 1, "halved"
            elif least:
                verdict.parts_unacked_applied += 1
            else:
                verdict.parts_unacked_not_applied += 1
            if trouble:
                where = " then ".join(map(str, self._fates[:, fate]))
                verdict.examples.append(f"push {n} of trainer {trainer} at shard {where}: {trouble}; counts {np.bincount(part).tolist()}")


def _mix(*words: "int | NDArray[np.uint64]") -> NDArray[np.uint64]:
    """Hash words into 64 bits (the finalizer of SplitMix64, word by word; Steele et al., OOPSLA 2014)."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = state + np.asarray(word, np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
