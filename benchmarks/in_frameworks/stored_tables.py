"""The tables of one contender in a cluster, with the rows that everybody begins with; and how far rows are pulled ahead."""

from typing import Any

from benchmarks.in_frameworks.problem import Problem

MAX_UNAPPLIED = 2
AHEAD = {"consistency": "stale", "capacity": 1}
"""One batch: here all rows are in every batch here, and Adam bears little delay."""


def stored_tables(cluster: Any, problem: Problem, prefix: str, rule: Any) -> dict[str, Any]:
    """Make a table for each kind of row, and fill it."""
    tables = {}
    for name, rows in problem.rows.items():
        tables[name] = cluster.create_table(f"{prefix}.{name}", dim=rows.shape[1], optimizer=rule)
        tables[name].assign(problem.known_ids, rows)
    return tables
