"""Connect to a cluster: read kvemb.yaml, open storage and shards, hand out tables.

What must not live here: what a verb does (kvemb.table, kvemb.pull, kvemb.push). Thread-safe; forks as kvemb.table says.
"""

import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb import init
from kvemb.cluster_status import ClusterStatus, ShardStatus, read_status
from kvemb.config import Config, load
from kvemb.errors import ClosedError, InvalidInputError, KvembError, UnknownTableError
from kvemb.init import Initializer
from kvemb.net.deadline import Deadline
from kvemb.optim import OptimizerSpec
from kvemb.pull import Pulled, prepare_pull, pull
from kvemb.push import prepare_push
from kvemb.stores.registry import open_store
from kvemb.table import Access, Table
from kvemb.table_def import TableDef, check_table_name
from kvemb.table_registry import META_NAME, newest_registry

if TYPE_CHECKING:
    from kvemb.client.ack import Ack

__all__ = ["Cluster", "ClusterStatus", "ShardStatus", "connect"]


def connect(
    source: str | os.PathLike[str],
    *,
    read_only: bool = False,
    trainer: str | None = None,
    timeout_s: float | None = None,
) -> "Cluster":
    """Open a cluster.

    Args:
        source: path or file:// URL of its kvemb.yaml. Passwords are read from the environment variables it names.
        read_only: only pull; needs no parameter server.
        trainer: this process's name in the job, unique there: a second process of the same name fences the first. Drawn
            from host, process and chance unless given; in a sync job give it, so that a restarted trainer gets its seat again.
        timeout_s: of connecting; storage.timeout_s unless given.

    Raises:
        ConfigError: kvemb.yaml is wrong, or the servers were started with another one.
        ShardUnavailableError, StorageError: naming the shard or node, within the timeout.

    Example: see `kvemb`.
    """
    config = load(source, os.environ)
    if trainer is not None and (read_only or not trainer or len(trainer) > 255):
        raise InvalidInputError(f"trainer is {trainer!r}: give a name of 1 to 255 characters, and none with read_only=True")
    deadline = Deadline.of_caller(config.storage.timeout_s if timeout_s is None else timeout_s)
    store = open_store(config.storage, role="trainer")
    try:
        if read_only:
            store.open(deadline)
            return Cluster(config, Access(store, None, config.storage.timeout_s))
        from kvemb.client.opening import open_shards  # imports gRPC, which a read-only process does not need

        shards = open_shards(config, trainer, store, deadline)
        return Cluster(config, Access(store, shards, config.storage.timeout_s))
    except BaseException:
        store.close()
        raise


class Cluster:
    """An open cluster; made by `connect`. Close it, or use it as a context manager."""

    def __init__(self, config: Config, access: Access) -> None:
        self._config, self._access = config, access
        self._tables: dict[str, Table] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def config(self) -> Config:
        """The kvemb.yaml it was opened with."""
        return self._config

    @property
    def mode(self) -> str:
        """How the parameter servers apply pushes: "async" or "sync"."""
        return self._config.servers.mode

    @property
    def read_only(self) -> bool:
        """Whether it was opened without the parameter servers."""
        return self._access.shards is None

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: OptimizerSpec,
        initializer: Initializer | None = None,
        dtype: str = "float32",
        id_dtype: str = "int64",
        seed: int = 0,
        reduce: str = "sum",
        exist_ok: bool = False,
    ) -> Table:
        """Create a table, or open it where it exists with `exist_ok` and the same identity.

        Run-time values of `optimizer` (lr, …) are no identity. Where the table exists with others, those given here hold
        for this client's pushes, as if by `Table.set_hyper`.

        Args:
            name, dim, optimizer, dtype, id_dtype, seed, reduce: see `kvemb.table_def.TableDef`; they are its identity.
            initializer: the first value of a row; `kvemb.init.uniform()` unless given.
            exist_ok: whether it may exist already.

        Raises:
            InvalidInputError: a value is out of range, or records would be larger than a storage node takes; nothing was
                sent. Or the table exists and `exist_ok` is false.
            TableMismatchError: it exists with another identity; both are shown.
            ShardUnavailableError: shard 0 did not answer; the table may have been created.
        """
        shards = self._access.require_shards("create_table")
        first = init.uniform() if initializer is None else initializer
        for given, kind, at in ((optimizer, OptimizerSpec, "kvemb.optim"), (first, Initializer, "kvemb.init")):
            if not isinstance(given, kind):
                raise InvalidInputError(f"table {name!r}: got {given!r} where one of {at}'s functions is expected to be called")
        definition = TableDef(name, dim, optimizer, first, dtype, id_dtype, seed, reduce)
        self._check_size(definition)
        table = self._remember(shards.create_table(definition, exist_ok, None))
        asked = optimizer.defaults()
        if asked != table.definition.optimizer.defaults():  # it existed: what the caller asks for holds for its own pushes
            table.set_hyper(**asked)
        return table

    def table(self, name: str) -> Table:
        """Open an existing table; asking twice gives the same object.

        Raises:
            UnknownTableError: there is none of that name; those that exist are listed.
        """
        check_table_name(name)
        self._check_open()
        known = self._tables.get(name)  # no lock: a forked child must never meet one that another thread held
        if known is not None:
            return known
        if self._access.shards is not None:
            return self._remember(self._access.shards.get_table(name))
        definitions = self._stored_tables()
        if name not in definitions:
            raise UnknownTableError(f"no table {name!r} in cluster {self._config.cluster!r}; it has: {_listed(definitions)}")
        return self._remember(definitions[name])

    def tables(self) -> list[str]:
        """The names of the tables that exist, sorted."""
        self._check_open()
        return sorted(self._stored_tables())

    def pull(self, ids: Mapping[str, ArrayLike], *, timeout_s: float | None = None) -> dict[str, NDArray[np.float32]]:
        """Pull several tables in one round trip per node; arguments and errors as `Table.pull`.

        Args:
            ids: by table name.

        Returns:
            float32 [*ids.shape, dim] by table name.
        """
        return {name: got.rows for name, got in self._pull(ids, None, timeout_s).items()}

    def pull_versions(
        self,
        ids: Mapping[str, ArrayLike],
        *,
        out: Mapping[str, NDArray[np.float32]] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """The same, with the versions of the rows (uint64 [*ids.shape], 0 = does not exist), into `out` where given."""
        return {name: (got.rows, got.versions) for name, got in self._pull(ids, out, timeout_s).items()}

    def push(
        self,
        tables: Mapping[str, tuple[ArrayLike, ArrayLike]],
        *,
        versions: Mapping[str, ArrayLike] | None = None,
        hyper: Mapping[str, Mapping[str, float]] | None = None,
        timeout_s: float | None = None,
    ) -> "Ack":
        """Push several tables as one push (in sync mode: one step); arguments and errors as `Table.push`.

        Args:
            tables: (ids, grads) by table name.
            versions: what the pull returned, by table name; tables may be left out.
            hyper: run-time values of the optimizer for this push, by table name, over those of `Table.set_hyper`.
        """
        shards = self._access.require_shards("push")
        _check_names("versions", versions, tables)
        _check_names("hyper", hyper, tables)
        rows = []
        for name, batch in tables.items():
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise InvalidInputError(f"table {name!r}: got {type(batch).__name__}, expected a pair (ids, grads)")
            ids, grads = batch
            table = self.table(name)
            values = table.pushed_hyper((hyper or {}).get(name, {}))
            rows.append(prepare_push(table.definition, ids, grads, (versions or {}).get(name), values))
        return shards.push(rows, timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when this process's pushes are applied; see `Table.flush`."""
        self._access.require_shards("flush").flush(timeout_s)

    def status(self, timeout_s: float | None = None) -> ClusterStatus:
        """Ask every shard and node how it is. What does not answer is reported as such, not raised."""
        self._check_open()
        return read_status(self._access, timeout_s)

    def close(self) -> None:
        """Wait until what was pushed is accepted, say goodbye to the shards, drop every connection. Idempotent.

        Raises:
            KvembError: of a push that failed and nobody waited for, or was not accepted in time. It is closed all the same.
        """
        self._close(wait=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close(wait=error is None)
        except KvembError:
            if error is None:  # otherwise the first error matters more
                raise

    def __repr__(self) -> str:
        how = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"<Cluster {self._config.cluster!r}: {self._config.storage.kind}, {how}>"

    def _pull(
        self, ids: Mapping[str, ArrayLike], out: Mapping[str, NDArray[np.float32]] | None, timeout_s: float | None
    ) -> dict[str, Pulled]:
        definitions = {name: self.table(name).definition for name in ids}
        _check_names("out", out, ids)
        requests = [prepare_pull(definitions[name], ids[name], (out or {}).get(name)) for name in ids]
        pulled = pull(self._access.store, requests, self._access.pull_deadline(timeout_s))
        return dict(zip(ids, pulled, strict=True))

    def _close(self, *, wait: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._access.shards is not None:
                self._access.shards.close(wait=wait)
        finally:
            self._access.store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this cluster was closed")

    def _remember(self, definition: TableDef) -> Table:
        with self._lock:
            return self._tables.setdefault(definition.name, Table(definition, self._access, self))

    def _stored_tables(self) -> dict[str, TableDef]:
        """The registry's copy in storage: complete before shard 0 answers a creation."""
        return newest_registry(self._access.store.get_meta(META_NAME, self._access.pull_deadline(None)))[1]

    def _check_size(self, definition: TableDef) -> None:
        limit = self._access.store.capabilities.max_record_bytes
        if limit is not None and definition.record.size_bytes > limit:
            raise InvalidInputError(
                f"table {definition.name!r}: a record of dim {definition.dim} with the slots of {definition.optimizer.kind} takes "
                f"{definition.record.size_bytes} bytes; a {self._config.storage.kind} node takes at most {limit}. Use a smaller dim, "
                "a 16-bit dtype or an optimizer with fewer slots."
            )


def _check_names(what: str, given: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> None:
    unknown = sorted(set(given or {}) - set(wanted))
    if unknown:
        raise InvalidInputError(f"{what} names tables that are not in this call: {_listed(unknown)}")


def _listed(names: Mapping[str, Any] | list[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"
