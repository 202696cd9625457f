"""What a row costs: µs of CPU of each kind of process and bytes of network, by job, measured; and how long jobs take. Pure.

A job's cost per row is a sum: so much for the row, for each byte of its record, and for its part of everything that rows share (a command,
a request, a batch). `factors` says how many of each there are for a row, from the numbers of nodes, shards and rows alone. So the same
sums hold for a cluster on two cores, where `python -m benchmarks scale --simulate` compares them with real runs, and for one that nobody
has built yet, which `kvemb plan` is asked about. docs/adr/0091 has the figures, and where they miss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvemb.schema.buckets import LAYOUTS, needs_filler

TRAIN, SAVE, LOAD, REPAIR, JOIN, START = JOBS = ("train", "save", "load", "repair", "join", "start")
"""Rows trained (pulled, fetched by a shard that has them not in its cache, written); saved from the row logs of shards; loaded; brought
back to a node that lost them; moved to a node that joins; replayed by one shard that starts after kill -9."""
SERVER, SHARD, TRAINER, NETWORK = "server", "shard", "trainer", "network"
"""All storage servers (of a repair and a join, the node's); all shards (of a start, the one); all trainers; bytes at the nodes' side."""


@dataclass(frozen=True)
class Scale:
    """How many there are of everything."""

    # nodes, shards, trainers: processes
    nodes: int
    shards: int
    trainers: int
    n_rows: int  # that exist
    record_bytes: int  # of one
    layout: str  # of rows in storage: "fast" or "compact" buckets, "pages", "keys" (one for every row)
    n_keys: int  # under which storage keeps them
    step_rows: int  # distinct rows of one step, of all trainers together


COSTS: Mapping[tuple[str, str], Mapping[str, float]] = {
    (TRAIN, SERVER): {"cold": 0.42, "cold byte": 0.00087, "command": 1.27, "packed byte": 0.0056, "request": 23},
    (TRAIN, SHARD): {"row": 0.56, "byte": 0.0065, "command": 0.07, "batch": 3860, "batch request": 62},
    (TRAIN, TRAINER): {"row": 0.33, "byte": 0.0011, "command": 0.048, "pull": 1640, "pull request": 110, "push": 812},
    (TRAIN, NETWORK): {"row": 61, "byte": 3.02, "command": 39.6, "packed command": 35.3, "filler": 86},
    (SAVE, SHARD): {"row": 0.085, "byte": 0.0033, "process": 17500},
    (LOAD, SERVER): {"row": 0.25, "byte": 0.0015, "process": 21000},
    (LOAD, SHARD): {"row": 1.1, "byte": 0.0033, "process": 125000},
    (REPAIR, SERVER): {"row": 0.75, "byte": 0.0022, "listed row": 0.12, "listed key": 19},
    (REPAIR, SHARD): {"row": 1.7, "byte": 0.0086, "index row": 0.074, "listed row": 0.69, "listed key": 133},
    (JOIN, SERVER): {"row": 0.45, "byte": 0.0024},
    (JOIN, SHARD): {"row": 1.9, "byte": 0.0057, "index row": 0.008, "process": 182000},
    (START, SHARD): {"row": 1.3, "byte": 0.0058, "process": 766000},
}
"""By job and role: µs for each of `factors` (of the network: bytes), as measured (benchmarks/RESULTS.md, section "scale --simulate")."""

COLDEST = 12
"""Steps that touch one row in 2**12 were measured; "cold" counts halvings of the part that a step touches, and no further ones."""

TRAINED_BYTES = 40, 204
"""Records whose times were measured."""

MEASURED = 8, 4
"""Nodes and shards that were measured together."""


def factors(job: str, at: Scale) -> dict[str, float]:
    """Return how many of everything that costs time there are for one row of a job.

    Of training: how often the part of the table that a step touches was halved ("cold"); commands of storage, of keys that are strings
    ("packed"), with a longer field of no row ("filler"); batches of shards and their requests; pulls, their requests, and parts of pushes.
    Of other jobs: shards ("process"); rows of the index that are looked through; rows and keys that are listed in a repair.
    """
    per_row = {"row": 1.0, "byte": float(at.record_bytes)}
    if job == TRAIN:
        # A step is pulled by trainers, and pushed to shards, each of which makes a batch of it: rows are fetched, and written.
        # Where each row has a key of its own, that is in what a row costs (`PULL_SERVER_US`).
        keys = 0.0 if at.layout == "keys" else _met(at.n_keys, at.step_rows)
        cold = min(math.log2(at.n_rows / at.step_rows), COLDEST)
        packed = at.layout == "compact"  # a key's rows are one string, searched from its beginning
        counts = {
            "command": 3 * keys * (not packed),
            "packed command": 3 * keys * packed,
            "packed byte": 3 * keys * packed * at.record_bytes,
            "filler": keys * (at.layout == "fast" and needs_filler(at.record_bytes, compact=False)),
            "batch": at.shards,
            "batch request": 2 * at.shards * _met(at.nodes, at.step_rows / at.shards),
            "pull": at.trainers,
            "pull request": at.trainers * _met(at.nodes, at.step_rows / at.trainers),
            "push": at.trainers * at.shards,
        }
        counts["request"] = counts["batch request"] + counts["pull request"]
        return per_row | {"cold": cold, "cold byte": cold * at.record_bytes} | {name: n / at.step_rows for name, n in counts.items()}
    n_rows = rows_of(job, at)
    per_row["process"] = (1 if job == START else at.shards) / n_rows
    if job == REPAIR:
        # Every shard looks through its whole index, and asks the buckets of its own slots for their rows. (It reads the names of all
        # buckets of the node, too: a hundredth of that each.)
        listed = float(at.layout in LAYOUTS)
        per_row |= {"index row": float(at.nodes), "listed row": listed, "listed key": listed * at.n_keys / at.n_rows}
    if job == JOIN:
        per_row["index row"] = at.nodes + 1.0
    return per_row


def _met(n: int, n_rows: float) -> float:
    """Return how many of n keys or nodes have one of so many rows at least, drawn at random."""
    return n * -math.expm1(-n_rows / n)


def rows_of(job: str, at: Scale) -> float:
    """Return how many rows a job is about: of training those of one step, of a start those in the journal, if it has each row once."""
    parts = {TRAIN: at.n_rows / at.step_rows, REPAIR: at.nodes, JOIN: at.nodes + 1, START: at.shards}
    return at.n_rows / parts.get(job, 1)


def cost(job: str, role: str, at: Scale) -> float:
    """Return µs of CPU, or bytes of network, for one row of a job."""
    there = factors(job, at)
    return sum(each * there[name] for name, each in COSTS[job, role].items())


def seconds(job: str, at: Scale) -> tuple[float, str]:
    """Return how long a job takes where every process has a core of its own, and the role that it waits for.

    All nodes and shards do their part of a save and a load at once; a repair and a join are one node's work, a start one shard's.
    """
    at_work = {SERVER: 1 if job in (REPAIR, JOIN) else at.nodes, SHARD: 1 if job == START else at.shards}
    took = {role: rows_of(job, at) * cost(job, role, at) / n / 1e6 for role, n in at_work.items() if (job, role) in COSTS}
    slowest = max(took, key=took.__getitem__)
    return took[slowest], slowest
