"""What capabilities give an open cluster: a facet each. A capability leaves with its folder and its lines here; the kernel names none."""

from __future__ import annotations  # help() shows types as they are written here

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.config import Config
from kvemb.connection import Connection
from kvemb.optim import OptimizerSpec

if TYPE_CHECKING:  # each is imported when it is used first
    from kvemb.alter.table_alteration import AlterProgress
    from kvemb.checkpoint.checkpoint_verbs import Checkpoints
    from kvemb.checkpoint.load import LoadProgress, LoadResult
    from kvemb.checkpoint.save import SaveProgress, SaveResult
    from kvemb.feed.cluster_feed import Feeds
    from kvemb.foreign.table_files import TableFiles
    from kvemb.scaling.slot_moves import NodeMoves, ShardScaling


TableT = TypeVar("TableT")


class Facets(ABC, Generic[TableT]):
    """The facets of `kvemb.Cluster`, whose tables are TableT. They share its connection."""

    def __init__(self, config: Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    @abstractmethod
    def forget_table(self, name: str) -> None:
        """See `kvemb.Cluster`."""

    @abstractmethod
    def table(self, name: str) -> TableT:
        """See `kvemb.Cluster`."""

    # --- checkpoint ---------------------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """The verbs save and load."""
        from kvemb.checkpoint.checkpoint_verbs import Checkpoints

        return Checkpoints(self._config, self._connection)

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
        """Save every table while training goes on: `Checkpoints.save`."""
        return self.checkpoints.save(
            url, base=base, weights_only=weights_only, extra=extra, resume=resume, timeout_s=timeout_s, progress=progress
        )

    def load(
        self, url: str, *, tables: Collection[str] | None = None, stall_timeout_s: float = 600.0, progress: LoadProgress | None = None
    ) -> LoadResult:
        """Give the cluster the rows of a checkpoint: `Checkpoints.load`."""
        return self.checkpoints.load(url, tables=tables, stall_timeout_s=stall_timeout_s, progress=progress)

    # --- alter --------------------------------------------------------------------------------------------------------------------

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
    ) -> TableT:
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
        from kvemb.alter.altered_table import TableChanges
        from kvemb.alter.table_alteration import alter_table

        changes = TableChanges(dim, optimizer, dtype, layout, expected_rows, new_columns)
        alter_table(self._connection, name, changes, timeout_s, progress)
        self.forget_table(name)
        return self.table(name)

    def abort_alter_table(self, name: str, timeout_s: float | None = None) -> int:
        """Give up the alteration of a table, by whichever process it was begun; return how many copied rows were erased.

        The table is as it was then, and its pushes go on. Where it has its new definition already, the rows of the old one are erased.

        Raises:
            UnknownTableError: there is no such table.
            ShardUnavailableError, StorageError: it may be given up; call it again.
        """
        from kvemb.alter.table_alteration import abort_alter_table

        return abort_alter_table(self._connection, name, timeout_s)

    # --- scaling ------------------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> NodeMoves:
        """The storage nodes that come and go while training goes on (memcached, Redis, Valkey)."""
        from kvemb.scaling.slot_moves import NodeMoves

        return NodeMoves(self._connection.require_shards("nodes").servers)

    @property
    def shards(self) -> ShardScaling:
        """The parameter-server shards that come and go while training goes on."""
        from kvemb.scaling.slot_moves import ShardScaling

        return ShardScaling(self._connection.require_shards("shards").servers)

    # --- feed ---------------------------------------------------------------------------------------------------------------------

    @property
    def feed(self) -> Feeds:
        """What the shards change, event by event."""
        from kvemb.feed.cluster_feed import Feeds

        return Feeds(self._config, self._connection)

    # --- sample -------------------------------------------------------------------------------------------------------------------

    def sample(self, name: str, n: int, timeout_s: float | None = None) -> tuple[NDArray[np.uint64], NDArray[Any]]:
        """Draw n rows of a table at random; fewer where it has fewer.

        Args:
            name: of the table.
            n: 1 to 262,144.
            timeout_s: of each question to shards and storage.

        Returns:
            The 64 bits of their ids, uint64 [m], in no order (`ids.view("i8")` where they are int64), and the rows, [m, dim] as
            `Table.pull` gives them.

        Raises:
            InvalidInputError, UnknownTableError, ShardUnavailableError, StorageError.
        """
        from kvemb.sample.row_sample import sample

        return sample(self._connection, name, n, timeout_s)

    # --- foreign ------------------------------------------------------------------------------------------------------------------

    @property
    def files(self) -> TableFiles:
        """Rows from files of other programs, and into them."""
        from kvemb.foreign.table_files import TableFiles

        return TableFiles(self._connection)
