"""Merging: which pushes may become one batch, and the segment sum that makes it. Pure.

Docs/adr/0006 says why tables that reduce by "mean" are never merged in async mode.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvemb.arrays.segment_sum import segment_sum
from kvemb.errors import PushRejectedError

from ..model.batch import APPLY, Batch, CheckedRows, Push, ReceivedPart

MAX_MERGED_BYTES = 64 << 20
"""Of the pushes that are merged into one batch, unless it is one push that is larger."""


def hyper_by_table(parts: Iterable[ReceivedPart]) -> dict[str, Mapping[str, float]]:
    """Return the run-time values in force for each table that the parts name.

    Raises:
        PushRejectedError: two parts have different values for one table.
    """
    found: dict[str, Mapping[str, float]] = {}
    for part in parts:
        for rows in part.tables:
            name = rows.definition.name
            if found.setdefault(name, rows.hyper) != rows.hyper:
                raise PushRejectedError(
                    f"table {name!r}: {dict(found[name])} and {dict(rows.hyper)} in one step; use the same run-time values in all "
                    "parts of a push and, in sync mode, on all trainers"
                )
    return found


def n_mergeable(pushes: Sequence[Push]) -> int:
    """Return how many pushes from the first on may be applied as one batch in async mode: at least 1.

    The order of pushes is kept. Counting stops at the first push that shares a table with an earlier one under other run-time values, or a
    table that reduces by "mean". It also stops where the batch would become large, because each of its pushes waits for all of it.
    """
    seen: dict[str, Mapping[str, float]] = {}
    size_bytes = 0
    for count, push in enumerate(pushes):
        size_bytes += push.size_bytes
        if count and size_bytes > MAX_MERGED_BYTES:
            return count
        here = {rows.definition.name: rows for part in push.parts for rows in part.tables}
        for name, rows in here.items():
            if name in seen and (rows.definition.reduce == "mean" or seen[name] != rows.hyper):
                return count
        seen.update({name: rows.hyper for name, rows in here.items()})
    return len(pushes)


def merge_pushes(pushes: Sequence[Push], *, sync: bool) -> Batch:
    """Make one batch of pushes: gradients of equal ids are summed in (incarnation, sequence) order.

    Args:
        pushes: at least one; in sync mode the step of every live member.
        sync: divide tables that reduce by "mean" by the number of pushes, which is the number of members of the step.

    Returns:
        Rows of each table, in ascending order of ids. A table that was named without rows is in it with 0 rows.
    """
    parts = [part for push in sorted(pushes, key=lambda push: push.order) for part in push.parts]
    by_table: dict[str, list[CheckedRows]] = {}
    for part in parts:
        for rows in part.tables:
            by_table.setdefault(rows.definition.name, []).append(rows)
    return Batch(APPLY, tuple(_sum(rows, len(pushes) if sync else 1) for _, rows in sorted(by_table.items())))


def _sum(rows: list[CheckedRows], n_members: int) -> CheckedRows:
    definition = rows[0].definition
    one = len(rows) == 1
    ids = rows[0].ids if one else np.concatenate([r.ids for r in rows])
    grads = rows[0].rows if one else np.concatenate([r.rows for r in rows])
    with np.errstate(over="ignore"):  # a sum beyond float32 is infinity, which optimizers cut to the largest gradient that they take
        ids, grads = segment_sum(ids, grads)
    if definition.reduce == "mean" and n_members > 1:
        grads = grads / np.float32(n_members)
    return CheckedRows(definition, ids, grads, np.empty(0, np.uint64), rows[0].hyper)
