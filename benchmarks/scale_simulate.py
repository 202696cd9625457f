"""`scale --simulate`: what `kvemb plan` reckons with (`kvemb.operate.row_costs`), beside real runs of 1 to 8 nodes and 1 to 4 shards."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

import kvemb
from benchmarks.measure import Spread
from benchmarks.report import Line, Report, Section, load_average
from benchmarks.scale_jobs import JobRuns, Kind, Sample
from kvemb.local_cluster import LocalCluster
from kvemb.operate.capacity import bytes_per_row
from kvemb.operate.row_costs import COSTS, JOBS, NETWORK, TRAIN, cost, factors

KINDS = (
    Kind("sgd", 7, "fast"),
    Kind("adam", 16, "fast"),
    Kind("sgd", 7, "compact"),
    Kind("adam", 16, "compact"),
    Kind("sgd", 7, "fast", 10**9),  # so many buckets that each row has a command of its own, as in a table of 10^11 rows
)
CLUSTERS = ((1, 1), (2, 2), (4, 2), (8, 4), (1, 4), (8, 1))
STEPS = (2_000, 32_000)
WITHIN = 0.20
_CORES = 2


@dataclass(frozen=True)
class Ran:
    """One cluster that ran: its samples, the memory of its nodes in relation to the model's, and the load of the machine."""

    nodes: int
    shards: int
    samples: Sequence[Sample]
    memory_ratio: float
    load: float


def simulate(options: argparse.Namespace) -> Report:
    """Run every job in clusters of different sizes, and lay what rows cost beside what the model says."""
    versions: dict[str, str] = {}
    ran = [_run(kind, nodes, shards, options, versions) for nodes, shards in CLUSTERS for kind in KINDS]
    said = {"rows": options.rows, "seconds": options.seconds, "repeats": options.repeats}
    samples = [one for run in ran for one in run.samples]
    sections = [Section({"measured / model": "medians of the tables", **said}, lines=ratio_lines(ran))]
    sections.append(Section({"measured / model": f"how many are within {WITHIN:.0%}"}, lines=summary(samples)))
    sections.append(Section({"measured / model": f"not within {WITHIN:.0%}"}, lines=misses(samples)))
    return Report("scale", [*sections, Section({"costs": "by these runs alone"}, lines=fitted_lines(samples))], versions)


def _run(kind: Kind, nodes: int, shards: int, options: argparse.Namespace, versions: dict[str, str]) -> Ran:
    found: dict[tuple[str, int], list[Sample]] = {}
    load = load_average()
    with LocalCluster("redis", nodes, shards=shards, cache_mb=0, memory_mb=4096) as cluster, kvemb.connect(cluster.url) as opened:
        versions["redis server"] = opened.status().nodes[0].server
        runs = JobRuns(cluster, opened, kind, options.rows)
        found["start", 0] = [runs.start()]
        for _ in range(options.repeats):
            trained = [runs.train(step, options.seconds) for step in STEPS]
            for one in (*trained, *runs.save_and_load(), runs.repair(), runs.join()):
                found.setdefault((one.job, one.at.step_rows), []).append(one)
    planned = bytes_per_row(("redis", kind.layout), runs.at.record_bytes)
    samples = [Sample.of(some) for some in found.values()]
    return Ran(nodes, shards, samples, runs.node_bytes_per_row / planned, max(load, load_average()))


def ratios_of(one: Sample) -> dict[str, float]:
    """Return measured / model of each role, and the inverse of all their CPU time: rows/s that two cores would give, measured / model."""
    ratios = {role: measured / cost(one.job, role, one.at) for role, measured in one.costs.items() if (one.job, role) in COSTS}
    roles = [role for role in ratios if role != NETWORK]
    return ratios | {"rows/s of 2 cores": sum(cost(one.job, role, one.at) for role in roles) / sum(one.costs[role] for role in roles)}


def ratio_lines(ran: Sequence[Ran]) -> list[Line]:
    """Lay the ratios of each cluster and job out, over its tables; and the rows/s of two cores, and those seen."""
    lines = []
    for nodes, shards in dict.fromkeys((one.nodes, one.shards) for one in ran):
        here = [one for one in ran if (one.nodes, one.shards) == (nodes, shards)]
        loads = {"load": f"{min(one.load for one in here)} to {max(one.load for one in here)}"}
        memory = {"memory": Spread.of([one.memory_ratio for one in here])}
        for job, step in dict.fromkeys((one.job, one.at.step_rows if one.job == TRAIN else 0) for one in here[0].samples):
            some = [one for run in here for one in run.samples if one.job == job and step in (0, one.at.step_rows)]
            ratios = [ratios_of(one) for one in some]
            figures: dict[str, Spread | float | str] = {name: Spread.of([one[name] for one in ratios]) for name in ratios[0]}
            possible = [1e3 * _CORES / sum(us for role, us in one.costs.items() if role != NETWORK) for one in some]
            figures |= {"k rows/s of 2 cores": Spread.of(possible), "k rows/s seen": Spread.of([one.rows_per_s / 1e3 for one in some])}
            name = f"{nodes} nodes, {shards} shards: {job}" + (f", {step:,} rows a step" if step else "")
            lines.append(Line(name, figures | (memory | loads if job == TRAIN else {})))
    return lines


def summary(samples: Sequence[Sample]) -> list[Line]:
    """Say of every job how many of the runs the model meets, and how far the others are off."""
    lines = []
    for job in JOBS:
        ratios = [ratios_of(one) for one in samples if one.job == job]
        figures: dict[str, Spread | float | str] = {}
        for name in ratios[0] if ratios else ():
            these = [one[name] for one in ratios]
            spread = Spread.of(these)
            figures[name] = f"{sum(map(_is_met, these))} of {len(these)}: {spread.median:.2f} ({spread.low:.2f}..{spread.high:.2f})"
        lines.append(Line(job, figures))
    return lines


def misses(samples: Sequence[Sample]) -> list[Line]:
    """Lay out what the model does not meet."""
    lines = []
    for one in samples:
        for role, ratio in ratios_of(one).items():
            if role in one.costs and not _is_met(ratio):
                at = one.at
                table = f"{at.record_bytes} B, {at.layout}, {at.n_keys:,} keys"
                name = f"{one.job}, {role}: {at.nodes} nodes, {at.shards} shards, {table}"
                model = cost(one.job, role, at)
                figures: dict[str, Spread | float | str] = {"measured": one.costs[role], "model": model, "ratio": ratio}
                lines.append(Line(name, figures | ({"rows a step": f"{at.step_rows:,}"} if one.job == TRAIN else {})))
    return lines


def _is_met(ratio: float) -> bool:
    return 1 / (1 + WITHIN) <= ratio <= 1 + WITHIN


def fitted_lines(samples: Sequence[Sample]) -> list[Line]:
    """Say what the model's costs would be by these runs alone."""
    lines = []
    for (job, role), costs in COSTS.items():
        some = [one for one in samples if one.job == job]
        found = ", ".join(f"{name} {each:.3g}" for name, each in fitted(some, role, costs).items())
        lines.append(Line(f"{job}, {role}", {"µs, or bytes, for each": found}))
    return lines


def fitted(samples: Sequence[Sample], role: str, names: Iterable[str]) -> dict[str, float]:
    """Return the costs, none below zero, whose sums come nearest to what was measured, in relation to it.

    Args:
        samples: of one job.
        role: whose.
        names: of `factors`, that the cost is a sum of.
    """
    names = list(names)
    measured = np.array([one.costs[role] for one in samples])
    there = [factors(one.job, one.at) for one in samples]
    while True:
        # [samples, names]: how many of each there are for a row, for one unit of what was measured
        counts = np.array([[one[name] for name in names] for one in there]) / measured[:, None]
        each = np.linalg.lstsq(counts, np.ones(len(samples)), rcond=None)[0]
        if (each >= 0).all():
            return dict(zip(names, each.tolist(), strict=True))
        names.pop(int(each.argmin()))
