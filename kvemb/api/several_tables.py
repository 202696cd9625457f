"""Batches over several tables: each table's part is checked and prepared by the table's own settings. No I/O but for opening tables.

What must not live here: how one table's part is prepared (kvemb.datapath). Stateless, hence thread- and fork-safe.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.api.table import Table
from kvemb.datapath.prefetched_rows import PrefetchedRows, prepare_prefetched
from kvemb.datapath.pull import PullRequest, prepare_pull
from kvemb.datapath.push import prepare_push
from kvemb.errors import InvalidInputError
from kvemb.protocol.message_format import TableRows

OpenTable = Callable[[str], Table]


def prepare_pulls(
    open_table: OpenTable, ids: Mapping[str, ArrayLike], out: Mapping[str, NDArray[np.float32]] | None = None
) -> list[PullRequest]:
    """Check a pull of several tables; arguments and errors as `Cluster.pull_versions`."""
    tables = {name: open_table(name) for name in ids}
    _check_names("out", out, ids)
    return [
        prepare_pull(table.definition, ids[name], (out or {}).get(name), minus_one=table.minus_one_allowed)
        for name, table in tables.items()
    ]


def prepare_pushes(
    open_table: OpenTable,
    batches: Mapping[str, tuple[ArrayLike, ArrayLike]],
    versions: Mapping[str, ArrayLike] | None,
    hyper: Mapping[str, Mapping[str, float]] | None,
) -> list[TableRows]:
    """Check a push of several tables, and sum gradients of equal ids; arguments and errors as `Cluster.push`."""
    _check_names("versions", versions, batches)
    _check_names("hyper", hyper, batches)
    rows = []
    for name, batch in batches.items():
        ids, grads = _pair(batch, f"table {name!r}: got", "(ids, grads)")
        table = open_table(name)
        values = table.pushed_hyper((hyper or {}).get(name, {}))
        seen, minus_one = (versions or {}).get(name), table.minus_one_allowed
        rows.append(prepare_push(table.definition, ids, grads, seen, values, table.wire_dtype, minus_one=minus_one))
    return rows


def prepare_all_prefetched(open_table: OpenTable, prefetched: Mapping[str, tuple[ArrayLike, ArrayLike]], mode: str) -> list[PrefetchedRows]:
    """Check the rows of several tables that a push of a sync job registers; arguments and errors as `Cluster.push`."""
    if prefetched and mode != "sync":
        raise InvalidInputError(
            "prefetched goes with sync mode only: in async mode others' pushes are applied at any time, so no answer would stay true. "
            "Leave it out, or set parameter_servers.mode to sync."
        )
    prepared = []
    for name, rows in prefetched.items():
        pair = _pair(rows, f"table {name!r}: prefetched is", "(ids, versions)")
        prepared.append(prepare_prefetched(open_table(name).definition, *pair))
    return prepared


def _pair(given: Any, what_got: str, expected: str) -> tuple[ArrayLike, ArrayLike]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InvalidInputError(f"{what_got} {type(given).__name__}, expected a pair {expected}")
    first, second = given
    return first, second


def _check_names(what: str, given: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> None:
    unknown = sorted(set(given or {}) - set(wanted))
    if unknown:
        raise InvalidInputError(f"{what} names tables that are not in this call: {', '.join(map(repr, unknown))}")
