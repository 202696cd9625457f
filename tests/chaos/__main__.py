"""`make chaos`, or `PYTHONPATH=tests python -m chaos`: the ledger under a seeded random schedule of faults, and what came of it.

Faults come one after the other, at times one of the network, or of what follows the run, beside another; after each, every trainer must
get an acknowledgement again before the next. What happens follows from the seed; what exactly it meets depends on the machine's timing.
"""

import argparse
import random
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report as benchmark
from chaos.catalogue import FAULTS, IDLE_STREAM_S, Fault, Scene, operators_of
from chaos.cluster import FaultyCluster
from chaos.followers import CopiesVerdict, Followers
from chaos.heard import HeardVerdict
from chaos.ledger import ACKED, StepsApartError, Verdict
from chaos.proxy import Flow
from chaos.run import LedgerRun
from chaos.tls_cluster import TlsFaultyCluster
from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import KINDS
from tests.integration.encrypted_cluster import KINDS_WITH_TLS

CAN = frozenset({"journal", "takeover", "repair", "full", "swap", "moves"})
"""What this release recovers from by itself; faults that need more are left out unless they are asked for by name."""
_PROGRAM = f"""import sys
from kvemb.commands.shard_program import main
from paramserver.rpc import push_streams
push_streams._LONGEST_IDLE_S = {IDLE_STREAM_S}
sys.exit(main(sys.argv[1:]))"""
_ON_DISK = {"index_mb": 0, "journal_max_mb": 1}  # shards flush all the time, and know their rows by the row log
_SHARD = (sys.executable, "-P", "-c", _PROGRAM)
_UNEVEN = Flow(jitter_s=0.05)  # what one shard of a sync job has had of a step, another has not
_RECOVERY_S = 90.0
_STORAGE_TIMEOUT_S = 2.0


@dataclass
class Event:
    """One fault that happened, on the monotonic clock."""

    name: str
    start_s: float
    end_s: float = 0.0  # when every trainer had an acknowledgement again
    error: str = ""


@dataclass
class Report:
    """What a run did."""

    seed: int
    events: list[Event] = field(default_factory=list)
    verdict: Verdict | None = None
    followed: tuple[HeardVerdict, CopiesVerdict] | None = None
    n_ended: int = 0  # times that a publisher ended with an error of its own, and was started again
    stalls_s: dict[str, float] = field(default_factory=dict)  # longest time that a trainer went without an acknowledgement, by fault
    trouble: str = ""

    @property
    def kept(self) -> bool:
        """Whether everything recovered and the promise was kept."""
        pushed = self.verdict is not None and self.verdict.kept and self.verdict.pushes_acked > 0
        return not self.trouble and pushed and self.followed is not None and all(one.kept for one in self.followed)

    def __str__(self) -> str:
        lines = [f"{'FAULT':<24}{'TIMES':>6}{'LONGEST STALL':>16}"]
        for name in sorted(self.stalls_s):
            lines.append(f"{name:<24}{sum(event.name == name for event in self.events):>6}{self.stalls_s[name]:>14.2f} s")
        lines.append(f"faults injected {len(self.events)}, {self.verdict or 'nothing verified'}")
        lines += [*map(str, self.followed or ("nothing followed",)), f"publishers that ended by themselves {self.n_ended}"]
        return "\n".join([*lines, *([self.trouble] if self.trouble else []), f"seed {self.seed}: {'kept' if self.kept else 'BROKEN'}"])


class Chaos:
    """Draws faults for a while.

    Args:
        run: of trainers that push.
        followers: of the run.
        faults: to draw from.
        seed: of the draw.
        sync: whether the trainers go in step, and must stay so.
    """

    def __init__(self, run: LedgerRun, followers: Followers, faults: tuple[Fault, ...], seed: int, *, sync: bool = False) -> None:
        self._run, self._followers, self._faults, self._random, self._sync = run, followers, faults, random.Random(seed), sync
        self.report = Report(seed)
        self.start_s = time.monotonic()

    def play(self, seconds: float) -> None:
        """Inject faults until the time is over. What does not recover ends it, in `report.trouble`."""
        self._recover([Event("the start", time.monotonic())])
        start_s, end = time.monotonic(), Deadline.after(seconds)
        while not end.expired and not self.report.trouble:
            events = self._inject(self._draw())
            recovered = self._recover(events)
            names = " beside ".join(event.name for event in events)
            print(f"{events[0].start_s - start_s:7.1f} s  {names}: {recovered}", flush=True)
            time.sleep(min(end.remaining_s(), self._random.uniform(0.1, 0.8)))

    def judge(self) -> Report:
        """Stop the trainers and verify every row."""
        try:
            self._run.cluster.heal()
            for operator in operators_of(self._run.cluster, self._random):
                self.report.trouble = self.report.trouble or operator.wait(_RECOVERY_S)
            self.report.verdict = self._run.finish()
            self.report.followed = self._followers.finish()
        except (KvembError, OSError) as error:
            self.report.trouble += f"\nnot all could be verified: {type(error).__name__}: {error}"
        if not self.report.kept:
            self.report.trouble += f"\n{self._run.last_words()}\n{self._followers.last_words()}"
        self.report.n_ended = self._followers.n_ended
        for record in self._run.records():
            self._note_stalls(record.times(ACKED))
        return self.report

    def series(self) -> benchmark.Series:
        """Pushes of all trainers that were acknowledged in each second, with the faults; of a run that is judged."""
        acked_s = np.concatenate([record.times(ACKED) for record in self._run.records()]) - self.start_s
        per_second = np.bincount(acked_s[acked_s >= 0].astype(np.int64)).tolist()
        spans = [(one.name, round(one.start_s - self.start_s, 2), round(one.end_s - self.start_s, 2)) for one in self.report.events]
        return benchmark.Series("pushes acknowledged per second", list(enumerate(per_second)), spans)

    def _draw(self) -> list[Fault]:
        first = self._random.choice(self._faults)
        others = [fault for fault in self._faults if fault.beside]
        if first.beside or first.alone or not others or self._random.random() > 0.3:
            return [first]
        return [first, self._random.choice(others)]

    def _inject(self, faults: list[Fault]) -> list[Event]:
        """Let the faults happen at once; return when all are undone."""
        events = [Event(fault.name, time.monotonic()) for fault in faults]
        scenes = [Scene(self._run, self._followers, random.Random(self._random.random()), threading.Event()) for _ in faults]

        def act(fault: Fault, scene: Scene, event: Event) -> None:
            try:
                fault.act(scene)
            except Exception as error:  # a shard that does not start is a finding, not the end of the harness
                event.error = f"{type(error).__name__}: {error}"

        threads = [threading.Thread(target=act, args=one, name=f"fault {one[0].name}") for one in zip(faults, scenes, events, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.report.events += events
        return events

    def _recover(self, events: list[Event]) -> str:
        undone_s = time.monotonic()
        errors = [event.error for event in events if event.error]
        try:
            if errors:
                raise TimeoutError("; ".join(errors))
            self._run.wait_for_acks(8, Deadline.after(_RECOVERY_S))  # more than were on their way
            if self._sync:
                self._run.look_at_steps(Deadline.after(_RECOVERY_S))
            self._followers.revive()
        except (TimeoutError, StepsApartError, KvembError) as error:
            self.report.trouble = f"no recovery from {' beside '.join(event.name for event in events)}: {str(error).splitlines()[0]}"
            return f"NOT RECOVERED: {error}"
        for event in events:
            event.end_s = time.monotonic()
        return f"lasted {undone_s - events[0].start_s:.1f} s, pushes went on {time.monotonic() - undone_s:.1f} s later"

    def _note_stalls(self, acked_s: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> None:
        for event in self.report.events:
            stalls_s = np.diff(acked_s, append=acked_s[-1:])
            touched = (acked_s <= (event.end_s or np.inf)) & (acked_s + stalls_s >= event.start_s)
            longest_s = float(stalls_s[touched].max(initial=0.0))
            self.report.stalls_s[event.name] = max(longest_s, self.report.stalls_s.get(event.name, 0.0))


def write_report(options: argparse.Namespace, chaos: Chaos, load_before: float) -> None:
    """Write what happened in a run that kept the promise."""
    report, verdict = chaos.report, chaos.report.verdict
    assert verdict is not None
    told = f"{len(report.events)} faults, {verdict.pushes_acked:,} pushes acknowledged, {verdict.rows_verified:,} rows verified"
    note = f"{options.store}, {options.mode}: {told}, lost {verdict.lost}, duplicated {verdict.duplicated}"
    notes = [note, *map(str, report.followed or ())]
    section = benchmark.Section({"store": options.store, "mode": options.mode, "seed": report.seed}, notes=notes, series=[chaos.series()])
    command = ["python", "-m", "chaos", *sys.argv[1:]]
    benchmark.write_json(options.json, benchmark.Report("chaos", [section]).to_dict(command, load_before))


def chosen_faults(store: str, only: list[str]) -> tuple[Fault, ...]:
    """The faults of a run: those named, or all that this release recovers from on that store."""
    if only:
        return tuple(fault for fault in FAULTS if fault.name in only)
    return tuple(fault for fault in FAULTS if store in fault.kinds and fault.needs <= CAN)


def main(argv: list[str] | None = None) -> int:
    """Run chaos; return 0 when the promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description="The ledger under random faults.")
    parser.add_argument("--store", default="redis", choices=KINDS)
    parser.add_argument("--mode", default="async", choices=("async", "sync"))
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, help="of faults and pushes; drawn unless given")
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument(
        "--only", action="append", default=[], choices=[fault.name for fault in FAULTS], help="just this fault; may be repeated"
    )
    parser.add_argument(
        "--tls", action="store_true", help=f"encrypt everything, with certificates on every side; {' and '.join(KINDS_WITH_TLS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what happened there, for `python -m benchmarks plot`")
    args = parser.parse_args(argv)
    load = benchmark.load_average()
    if args.tls and args.store not in KINDS_WITH_TLS:
        parser.error(f"--tls: not on {args.store}")
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    faults = chosen_faults(args.store, args.only)
    where, names = f"{args.store}{' over TLS' if args.tls else ''}", ", ".join(fault.name for fault in faults)
    print(f"{args.mode}, {where}, seed {seed}, {args.seconds:g} s, faults: {names}", flush=True)
    kind = TlsFaultyCluster if args.tls else FaultyCluster
    sync = args.mode == "sync"
    job: dict[str, Any] = {"mode": "sync", "trainers": args.trainers, "shard_flow": _UNEVEN} if sync else {}
    servers = _ON_DISK | ({"on_lost_trainer": "wait"} if sync else {})
    storage = {"timeout_s": _STORAGE_TIMEOUT_S}
    cluster = kind(args.store, args.nodes, shards=args.shards, storage=storage, servers=servers, shard_program=_SHARD, **job)
    with (
        cluster,
        LedgerRun(cluster, n_trainers=args.trainers, seed=seed, depth=2 if sync else 6, closing=True) as run,
        Followers(run) as followers,
    ):
        chaos = Chaos(run, followers, faults, seed, sync=sync)
        chaos.play(args.seconds)
        report = chaos.judge()
        if args.json and report.kept:
            write_report(args, chaos, load)
    print(report)
    return 0 if report.kept else 1


if __name__ == "__main__":
    sys.exit(main())
