"""What rows cost, as measured: the figures of benchmarks/RESULTS.md, and nothing that was not measured. Pure data.

They depend on the machine (2 cores of an AMD EPYC, shared by servers, shards and trainers, loopback, Redis 7.0, Valkey 9.1, memcached 1.6),
and hold for tables of 300,000 to 2,000,000 rows. tests/unit/test_capacity.py holds each of them equal to the page.
"""

from collections.abc import Mapping

import numpy as np

Layout = tuple[str, str]
"""A kind of storage and a layout of rows there."""

BYTES_PER_ROW: Mapping[Layout, Mapping[int, float]] = {
    ("redis", "fast"): {44: 110.41, 76: 142.29, 108: 174.32, 204: 286.32, 268: 382.32, 780: 958.32},
    ("redis", "compact"): {44: 64.36, 76: 99.30, 108: 136.60, 204: 243.83, 268: 310.08, 780: 868.70},
    ("redis", "pages"): {44: 45.72, 76: 79.24, 108: 111.07, 204: 209.45, 268: 279.49, 780: 807.31},
    ("valkey", "fast"): {44: 87.84, 76: 119.77, 108: 151.77, 204: 256.38, 268: 320.46, 780: 832.56},
    ("valkey", "compact"): {44: 58.11, 76: 91.18, 108: 123.19, 204: 220.26, 268: 284.25, 780: 796.18},
    ("valkey", "pages"): {44: 44.89, 76: 77.49, 108: 109.79, 204: 207.56, 268: 273.26, 780: 787.85},
    ("memcached", "keys"): {44: 132.82, 76: 160.78, 108: 202.72, 204: 321.56, 268: 398.46, 780: 961.19},
}
"""Memory by the bytes of a record (section "memory"); of memcached the memory that its -m counts, "claimed"."""

PULL_ROWS_S: Mapping[Layout, Mapping[int, float]] = {
    ("redis", "fast"): {76: 1.41e6, 204: 1.22e6, 268: 1.00e6},
    ("redis", "pages"): {76: 1.18e6},
    ("valkey", "fast"): {76: 1.72e6, 268: 0.92e6},
    ("memcached", "keys"): {76: 1.16e6, 268: 0.84e6},
}
"""Rows a second of one node that one trainer pulls (section "pull": a million rows, uniform ids, 106,496 a pull), by bytes of a record."""

PULL_SERVER_US: Mapping[Layout, float] = {
    ("redis", "fast"): 0.63,
    ("redis", "pages"): 0.76,
    ("valkey", "fast"): 0.50,
    ("memcached", "keys"): 0.84,
}
"""µs of the server per row of such a pull, records of 76 bytes."""

TRAINED_US: Mapping[str, Mapping[int, float]] = {
    "server": {204: 2.04, 780: 3.92},
    "shard": {204: 1.55, 780: 4.18},
    "trainer": {204: 0.84, 780: 2.29},
}
"""µs of CPU per row that is pulled, pushed and written (section "train": Redis, fast, Adam, two shards), by bytes of a record."""

ONE_ROW_A_COMMAND = 0.76
"""Share of the speed that is left where a batch has about one row of a bucket ("How much memory": `train --layout compact`)."""

REPAIR_ROWS_S = 352.73e3
"""Rows a second that one shard brings back to one node from its snapshot and journal (section "recovery", Redis, records of 204)."""

SAVE_ROWS_S = 545.08e3
"""Rows a second of a full save by one shard (section "checkpoint", records of 204)."""

INDEX_BYTES_PER_ROW = 24
"""Memory of a shard's index: 20 to 23.7 bytes (`kvemb.index.row_index`)."""

PROCESS_BYTES = 250e6
"""Memory of a shard's process beside its index and cache (section "Memory of a shard in training"): at most, with pushes of 50,000 rows."""

CUT_BYTES_PER_ROW = 16
"""What a save copies of the index at its cut, and holds until it has ended (docs/adr/0012)."""


def bytes_per_row(layout: Layout, record_bytes: int) -> float:
    """Return the memory of a row: what it takes beside its record is interpolated; beyond the largest measured record, that one's share.

    Example:
        >>> round(bytes_per_row(("redis", "compact"), 204), 2), round(bytes_per_row(("redis", "compact"), 140), 1)
        (243.83, 172.3)
    """
    measured = BYTES_PER_ROW[layout]
    largest = max(measured)
    if record_bytes > largest:
        return record_bytes * measured[largest] / largest
    return record_bytes + interpolated({size: taken - size for size, taken in measured.items()}, record_bytes)


def pull_rows_s(kind: str, layout: str, record_bytes: int) -> float | None:
    """Return how many rows a second one node gave one trainer; None where that was not measured.

    Example:
        >>> pull_rows_s("redis-cluster", "fast", 76), pull_rows_s("redis", "compact", 76)
        (1410000.0, None)
    """
    measured = PULL_ROWS_S.get(("redis" if kind == "redis-cluster" else kind, layout))
    return None if measured is None else interpolated(measured, record_bytes)


def interpolated(measured: Mapping[int, float], record_bytes: int) -> float:
    """Return a figure for another size of record: between two measured ones on a line, outside them the nearest one's.

    Example:
        >>> interpolated({100: 1.0, 200: 2.0}, 150), interpolated({100: 1.0, 200: 2.0}, 999)
        (1.5, 2.0)
    """
    sizes = sorted(measured)
    return float(np.interp(record_bytes, sizes, [measured[size] for size in sizes]))
