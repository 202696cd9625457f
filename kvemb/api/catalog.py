"""The tables of one connection: which exist, and the object of each that was opened. Created and dropped here, and batches over several.

Each table's part of a batch is checked and prepared by the table's own settings. Thread-safe.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.api.table import Table
from kvemb.config import Config
from kvemb.connection import Connection
from kvemb.datapath.prefetched_rows import PrefetchedRows, prepare_prefetched
from kvemb.datapath.pull import PullRequest, prepare_pull
from kvemb.datapath.push import prepare_push
from kvemb.errors import InvalidInputError, UnknownTableError
from kvemb.process import ForkLock
from kvemb.protocol.message_format import TableRows
from kvemb.schema.policies import PolicyChange
from kvemb.schema.table_def import TableDef, check_table_name


class Catalog:
    """The tables of one connection, by name; asking twice gives the same object."""

    def __init__(self, config: Config, connection: Connection, cluster: Any) -> None:
        self._config, self._connection, self._cluster = config, connection, cluster
        self._tables: dict[str, Table] = {}
        self._lock = ForkLock()

    def get(self, name: str) -> Table:
        """Return a table that exists; raises as `Cluster.table`."""
        check_table_name(name)
        self._connection.require_open()
        known = self._tables.get(name)
        return self.look_up(name) if known is None else known

    def look_up(self, name: str) -> Table:
        """As `get`, and ask for it, also if it was opened before: another process may have made it anew since."""
        if self._connection.shards is not None:
            return self._remember(self._connection.shards.questions.get_table(name))
        definitions = self.definitions()
        if name not in definitions:
            listed = ", ".join(repr(other) for other in sorted(definitions)) or "none"
            raise UnknownTableError(f"no table {name!r} in cluster {self._config.cluster!r}; it has: {listed}")
        return self._remember(definitions[name])

    def create(self, definition: TableDef, *, policies: PolicyChange, exist_ok: bool, start_over: bool) -> Table:
        """Create a table, or return the one that is there; raises as `Cluster.create_table`."""
        shards = self._connection.require_shards("create_table")
        if start_over:
            if exist_ok:
                raise InvalidInputError(
                    f"table {definition.name!r}: give one of exist_ok=True, to keep it where it exists, and start_over=True, to drop it"
                )
            with suppress(UnknownTableError):  # there is none
                self.drop(definition.name, None)
        table = self._remember(shards.create_table(definition, exist_ok, policies, None))
        asked = definition.optimizer.defaults()
        if asked != table.definition.optimizer.defaults():  # it existed: what the caller asks for holds for its own pushes
            table.set_hyper(**asked)
        return table

    def drop(self, name: str, timeout_s: float | None) -> int:
        """Delete a table with all its rows; raises as `Cluster.drop_table`."""
        shards = self._connection.require_shards("drop_table")
        with self._connection.changes.change():
            n_rows = shards.drop_table(name, timeout_s)
        self.forget(name)
        return n_rows

    def definitions(self) -> dict[str, TableDef]:
        """The tables that exist, from the registry's copy in storage: complete before shard 0 answers a creation."""
        return self._connection.registered().tables

    def forget_dropped(self) -> frozenset[str]:
        """Forget the tables that were dropped or altered, as the registry's copy in storage tells; return the keys of all such."""
        dropped = frozenset(self._connection.registered().dropped)
        with self._lock:
            for name in [name for name, table in self._tables.items() if table.definition.key in dropped]:
                del self._tables[name]
        return dropped

    # --- batches ------------------------------------------------------------------------------------------------------------------

    def pulls(self, ids: Mapping[str, ArrayLike], out: Mapping[str, NDArray[np.float32]] | None = None) -> list[PullRequest]:
        """Check a pull of several tables; arguments and errors as `Cluster.pull_versions`."""
        tables = {name: self.get(name) for name in ids}
        _check_names("out", out, ids)
        return [
            prepare_pull(table.definition, ids[name], (out or {}).get(name), minus_one=table.minus_one_allowed)
            for name, table in tables.items()
        ]

    def pushes(
        self,
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
            table = self.get(name)
            values = table.pushed_hyper((hyper or {}).get(name, {}))
            seen, minus_one = (versions or {}).get(name), table.minus_one_allowed
            rows.append(prepare_push(table.definition, ids, grads, seen, values, table.wire_dtype, minus_one=minus_one))
        return rows

    def prefetched(self, prefetched: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> list[PrefetchedRows]:
        """Check the rows of several tables that a push of a sync job registers; arguments and errors as `Cluster.push`."""
        if prefetched and self._config.servers.mode != "sync":
            raise InvalidInputError(
                "prefetched goes with sync mode only: in async mode others' pushes are applied at any time, so no answer would stay true. "
                "Leave it out, or set parameter_servers.mode to sync."
            )
        pairs = {name: _pair(rows, f"table {name!r}: prefetched is", "(ids, versions)") for name, rows in prefetched.items()}
        return [prepare_prefetched(self.get(name).definition, *pair) for name, pair in pairs.items()]

    # --- inside -------------------------------------------------------------------------------------------------------------------

    def _remember(self, definition: TableDef) -> Table:
        known = self._tables.get(definition.name)
        if known is not None and known.definition.key != definition.key:  # that table has been dropped
            self.forget(definition.name)
        with self._lock:
            return self._tables.setdefault(definition.name, Table(definition, self._connection, self._cluster))

    def forget(self, name: str) -> None:
        """Read the table's definition again when it is opened next."""
        with self._lock:
            self._tables.pop(name, None)


def _pair(given: Any, what_got: str, expected: str) -> tuple[ArrayLike, ArrayLike]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InvalidInputError(f"{what_got} {type(given).__name__}, expected a pair {expected}")
    first, second = given
    return first, second


def _check_names(what: str, given: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> None:
    unknown = sorted(set(given or {}) - set(wanted))
    if unknown:
        raise InvalidInputError(f"{what} names tables that are not in this call: {', '.join(map(repr, unknown))}")
