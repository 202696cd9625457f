"""An open cluster: the object that programs hold.

Thread-safe; forks as kvemb.api.table says.
"""

from __future__ import annotations  # help() shows types as they are written here

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb import init
from kvemb.admit import Admission
from kvemb.api.open_tables import OpenTables
from kvemb.api.shared_connection import SharedConnection, TrainerMetrics
from kvemb.api.table import Table
from kvemb.arrays.ids import Unique
from kvemb.config import Config
from kvemb.datapath.pull import PullRequest
from kvemb.errors import ConfigError, InvalidInputError, KvembError
from kvemb.evict import Eviction
from kvemb.init import Initializer
from kvemb.net.deadline import Deadline
from kvemb.operate.cluster_status import ClusterStatus, read_status
from kvemb.optim import FROZEN, OptimizerSpec
from kvemb.process import ForkLock
from kvemb.process.metrics import MetricsCollector, MetricsEndpoint
from kvemb.schema.altered_table import TableChanges
from kvemb.schema.policies import PolicyChange
from kvemb.schema.table_def import TableDef, check_table_name, frozen_or_trained
from kvemb.stores.store import Store

if TYPE_CHECKING:
    from kvemb.api.cluster_feed import ClusterFeed
    from kvemb.api.row_export import ExportProgress, ExportResult
    from kvemb.api.row_import import ImportProgress, ImportResult, RowArrays
    from kvemb.api.table_alteration import AlterProgress
    from kvemb.checkpoint.load import LoadProgress, LoadResult
    from kvemb.checkpoint.save import SaveProgress, SaveResult
    from kvemb.client.ack import Ack
    from kvemb.client.shard_questions import ShardQuestions
    from kvemb.client.slot_moves import NodeMoves, ShardScaling

_LEAVE_S = 2.0  # how long a program that failed is kept because of pushes that are on their way


class Cluster:
    """An open cluster: its tables, and the verbs that concern several of them.

    Made by `connect`. Close it, or use it as a context manager. Thread-safe.

    One class of many methods, because it is the one object that programs hold: each passes its arguments to the package that does the work.
    """

    def __init__(self, config: Config, shared: SharedConnection, again: Callable[[], Cluster] | None = None) -> None:
        self._config, self._shared, self._again = config, shared, again
        self._tables = OpenTables(config, shared, self)
        self._lock = ForkLock()
        self._metrics: MetricsEndpoint | None = None
        self._feeds: WeakSet[ClusterFeed] = WeakSet()

    @property
    def config(self) -> Config:
        """The content of kvemb.yaml when the cluster was opened."""
        return self._config

    @property
    def store(self) -> Store:
        """The storage nodes."""
        return self._shared.store

    @property
    def cluster_id(self) -> bytes:
        """The cluster's id as its shards know it: 16 bytes."""
        servers = self._shared.require_shards("cluster_id").servers
        return servers.describe(self._config, Deadline.of_caller(self._config.storage.timeout_s)).cluster_id

    @property
    def questions(self) -> ShardQuestions:
        """Questions to the shards, for commands and tools; none of them changes anything."""
        return self._shared.require_shards("questions").questions

    @property
    def nodes(self) -> NodeMoves:
        """The storage nodes that come and go while training goes on (memcached, Redis, Valkey)."""
        from kvemb.client.slot_moves import NodeMoves

        return NodeMoves(self._shared.require_shards("nodes").servers)

    @property
    def shards(self) -> ShardScaling:
        """The parameter-server shards that come and go while training goes on."""
        from kvemb.client.slot_moves import ShardScaling

        return ShardScaling(self._shared.require_shards("shards").servers)

    @property
    def mode(self) -> str:
        """How the parameter servers apply pushes: "async" or "sync"."""
        return self._config.servers.mode

    @property
    def read_only(self) -> bool:
        """Whether it was opened without the parameter servers."""
        return self._shared.shards is None

    @property
    def changes(self) -> int:
        """How often this connection has changed rows: one more when a push, assign, erase or load begins, and one more when it is over.

        A push is over when it is released (`Ack.wait_released`), or has failed. While the number stays the same, rows that were pulled
        change only by other processes, or by a push that is on its way.
        """
        return self._shared.changes.now()

    @property
    def all_stored(self) -> bool:
        """Whether storage has everything that was released to this connection; pulls wait for that, unless told not to."""
        return self._shared.changes.all_stored()

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
        self._shared.require_shards("create_table")
        dim, frozen = frozen_or_trained(name, dim, dtype, optimizer, initializer, frozen=frozen)
        optimizer = FROZEN if optimizer is None else optimizer
        first = (init.zeros() if frozen else init.uniform()) if initializer is None else initializer
        for given, kind, at in ((optimizer, OptimizerSpec, "kvemb.optim"), (first, Initializer, "kvemb.init")):
            if not isinstance(given, kind):
                raise InvalidInputError(f"table {name!r}: got {given!r} where one of {at}'s functions is expected to be called")
        definition = TableDef(name, dim, optimizer, first, dtype, id_dtype, seed, reduce, num_ids=num_ids).laid_out(expected_rows, layout)
        if layout is not None and not self._shared.store.capabilities.pages:
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

    def alter_table(
        self,
        name: str,
        *,
        dim: int | None = None,
        optimizer: OptimizerSpec | None = None,
        dtype: str | None = None,
        layout: Literal["fast", "compact"] | None = None,
        expected_rows: int | None = None,
        new_columns: Literal["initializer", "zeros"] = "initializer",
        timeout_s: float | None = None,
        progress: AlterProgress | None = None,
    ) -> Table:
        """Give a table that has rows another definition. Return the table as it is then; see docs/id-lifecycle.md.

        Every row is copied, for which storage needs room. Columns that both definitions have keep their bits, and so do fields of the
        optimizer's state of the same name; other fields begin anew. Pushes to the table wait meanwhile, as do steps of a sync job; pulls go
        on. Then processes that have opened the table as it was get TableAlteredError from their next push, and open it again.

        A process that dies leaves the table as it was, or as it is to be. Another call with the same arguments completes the work;
        `abort_alter_table` gives it up as long as the table is as it was, and this method does so itself when it fails.

        Args:
            dim, optimizer, dtype, layout: what is to be another; None: as it is. A smaller dim takes the last columns away.
            expected_rows: as at `create_table`, to have another number of buckets; needed with `layout`.
            new_columns: the values of columns beyond the old dim, in rows that exist: as the table's initializer draws them, or zeros.
            timeout_s: of each question to the shards, and of each block of rows; `away_timeout_s` unless given.
            progress: called now and then with (name of the phase, rows done, rows in all).

        Raises:
            InvalidInputError: a value is out of range; there is nothing sensible that rows could become (opaque bytes of another size,
                ftrl without its state); or kvemb.yaml declares the table. Nothing was changed.
            UnknownTableError: there is no such table.
            MoveRefusedError: slots are moving between shards; nothing was changed.
            LostRowError: storage lacks a row; the table is as it was.
            TableAlteredError: another process altered the table, or began to, meanwhile.
            ParameterServerError, StorageError: the table is as it was, or, where the end was not heard of, as it is to be.

        Example:
            >>> import kvemb
            >>> with kvemb.local() as url, kvemb.connect(url) as cluster:
            ...     table = cluster.create_table("user", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            ...     table.assign([7], [[1.0, 2.0]])
            ...     wider = cluster.alter_table("user", dim=3, optimizer=kvemb.optim.adagrad(lr=0.1))
            ...     wider.pull([7]).tolist(), wider.definition.optimizer.kind
            ([[1.0, 2.0, 0.0]], 'adagrad')
        """
        check_table_name(name)
        changes = TableChanges(dim, optimizer, dtype, layout, expected_rows, new_columns)
        return self._tables.alter(name, changes, timeout_s, progress)

    def abort_alter_table(self, name: str, timeout_s: float | None = None) -> int:
        """Give up the alteration of a table, by whichever process it was begun; return how many copied rows were erased.

        The table is as it was then, and its pushes go on. Where it has its new definition already, the rows of the old one are erased.

        Raises:
            UnknownTableError: there is no such table.
            ShardUnavailableError, StorageError: it may be given up; call it again.
        """
        check_table_name(name)
        return self._tables.abort_alter(name, timeout_s)

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
        self._shared.require_open()
        return sorted(self._tables.definitions())

    def pull(self, ids: Mapping[str, ArrayLike], *, timeout_s: float | None = None) -> dict[str, NDArray[np.float32]]:
        """Pull several tables in one round trip per node; arguments and errors as `Table.pull`.

        Args:
            ids: by table name.

        Returns:
            float32 [*ids.shape, dim] by table name.
        """
        requests = self._tables.pulls(ids)
        return {name: got.rows for name, got in zip(ids, self._shared.pull(requests, timeout_s, versions=False), strict=True)}

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
        pulled = self._shared.pull(requests, timeout_s, versions=True, stored=stored)
        return {name: (got.rows, got.versions) for name, got in zip(ids, pulled, strict=True)}

    def pull_known(
        self, wanted: Sequence[tuple[TableDef, NDArray[np.uint64]]], timeout_s: float | None = None
    ) -> list[tuple[NDArray[Any], NDArray[np.uint64]]]:
        """Pull rows by ids that come from the cluster itself, or were checked before: none is padding, and -1 is an id like any other.

        Args:
            wanted: of each table its definition, and the 64 bits of n ids, uint64 [n], each once.
            timeout_s: as of `pull`.

        Returns:
            Of each table its rows, [n, dim] as `pull` gives them, and their versions, uint64 [n], 0 where a row does not exist.
        """
        requests = [PullRequest(definition, Unique(ids, None), ids.shape, None) for definition, ids in wanted]
        return [(got.rows, got.versions) for got in self._shared.pull(requests, timeout_s, versions=True)]

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
                behind this step are told by the next one. The step is then released as soon as it is computed and safe in the journals; see
                `Ack.wait_released`.
        """
        self._shared.require_shards("push")
        rows = self._tables.pushes(tables, versions, hyper)
        return self._shared.push(rows, timeout_s, self._tables.prefetched(prefetched or {}))

    def take_place(self, timeout_s: float | None = None) -> None:
        """Take this trainer's place now, and not with its first push.

        From then on no shard takes anything that an older process of this trainer's name still sends. In a sync job what that process had
        sent for a step that was not whole is given up, and no step goes on without this trainer until it leaves.

        Raises:
            BarrierError: trainers of other names have all places of the sync job.
            FencedError: a newer process has this trainer's place.
            ShardUnavailableError: not every shard answered in time (`away_timeout_s` unless given); call it again.
        """
        self._shared.require_shards("take_place").take_place(timeout_s)

    def progress(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        """Return how far each shard has come, in order: (epoch, k), where every batch up to k of this epoch is in storage.

        A pull that begins after this call sees every batch up to k. The versions that pulls return are such pairs, packed as
        epoch << 48 | k. One small call to each shard, all at once.

        Raises:
            ShardUnavailableError: a shard did not answer in time (`away_timeout_s` unless given).
        """
        return [(reply.epoch, reply.k) for reply in self._shared.require_shards("progress").questions.progress(timeout_s)]

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when this process's pushes are applied; see `Table.flush`."""
        self._shared.require_shards("flush").flush(timeout_s)

    def status(self, timeout_s: float | None = None) -> ClusterStatus:
        """Ask every shard and node for its state. One that does not answer is reported as such, not raised."""
        self._shared.require_open()
        timeout_s = self._config.storage.timeout_s if timeout_s is None else timeout_s
        return read_status(self._shared.store, self._shared.shards, timeout_s)

    def metrics_collector(self) -> MetricsCollector:
        """Return this connection's figures as a collector for a registry of prometheus-client: `REGISTRY.register(...)`.

        The times of pulls are counted from the first call on.
        """
        self._shared.require_open()
        return TrainerMetrics.of(self._config.cluster, self._shared)

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

    def save(
        self,
        url: str,
        *,
        base: str | None = None,
        weights_only: bool = False,
        extra: Mapping[str, Any] | None = None,
        resume: bool = False,
        timeout_s: float = 600.0,
        progress: SaveProgress | None = None,
    ) -> SaveResult:
        """Save every table while training goes on; see docs/checkpoints.md.

        Each shard is cut between two batches: everything acknowledged before this call is in the checkpoint.

        Args:
            url: of the new checkpoint: a path, or any fsspec URL that all shards reach.
            base: URL of a checkpoint beside it: only rows that changed since are saved.
            weights_only: leave the optimizer's state out: for serving.
            extra: JSON values of yours, kept in the manifest.
            resume: go on with a save to this URL that was broken off, with the options it was begun with.
            timeout_s: of the cut; saving the rows takes as long as it takes.
            progress: called now and then with (rows done, rows in all, bytes written).

        Raises:
            CheckpointError: a checkpoint exists there already, or storage or a shard failed; the files written so far are no checkpoint.
            InvalidInputError: base or extra cannot be used; nothing was written.
        """
        from kvemb.checkpoint.save import Saving, save

        servers = self._shared.require_shards("save").servers
        return save(
            Saving(servers, self._config.cluster, self.cluster_id.hex()),
            url,
            base=base,
            weights_only=weights_only,
            extra=extra,
            resume=resume,
            timeout_s=timeout_s,
            progress=progress,
        )

    def load(
        self,
        url: str,
        *,
        tables: Collection[str] | None = None,
        stall_timeout_s: float = 600.0,
        progress: LoadProgress | None = None,
    ) -> LoadResult:
        """Give the cluster the rows of a checkpoint, all of them and no others; see docs/checkpoints.md.

        The checkpoint is verified first. The shards stop for the time of the load; trainers' pushes wait and are retried.

        Args:
            url: of the checkpoint; of a cluster with any number of shards, on any storage.
            tables: names of those to be loaded: these get the rows of the checkpoint and no others, all other tables stay as they are.
                None: all; tables that the checkpoint does not have are emptied.
            stall_timeout_s: give up watching when no shard has come any further for so long.
            progress: called now and then with (name of the phase, amount done, amount in all).

        Raises:
            CheckpointError: it is missing or damaged, lacks a table that was asked for, or a load of other tables is not carried out yet:
                the cluster is as it was. Or a shard failed on the way.
            TableMismatchError: a table exists with another identity; nothing was changed.
        """
        from kvemb.checkpoint.load import Loading, load

        servers = self._shared.require_shards("load").servers
        loading = Loading(servers, self._shared.store, self._tables.definitions(), self._config.storage.timeout_s)
        with self._shared.changes.change():
            return load(loading, url, tables=tables, stall_timeout_s=stall_timeout_s, progress=progress)

    def import_rows(
        self,
        table: str,
        source: str | os.PathLike[str] | RowArrays | Iterable[RowArrays],
        *,
        ids: str | os.PathLike[str] | None = None,
        weights: str | os.PathLike[str] | None = None,
        state: str | os.PathLike[str] | Mapping[str, str] | None = None,
        format: str = "",
        resume: bool = False,
        timeout_s: float | None = None,
        progress: ImportProgress | None = None,
    ) -> ImportResult:
        """Set rows of a table from a file of another program, or from arrays; see docs/id-lifecycle.md.

        A file is verified first, all of it: a file that is damaged, or does not fit, changes nothing. Then rows are assigned, block by
        block. Rows of other ids stay as they are.

        Args:
            table: its name; it exists.
            source: a path or any fsspec URL. Or (ids, weights) or (ids, weights, state) as arrays, or any iterable of such blocks: of
                an id that comes again the later row holds, and no block is looked at before its turn; a list of blocks is verified first,
                as a file is.
            ids: which array of the file holds the ids, integers or text, which is hashed as by `kvemb.hash_ids`. Unless given, it is
                that named "id"; where there is none, row i is id i, unless a Parquet file has other columns that could be ids. Of npy all
                names are those of further files.
            weights: which array holds the rows; unless given, that named "weights", or the only one with two axes.
            state: which arrays hold the optimizer's state: one for all of it, or by the name of the field (`exp_avg`). Without, the
                rows' state begins anew.
            format: of the file, where its ending does not tell.
            resume: leave out the first blocks as far as the table has their weights already.
            timeout_s: of each block; as of `Table.assign`.
            progress: called now and then with (name of the phase, rows done, rows in all).

        Raises:
            ForeignRowsError: the file is missing, damaged, or does not fit the table; nothing was changed.
            InvalidInputError: names, or the format, are wrong; nothing was changed.
            ConfigError: a library that reads the format is not installed.
            ParameterServerError: blocks before this one are set, of this one some rows may be. Import again, or with resume.
        """
        from kvemb.api.row_import import import_rows
        from kvemb.foreign.foreign_rows import ArrayNames

        names = ArrayNames(
            None if ids is None else os.fspath(ids),
            None if weights is None else os.fspath(weights),
            state if state is None or isinstance(state, Mapping) else os.fspath(state),
        )
        return import_rows(self.table(table), source, names, file_format=format, resume=resume, timeout_s=timeout_s, progress=progress)

    def export_rows(
        self,
        table: str,
        url: str | os.PathLike[str],
        *,
        format: str = "",
        ids: str | os.PathLike[str] | None = None,
        dtype: str = "",
        progress: ExportProgress | None = None,
    ) -> ExportResult:
        """Write the rows of a table into a file that other programs read, and `import_rows` too; see docs/id-lifecycle.md.

        The file has the ids as "id", ascending, and the weights as "weights". Training may go on meanwhile, so this is no snapshot; a row
        that is erased meanwhile is written as a pull gives it. The optimizer's state is not written: `save` does that.

        Args:
            table: its name.
            url: a path or any fsspec URL; an older file is replaced. It ends in .npy, .safetensors, .parquet or .pt, or is, with
                format="tensorflow", a checkpoint's prefix.
            format: of the file, where its ending does not tell.
            ids: of npy, a further file for the ids. Without, a table with num_ids is written whole: row i is id i, rows that do not exist
                are as a pull gives them.
            dtype: of the weights in the file; unless given, the table's. "float16", or "int8" with a float32 "scale" for each row: the page
                says by how much a value is off, and which formats take it.
            progress: called now and then with (name of the phase, rows done, rows in all).

        Raises:
            InvalidInputError: the format is not known, or does not take the table's ids or the dtype; nothing was written.
            ForeignRowsError: the file cannot be written, or a weight is beyond float16; an older file is untouched.
            ConfigError: a library that writes the format is not installed.
        """
        from kvemb.api.row_export import export_rows

        self._shared.require_shards("export_rows")
        to_ids = None if ids is None else os.fspath(ids)
        return export_rows(self.table(table), os.fspath(url), file_format=format, ids=to_ids, dtype=dtype, progress=progress)

    def feed(
        self,
        tables: Iterable[str] | None = None,
        *,
        from_: str | Mapping[int, Sequence[int]] = "now",
        weights: bool = False,
        max_mb: float = 16.0,
    ) -> ClusterFeed:
        """Return what the shards change from now on, or from an earlier position, event by event; see docs/feed.md.

        Every acknowledged batch is told once it is in storage, in order, without gaps. After a restart of a shard or of the subscriber,
        what is told again has the versions it had.

        Args:
            tables: names of those that are wanted, also of tables that are created later; None for all.
            from_: "now": what is pushed behind this call. "start": every row that there is, then what changes. Or the `position` of an
                earlier feed, or (epoch, k) by shard: what changed behind that.
            weights: read the rows of each event from storage.
            max_mb: memory, per shard, for events that are not taken yet; a shard whose subscriber takes nothing for long ends its stream,
                which is opened again by itself.

        Raises:
            InvalidInputError: from_, or max_mb, is none of these.
            ShardUnavailableError: a shard did not answer.

        Example:
            >>> import kvemb
            >>> with kvemb.local() as url, kvemb.connect(url) as cluster:
            ...     table = cluster.create_table("user", dim=2, optimizer=kvemb.optim.sgd(lr=1.0))
            ...     with cluster.feed() as feed:
            ...         ack = table.push([7, 3], np.ones((2, 2)))
            ...         event = feed.take(timeout_s=30)
            >>> event.kind, event.table, event.ids.tolist()
            ('apply', 'user', [3, 7])
        """
        from kvemb.api.cluster_feed import open_feed

        servers = self._shared.require_shards("feed").servers
        if isinstance(tables, str):
            raise InvalidInputError(f"feed: tables is the text {tables!r}; give a list of names: [{tables!r}], or None for all tables")
        names = None if tables is None else tuple(map(check_table_name, tables))
        feed = open_feed(
            servers, self._tables.look_up, names, from_, weights=weights, max_mb=max_mb, away_timeout_s=self._config.servers.away_timeout_s
        )
        self._feeds.add(feed)
        return feed

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
        how = "closed" if self._shared.closed else "read-only" if self.read_only else "open"
        return f"<Cluster {self._config.cluster!r}: {self._config.storage.kind}, {how}>"

    def _close(self, timeout_s: float | None) -> None:
        with self._lock:
            if self._shared.closed:
                return
            self._shared.closed = True
        if self._metrics is not None:
            self._metrics.close()
        for feed in list(self._feeds):
            feed.close()
        shared = self._shared
        try:
            if timeout_s is None:
                shared.wait_stored()
        finally:
            shared.changes.forget_pushes()
            try:
                if shared.shards is not None:
                    shared.shards.close(timeout_s=timeout_s)
            finally:
                shared.store.close()
