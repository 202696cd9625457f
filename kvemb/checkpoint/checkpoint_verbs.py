"""The checkpoints of an open cluster, as its users see them: `cluster.checkpoints`. See docs/checkpoints.md."""

from __future__ import annotations  # help() shows types as they are written here

from collections.abc import Collection, Mapping
from typing import Any

from kvemb.checkpoint.load import Loading, LoadProgress, LoadResult, load
from kvemb.checkpoint.save import SaveProgress, SaveResult, Saving, save
from kvemb.config import Config
from kvemb.connection import Connection
from kvemb.net.deadline import Deadline


class Checkpoints:
    """Saves and loads all tables of a cluster. Thread-safe; of two loads at once one is refused."""

    def __init__(self, config: Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

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
        servers = self._connection.require_shards("save").servers
        cluster_id = servers.describe(self._config, Deadline.of_caller(self._config.storage.timeout_s)).cluster_id
        return save(
            Saving(servers, self._config.cluster, cluster_id.hex()),
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
        servers = self._connection.require_shards("load").servers
        loading = Loading(servers, self._connection.store, self._connection.registered().tables, self._config.storage.timeout_s)
        with self._connection.changes.change():
            return load(loading, url, tables=tables, stall_timeout_s=stall_timeout_s, progress=progress)
