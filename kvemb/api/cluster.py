"""An open cluster: the object that programs hold.

Thread-safe; forks as kvemb.api.table says.
"""

from __future__ import annotations  # help() shows types as they are written here

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb import init
from kvemb.admit import Admission
from kvemb.api.catalog import Catalog
from kvemb.api.table import Table
from kvemb.capabilities import Facets
from kvemb.config import Config
from kvemb.connection import Connection, TrainerMetrics
from kvemb.errors import ConfigError, InvalidInputError, KvembError
from kvemb.evict import Eviction
from kvemb.init import Initializer
from kvemb.net.deadline import Deadline
from kvemb.operate.cluster_status import ClusterStatus, read_status
from kvemb.optim import FROZEN, OptimizerSpec
from kvemb.process import ForkLock
from kvemb.process.metrics import MetricsCollector, MetricsEndpoint
from kvemb.schema.policies import PolicyChange
from kvemb.schema.table_def import TableDef, check_table_name, frozen_or_trained
from kvemb.stores.store import Store

if TYPE_CHECKING:
    from kvemb.client.ack import Ack
    from kvemb.client.shard_questions import ShardQuestions

_LEAVE_S = 2.0  # how long a program that failed is kept because of pushes that are on their way


class Cluster(Facets[Table]):
    """An open cluster: its tables, and the verbs that concern several of them.

    Made by `connect`. Close it, or use it as a context manager. Thread-safe.

    One class of many methods: it is the one object that programs hold. What capabilities add is in `kvemb.capabilities`.
    """

    def __init__(self, config: Config, connection: Connection, again: Callable[[], Cluster] | None = None) -> None:
        super().__init__(config, connection)
        self._again = again
        self._tables = Catalog(config, connection, self)
        self._lock = ForkLock()
        self._metrics: MetricsEndpoint | None = None

    @property
    def config(self) -> Config:
        """The content of kvemb.yaml when the cluster was opened."""
        return self._config

    @property
    def connection(self) -> Connection:
        """The connection that its tables and capabilities share, for programs that are built on this package."""
        return self._connection

    @property
    def store(self) -> Store:
        """The storage nodes."""
        return self._connection.store

    @property
    def cluster_id(self) -> bytes:
        """The cluster's id as its shards know it: 16 bytes."""
        servers = self._connection.require_shards("cluster_id").servers
        return servers.describe(self._config, Deadline.of_caller(self._config.storage.timeout_s)).cluster_id

    @property
    def questions(self) -> ShardQuestions:
        """Questions to the shards, for commands and tools; none of them changes anything."""
        return self._connection.require_shards("questions").questions

    @property
    def mode(self) -> str:
        """How the parameter servers apply pushes: "async" or "sync"."""
        return self._config.servers.mode

    @property
    def read_only(self) -> bool:
        """Whether it was opened without the parameter servers."""
        return self._connection.shards is None

    @property
    def changes(self) -> int:
        """How often this connection has changed rows: one more when a push, assign, erase or load begins, and one more when it is over.

        A push is over when it is released (`Ack.wait_released`), or has failed. While the number stays the same, rows that were pulled
        change only by other processes, or by a push that is on its way.
        """
        return self._connection.changes.now()

    @property
    def all_stored(self) -> bool:
        """Whether storage has everything that was released to this connection; pulls wait for that, unless told not to."""
        return self._connection.changes.all_stored()

    def create_table(
        self,
        name: str,
        *,
        dim: int | None = None,
        optimizer: OptimizerSpec | None = None,
        initializer: Initializer | None = None,
        dtype: str = "float32",
        frozen: bool = False,
        id_dtype: str = "int64",
        seed: int = 0,
        reduce: str = "sum",
        num_ids: int | None = None,
        expected_rows: int | None = None,
        layout: Literal["fast", "compact"] | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        exist_ok: bool = False,
        start_over: bool = False,
    ) -> Table:
        """Create a table; with `exist_ok`, open one that exists with the same identity.

        The run-time values of `optimizer` (lr, …) do not belong to the identity. If the table exists with other values, those given
        here hold for this client's pushes, as if by `Table.set_hyper`.

        Args:
            name, dim, optimizer, dtype, id_dtype, seed, reduce, num_ids: see `kvemb.schema.table_def.TableDef`; they are its identity. Give
                num_ids where ids are 0 to num_ids - 1: on Redis and Valkey such a table needs less memory and is read faster.
            initializer: the first value of a row; `kvemb.init.uniform()` unless given, `kvemb.init.zeros()` of a frozen table.
            frozen: instead of an optimizer: rows come by `assign` and imports, pushes are refused, and nothing lies beside a row. Tables of
                dtype "bytes:N" are frozen, and need neither dim nor optimizer.
            expected_rows: how many rows a table without num_ids will have, roughly, and never a limit: by it Redis and Valkey keep the rows
                of large tables in more hashes (docs/layouts.md).
            layout: on Redis and Valkey, "fast" (as None) or "compact": less memory, and slower. Needs expected_rows.
            admission: which new ids get a row: one of `kvemb.admit`; any unless given. If the table exists with another, this one holds
                for all clients from now on, as if by `Table.set_policies`.
            eviction: which rows are erased, one of `kvemb.evict`; none unless given. As admission, if the table exists.
            exist_ok: whether it may exist already.
            start_over: drop it first if it exists, with any definition; see `drop_table`. For one process of a job only: a second one
                would drop the table that the first has created. The others open the table once it is there.

        Raises:
            InvalidInputError: a value is out of range, or records would be larger than a storage node takes; nothing was
                sent. Or the table exists and `exist_ok` is false.
            TableDroppedError: a drop of an earlier table of this name is under way, or was broken off.
            TableMismatchError: it exists with another identity; both are shown.
            ShardUnavailableError: shard 0 did not answer; the table may have been created.
        """
        self._connection.require_shards("create_table")
        dim, frozen = frozen_or_trained(name, dim, dtype, optimizer, initializer, frozen=frozen)
        optimizer = FROZEN if optimizer is None else optimizer
        first = (init.zeros() if frozen else init.uniform()) if initializer is None else initializer
        for given, kind, at in ((optimizer, OptimizerSpec, "kvemb.optim"), (first, Initializer, "kvemb.init")):
            if not isinstance(given, kind):
                raise InvalidInputError(f"table {name!r}: got {given!r} where one of {at}'s functions is expected to be called")
        definition = TableDef(name, dim, optimizer, first, dtype, id_dtype, seed, reduce, num_ids=num_ids).laid_out(expected_rows, layout)
        if layout is not None and not self._connection.store.capabilities.pages:
            raise InvalidInputError(
                f"table {name!r}: layout={layout!r} says how Redis and Valkey keep rows; this storage has a key for every row: leave it out"
            )
        policies = PolicyChange(admission, eviction)
        return self._tables.create(definition, policies=policies, exist_ok=exist_ok, start_over=start_over)

    def drop_table(self, name: str, timeout_s: float | None = None) -> int:
        """Delete a table with all its rows, for good, and free its name. Return how many rows were erased.

        Earlier pushes are applied first. From then on trainers that still use the table get TableDroppedError from their next push, assign
        or erase; one that only pulls gets initial rows until it has heard of it, about a second later. A table created later under the name
        takes nothing from them. Where the death of a shard, or a timeout, breaks a drop off, the table has no name, and another call
        completes the drop. Checkpoints keep the rows; see docs/operations.md.

        Args:
            timeout_s: of the whole call; unless given, `away_timeout_s` for every half a million rows of a shard.

        Raises:
            UnknownTableError: there is no such table; TableDroppedError, a kind of it: it has been dropped.
            InvalidInputError: kvemb.yaml declares it; nothing was changed.
            MoveRefusedError: slots are moving between shards; nothing was changed.
            ShardUnavailableError, StorageError: the drop may have begun, and goes on with another call.
        """
        check_table_name(name)
        return self._tables.drop(name, timeout_s)

    def forget_table(self, name: str) -> None:
        """Open a table anew when it is asked for next: another connection has dropped it, and may have created it again."""
        self._tables.forget(name)

    def forget_dropped(self) -> frozenset[str]:
        """As `forget_table`, of all tables that were dropped or altered, as storage tells; return their keys, `TableDef.key`."""
        return self._tables.forget_dropped()

    def table(self, name: str) -> Table:
        """Open an existing table; asking twice gives the same object.

        Raises:
            UnknownTableError: no table has that name; those that exist are listed.
        """
        return self._tables.get(name)

    def tables(self) -> list[str]:
        """Return the names of the tables that exist, sorted."""
        self._connection.require_open()
        return sorted(self._tables.definitions())

    def pull(self, ids: Mapping[str, ArrayLike], *, timeout_s: float | None = None) -> dict[str, NDArray[np.float32]]:
        """Pull several tables in one round trip per node; arguments and errors as `Table.pull`.

        Args:
            ids: by table name.

        Returns:
            float32 [*ids.shape, dim] by table name.
        """
        requests = self._tables.pulls(ids)
        return {name: got.rows for name, got in zip(ids, self._connection.pull(requests, timeout_s, versions=False), strict=True)}

    def pull_versions(
        self,
        ids: Mapping[str, ArrayLike],
        *,
        out: Mapping[str, NDArray[np.float32]] | None = None,
        timeout_s: float | None = None,
        stored: bool = True,
    ) -> dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """Pull several tables with the versions of their rows: uint64 [*ids.shape], 0 where a row does not exist.

        Args:
            ids, timeout_s: as `pull`.
            out: arrays to fill, by table name.
            stored: wait first until storage has the steps that were released to this connection ahead of it (`Ack.wait_released`).
                Otherwise rows may lack the last of them: their versions tell, and `push(prefetched=...)` brings the newer rows.
        """
        requests = self._tables.pulls(ids, out)
        pulled = self._connection.pull(requests, timeout_s, versions=True, stored=stored)
        return {name: (got.rows, got.versions) for name, got in zip(ids, pulled, strict=True)}

    def push(
        self,
        tables: Mapping[str, tuple[ArrayLike, ArrayLike]],
        *,
        versions: Mapping[str, ArrayLike] | None = None,
        hyper: Mapping[str, Mapping[str, float]] | None = None,
        prefetched: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
        timeout_s: float | None = None,
    ) -> Ack:
        """Push several tables as one push (in sync mode: one step); arguments and errors as `Table.push`.

        Args:
            tables: (ids, grads) by table name.
            versions: what the pull returned, by table name; tables may be left out.
            hyper: run-time values of the optimizer for this push, by table name, over those of `Table.set_hyper`.
            prefetched: sync mode only: rows of any tables that this trainer has pulled for steps to come, as (ids, versions) by table name.
                Each id once, versions as pulled. `Ack.changed_rows` then has those of them that this step changed. Rows assigned or erased
                after this step are told by the next one. The step is then released as soon as it is computed and safe in the journals; see
                `Ack.wait_released`.
        """
        self._connection.require_shards("push")
        rows = self._tables.pushes(tables, versions, hyper)
        return self._connection.push(rows, timeout_s, self._tables.prefetched(prefetched or {}))

    def take_place(self, timeout_s: float | None = None) -> None:
        """Take this trainer's place now, and not with its first push.

        From then on no shard takes anything that an older process of this trainer's name still sends. In a sync job what that process had
        sent for a step that was not whole is given up, and no step goes on without this trainer until it leaves.

        Raises:
            BarrierError: trainers of other names have all places of the sync job.
            FencedError: a newer process has this trainer's place.
            ShardUnavailableError: not every shard answered in time (`away_timeout_s` unless given); call it again.
        """
        self._connection.require_shards("take_place").take_place(timeout_s)

    def progress(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        """Return how far each shard has come, in order: (epoch, k), where every batch up to k of this epoch is in storage.

        A pull that begins after this call sees every batch up to k. The versions that pulls return are such pairs, packed as
        epoch << 48 | k. One small call to each shard, all at once.

        Raises:
            ShardUnavailableError: a shard did not answer in time (`away_timeout_s` unless given).
        """
        return [(reply.epoch, reply.k) for reply in self._connection.require_shards("progress").questions.progress(timeout_s)]

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when this process's pushes are applied; see `Table.flush`."""
        self._connection.require_shards("flush").flush(timeout_s)

    def status(self, timeout_s: float | None = None) -> ClusterStatus:
        """Ask every shard and node for its state. One that does not answer is reported as such, not raised."""
        self._connection.require_open()
        timeout_s = self._config.storage.timeout_s if timeout_s is None else timeout_s
        return read_status(self._connection.store, self._connection.shards, timeout_s)

    def metrics_collector(self) -> MetricsCollector:
        """Return this connection's figures as a collector for a registry of prometheus-client: `REGISTRY.register(...)`.

        The times of pulls are counted from the first call on.
        """
        self._connection.require_open()
        return TrainerMetrics.of(self._config.cluster, self._connection)

    def serve_metrics(self, port: int) -> None:
        """Serve this connection's figures, and the process's, to Prometheus on a port, until the cluster is closed.

        Raises:
            ConfigError: the port cannot be had, or they are served already.
        """
        collector = self.metrics_collector()
        with self._lock:
            if self._metrics is not None:
                raise ConfigError("metrics_port: this connection's figures are served already")
            hint = "Give each process of a machine a port of its own, a base and its local rank, say."
            self._metrics = MetricsEndpoint(collector, "0.0.0.0", port, hint)

    def close(self) -> None:
        """Wait until pushes are accepted and released steps are in storage; then tell the shards and close every connection.

        Idempotent. A program that ends without it has its pushes delivered all the same, within 10 s. Otherwise it is told how many were
        not, and ends with exit code 4. `kvemb.process.interrupts` says how, and where it cannot be done.

        Raises:
            KvembError: a push for which no call waited has failed, or one was not accepted in time. The cluster is closed all the same.
        """
        self._close(None)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close(None if error is None else _LEAVE_S)
        except KvembError as failure:
            if error is None:  # otherwise the first error matters more
                raise
            error.add_note(f"What was pushed before this error was not all delivered: {type(failure).__name__}: {failure}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Cluster:
        return self  # a connection is shared, not copied; so are its tables

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a process that multiprocessing spawns open a connection of its own, under a trainer's name of its own."""
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None or self._again is None:
            raise InvalidInputError(
                f"{self!r} is a connection and cannot be pickled, except to start a process with multiprocessing's spawn. Keep what it was "
                "opened with, and call kvemb.connect again. A model's state_dict() has its dense weights, cluster.save(url) saves rows; "
                "kvemb.torch.materialize(model) is a copy with its rows that torch.save takes"
            )
        return self._again, ()

    def __repr__(self) -> str:
        how = "closed" if self._connection.closed else "read-only" if self.read_only else "open"
        return f"<Cluster {self._config.cluster!r}: {self._config.storage.kind}, {how}>"

    def _close(self, timeout_s: float | None) -> None:
        with self._lock:
            if self._connection.closed:
                return
            self._connection.closed = True
        if self._metrics is not None:
            self._metrics.close()
        for opened in list(self._connection.closes_with):
            opened.close()
        connection = self._connection
        try:
            if timeout_s is None:
                connection.wait_stored()
        finally:
            connection.changes.forget_pushes()
            try:
                if connection.shards is not None:
                    connection.shards.close(timeout_s=timeout_s)
            finally:
                connection.store.close()
