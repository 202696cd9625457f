"""Runs inside a container of our image, beside a ledger: counts what its trainers noted, and judges every row of the cluster.

    python judge.py create                      the ledger's tables
    python judge.py acks TRAINERS               acknowledged pushes of each trainer, as JSON
    python judge.py verify TRAINERS SEED        the verdict, as JSON; all trainers must have ended

Files of the ledger lie in the folder that is mounted there.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from chaos.ledger import ACKED, DIM, DRIFT, TABLE, Plan, Record, Verifier
from chaos.trainer import create_tables

import kvemb
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS

CONFIG = "/etc/kvemb/kvemb.yaml"
FOLDER = Path("/var/lib/kvemb")


def records(n_trainers: int) -> list[Record]:
    """What every trainer has noted so far."""
    return [Record.read(FOLDER / f"ledger-{trainer}") for trainer in range(n_trainers)]


def verify(n_trainers: int, seed: int) -> dict[str, object]:
    """Wait until every shard has applied what it accepted, read every row, and judge."""
    with kvemb.connect(CONFIG, timeout_s=60) as cluster:
        options = {"optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros()}
        fence = cluster.create_table("ledger_fence", dim=DIM, exist_ok=True, **options)
        fence.push(np.arange(64), np.ones((64, DIM))).wait_applied(timeout_s=60)
        table, drift = cluster.table(TABLE), cluster.table(DRIFT)
        shards = [one.shard for one in cluster.status().shards]
        # Where shards have come or gone since, slots have moved by groups of 64: those stayed together, whatever the maps were.
        together = equal_runs(2) if shards == [0, 1] else np.arange(N_SLOTS) // 64
        pull, pull_drift = (lambda ids: table.pull(ids, timeout_s=60)), (lambda ids: drift.pull(ids, timeout_s=60))
        verdict = Verifier(Plan(seed, n_trainers), records(n_trainers), [together], pull, pull_drift).run()
    return {**asdict(verdict), "kept": verdict.kept}


def main(verb: str, *arguments: str) -> None:
    """Run one verb."""
    if verb == "create":
        create_tables(CONFIG)
    elif verb == "acks":
        print(json.dumps([len(record.numbers(ACKED)) for record in records(int(arguments[0]))]))
    else:
        print(json.dumps(verify(*map(int, arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
