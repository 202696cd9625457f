"""Rounds of several contenders on one server: wall time, and the CPU time of each process. Nothing about what they do.

Contenders take turns within every round, so that other load on the machine affects all of them; a ratio is
taken within a round, then its median over the rounds. Every figure keeps its spread.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

T = TypeVar("T")

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    """What one contender did in one round.

    Args:
        n_rows: rows delivered, duplicates and misses included.
        wall_s: time in which that happened.
        client_cpu_s: CPU time of the client process in it.
        n_commands: rows asked of the server (fewer than n_rows where the client asks once for duplicates); 0 = as many as n_rows.
    """

    n_rows: int
    wall_s: float
    client_cpu_s: float
    n_commands: int = 0


@dataclass(frozen=True)
class Contender:
    """Something to measure.

    Args:
        name: for the table.
        take_turn: work for about the given seconds.
    """

    name: str
    take_turn: Callable[[float], Turn]


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Summarize the rounds.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.0, high=3.0)
        """
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True)
class Measured:
    """One contender over all rounds; microseconds of CPU per delivered row, `ratio` is ours / this one's rows per second."""

    name: str
    rows_per_s: Spread
    server_us_per_row: Spread
    client_us_per_row: Spread
    commands_per_row: float
    ratio: Spread


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time that these processes have used so far, in user and system mode, all threads: seconds, to 1 / SC_CLK_TCK.

    Raises:
        OSError: a process has ended.
    """
    return sum(cpu_ticks(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")) for pid in pids) / _TICKS_PER_S


def cpu_ticks(stat: str) -> int:
    """Return utime + stime of a line of /proc/<pid>/stat (fields 14 and 15 of proc_pid_stat(5)).

    Example:
        >>> cpu_ticks("7 (a (b) c) R 1 7 7 0 -1 0 103 0 0 0 12 30 0 0 20 0 1 0 287343")
        42
    """
    fields = stat[stat.rindex(")") + 1 :].split()  # the name before it may hold spaces and parentheses
    return int(fields[11]) + int(fields[12])


def repeated(read: Callable[[int], T], check: Callable[[int, T], tuple[int, int]], n_batches: int) -> Callable[[float], Turn]:
    """Return a turn of a client that runs in this process: it reads batch after batch until the reads took the given time.

    Args:
        read: read batch i; only this is timed.
        check: raise if the result of batch i is wrong; return its number of rows and how many were asked of the server.
        n_batches: batches are used in turn, beginning where the last turn stopped.
    """
    at = 0

    def take_turn(seconds: float) -> Turn:
        nonlocal at
        wall_s = client_cpu_s = 0.0
        n_rows = n_commands = 0
        while wall_s < seconds:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            result = read(at)
            wall_s += time.perf_counter() - start_s
            client_cpu_s += time.process_time() - start_cpu_s
            rows, commands = check(at, result)
            n_rows, n_commands, at = n_rows + rows, n_commands + commands, (at + 1) % n_batches
        return Turn(n_rows, wall_s, client_cpu_s, n_commands)

    return take_turn


def run_rounds(contenders: Sequence[Contender], pids: Sequence[int], *, seconds: float, repeats: int) -> list[Measured]:
    """Let contenders take turns; the first one is ours, the one that ratios compare with the others.

    Args:
        contenders: at least one.
        pids: the server's processes.
        seconds: of one turn.
        repeats: rounds that count; one before them warms up.
    """
    rounds: list[list[tuple[Turn, float]]] = []
    for _ in range(repeats + 1):
        rounds.append([_timed(contender, pids, seconds) for contender in contenders])
    return [_summary(contender.name, [r[0] for r in rounds[1:]], [r[i] for r in rounds[1:]]) for i, contender in enumerate(contenders)]


def _timed(contender: Contender, pids: Sequence[int], seconds: float) -> tuple[Turn, float]:
    before_s = cpu_s(pids)
    turn = contender.take_turn(seconds)
    return turn, cpu_s(pids) - before_s


def _summary(name: str, ours: list[tuple[Turn, float]], turns: list[tuple[Turn, float]]) -> Measured:
    speeds, our_speeds = ([turn.n_rows / turn.wall_s for turn, _ in some] for some in (turns, ours))
    return Measured(
        name,
        Spread.of(speeds),
        Spread.of([server_s * 1e6 / turn.n_rows for turn, server_s in turns]),
        Spread.of([turn.client_cpu_s * 1e6 / turn.n_rows for turn, _ in turns]),
        median((turn.n_commands or turn.n_rows) / turn.n_rows for turn, _ in turns),
        Spread.of([mine / theirs for mine, theirs in zip(our_speeds, speeds, strict=True)]),
    )
