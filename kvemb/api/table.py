"""A table as its users see it: pull, push, flush, and the rarer verbs. Thin: the work is in kvemb.datapath and kvemb.client.

Thread-safe. After a fork the child may go on pulling; verbs that go through the parameter servers raise ClosedError there.
"""

from __future__ import annotations  # help() shows types as they are written here

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.admit import Admission
from kvemb.arrays.ids import to_caller
from kvemb.arrays.rounding import LARGEST
from kvemb.connection import Connection
from kvemb.datapath.pull import prepare_pull
from kvemb.datapath.push import prepare_assign, prepare_erase, prepare_push
from kvemb.errors import InvalidInputError
from kvemb.evict import Eviction
from kvemb.schema.policies import Policies, PolicyChange
from kvemb.schema.table_def import TableDef

if TYPE_CHECKING:  # gRPC is imported when a cluster with parameter servers is opened
    from kvemb.client.ack import Ack


_EXPORTED_AT_ONCE = 1 << 17  # ids: what storage answers well within the timeout, also where it is busy


class Table:
    """One embedding table of a cluster: its rows are pulled, and gradients pushed to it.

    Get one from `Cluster.table` or `Cluster.create_table`; `help(kvemb)` has a tour. Thread-safe. In the examples here `users` is a new
    table of dim 2 with `kvemb.optim.sgd(lr=1.0)`, whose rows begin at zero.

    One class of many methods: it is the one object that programs hold of a table. Each passes its arguments to the package that does the
    work.
    """

    def __init__(self, definition: TableDef, connection: Connection, cluster: Any) -> None:
        self._definition, self._connection, self._cluster = definition, connection, cluster
        self._hyper: Mapping[str, float] = {}  # replaced as a whole, never changed
        self._wire_dtype = "float32"
        self._minus_one = False

    @property
    def name(self) -> str:
        """The table's name, as it was given to `create_table`."""
        return self._definition.name

    @property
    def dim(self) -> int:
        """The number of weights in a row."""
        return self._definition.dim

    @property
    def definition(self) -> TableDef:
        """The table's definition: dim, dtype, initializer, optimizer and all else that was fixed when it was created."""
        return self._definition

    @property
    def cluster(self) -> Any:
        """The `Cluster` that the table was opened from."""
        return self._cluster

    @overload
    def pull(
        self,
        ids: ArrayLike,
        *,
        out: NDArray[np.float32] | None = None,
        return_versions: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]: ...

    @overload
    def pull(
        self,
        ids: ArrayLike,
        *,
        out: NDArray[np.float32] | None = None,
        return_versions: Literal[True],
        timeout_s: float | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.uint64]]: ...

    def pull(
        self,
        ids: ArrayLike,
        *,
        out: NDArray[Any] | None = None,
        return_versions: bool = False,
        timeout_s: float | None = None,
    ) -> NDArray[Any] | tuple[NDArray[Any], NDArray[np.uint64]]:
        """Read rows straight from storage; write nothing.

        A row that does not exist yet has the value that its first push will begin with.

        Args:
            ids: any integer array, any shape, duplicates fine, empty fine.
            out: array of the result's dtype, [*ids.shape, dim], to fill instead of a new one.
            return_versions: also return the version of each row, 0 where it does not exist. Give them to `push`, and its ack
                tells how stale the gradients were.
            timeout_s: of the whole call; the cluster's storage.timeout_s unless given. A pull of more than about 128 MB is read in
                pieces of 32 MB, and each piece has that time.

        Returns:
            float32 [*ids.shape, dim], of a table of opaque bytes uint8; with `return_versions` also uint64 [*ids.shape].

        Raises:
            InvalidInputError: see `kvemb.arrays.ids.normalize` and `out`; nothing was sent.
            StorageError: a node is down, or was restarted empty, say. The message names it, and comes within the timeout. `out` is
                untouched.
            ShardUnavailableError: a step was released to this connection ahead of storage, and storage does not get it.

        Example:
            >>> users.pull([[7, 8], [7, 9]]).shape
            (2, 2, 2)
        """
        request = prepare_pull(self._definition, ids, out, minus_one=self._minus_one)
        (pulled,) = self._connection.pull([request], timeout_s, versions=return_versions)
        return (pulled.rows, pulled.versions) if return_versions else pulled.rows

    def push(self, ids: ArrayLike, grads: ArrayLike, *, versions: ArrayLike | None = None, timeout_s: float | None = None) -> Ack:
        """Send gradients to the parameter servers. Return when they are on their way; the ack tells when they are applied.

        Gradients of duplicate ids are summed. The arguments may be changed as soon as this returns. In sync mode each
        call is one step, so several tables that are trained together must be pushed by one `Cluster.push`.

        Args:
            ids: any integer array, empty fine.
            grads: floats [*ids.shape, dim], finite.
            versions: as the pull of these ids returned them; for `Ack.staleness`.
            timeout_s: of the first call's hello, and of the wait for room when too much is on its way; unless given,
                as long as a shard may be away (`parameter_servers.away_timeout_s`).

        Raises:
            InvalidInputError: wrong shapes or dtypes, NaN or infinity (the first such id is named); nothing was sent.
            FrozenTableError: the table takes no gradients; nothing was sent.
            KvembError: an earlier push failed while no call waited for it; nothing of this push was sent.
            ShardUnavailableError: a shard cannot be reached or has no room within the timeout; nothing was sent.
            ClosedError: this process is a fork of the one that connected.

        Example:
            >>> ack = users.push([7, 8, 7], np.ones((3, 2)))
            >>> ack.wait_applied(timeout_s=30)
            >>> users.pull([7, 8]).tolist()
            [[-2.0, -2.0], [-1.0, -1.0]]
        """
        connection = self._connection
        connection.require_shards("push")
        rows = prepare_push(self._definition, ids, grads, versions, self._hyper, self._wire_dtype, minus_one=self._minus_one)
        return connection.push([rows], timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when this process's pushes to all tables are applied, that is, visible to every client's pulls.

        Pushes of other trainers that the shards had accepted before the call are applied then, too. In a sync job these are the complete
        steps: others' pushes for a step that lacks this trainer's are not waited for.

        Raises:
            ShardUnavailableError, DeadlineExceededError: not within the time (`away_timeout_s` unless given); call it again.
            KvembError: a push failed that no call had waited for.

        Example:
            >>> ack = users.push([7], [[1.0, 0.0]])
            >>> users.flush()
            >>> users.pull([7]).tolist()
            [[-1.0, 0.0]]
        """
        self._connection.require_shards("flush").flush(timeout_s)

    @property
    def hyper(self) -> dict[str, float]:
        """The optimizer's run-time values that this client's next push carries."""
        return self._definition.optimizer.check_hyper(self._hyper)

    def set_hyper(self, **values: float) -> None:
        """Change run-time values (lr, weight_decay, …) for every later push of this client: `set_hyper(lr=1e-4)`.

        Raises:
            InvalidInputError: the optimizer takes no such value; the known ones are listed. Nothing changed.

        Example:
            >>> users.set_hyper(lr=0.5)
            >>> users.push([7], [[1.0, 2.0]]).wait_applied(timeout_s=30)
            >>> users.pull([7]).tolist()
            [[-0.5, -1.0]]
        """
        self._hyper = self.pushed_hyper(values)

    def policies(self, timeout_s: float | None = None) -> Policies:
        """Return which new ids get a row of the table (`admission`), and which rows are erased (`eviction`), for all clients.

        Raises:
            ShardUnavailableError: shard 0 did not answer in time (`away_timeout_s` unless given).
        """
        return self._connection.require_shards("policies").questions.policies(self.name, timeout_s)

    def set_policies(self, *, admission: Admission | None = None, eviction: Eviction | None = None, timeout_s: float | None = None) -> None:
        """Change policies of the table, for all clients, from now on: `set_policies(admission=kvemb.admit.after(3))`.

        Every later push of this client is decided by them. Others' pushes on their way may be decided by those before. In a sync job all
        shards change at the same step. The values are kept with the table, in storage.

        Args:
            admission: one of `kvemb.admit`; None: as it is.
            eviction: one of `kvemb.evict`; None: as it is.
            timeout_s: of the whole call; `away_timeout_s` unless given.

        Raises:
            InvalidInputError: no such policy; nothing was sent.
            AccessDeniedError: the caller's certificate has no role that may erase rows; nothing was changed.
            ShardUnavailableError: they may have been changed; call it again.

        Example:
            >>> users.set_policies(admission=kvemb.admit.after(3))
            >>> users.policies().admission.kind
            'after'
        """
        change = PolicyChange(admission, eviction)
        self._connection.require_shards("set_policies").set_policies(self.name, change, timeout_s)

    @property
    def wire_dtype(self) -> str:
        """How this client's next gradients travel: "float32" unless `set_wire_dtype` said otherwise."""
        return self._wire_dtype

    def set_wire_dtype(self, name: str) -> None:
        """Choose how gradients travel in every later push of this client: "float32", or half the bytes for less precision.

        Gradients of duplicate ids are summed in float32 first. Then each sum is rounded to the nearest value, ties to even,
        always to the same bits. The shard computes in float32.

        "bfloat16" keeps float32's range and 8 bits of precision: an error of at most 2**-9 of each gradient. "float16" keeps
        11 bits between 6e-5 and 65504. A larger gradient is refused, a smaller one loses bits, and below 3e-8 it becomes 0.
        Use it where gradients are known to lie in between.

        Raises:
            InvalidInputError: another name; nothing changed.
        """
        if name not in LARGEST:
            raise InvalidInputError(f"wire_dtype is {name!r}; give one of {', '.join(LARGEST)}")
        self._wire_dtype = name

    @property
    def minus_one_allowed(self) -> bool:
        """Whether this client takes -1, or the uint64 of its bits, for an id like any other; see `allow_minus_one`."""
        return self._minus_one

    def allow_minus_one(self) -> None:
        """Take -1, in a uint64 table 2**64 - 1, for an id like any other in every later pull, push and assign of this client.

        Until then it is refused in a table without num_ids: it is mostly padding that was left in, and would be trained as a row.
        `hash_ids` gives negative ids, too, but -1 no more often than any other id: hashed ids do not need this.
        """
        self._minus_one = True

    def pushed_hyper(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return the run-time values of a push that gives these; empty while the table's defaults hold."""
        if not values:
            return self._hyper
        return self._definition.optimizer.check_hyper({**self._hyper, **values})

    def assign(self, ids: ArrayLike, rows: ArrayLike, *, state: ArrayLike | None = None, timeout_s: float | None = None) -> None:
        """Set weights, and create the rows that do not exist. Return when every client's pulls see them.

        Args:
            ids: any integer array, each id once.
            rows: floats [*ids.shape, dim], finite; rounded to the table's storage dtype. Of a table of opaque bytes uint8.
            state: the optimizer's, floats [*ids.shape, s]: the fields of `definition.optimizer.state_fields()`, one after the other.
                Unless given, each row's state begins anew, as that of a row which was never pushed.
            timeout_s: of the whole call; unless given, `away_timeout_s` for every message of 16 MB to a shard.

        Raises:
            InvalidInputError: duplicates, wrong shapes or dtypes, NaN or infinity; nothing was sent.
            ParameterServerError: some rows may have been set, or may still be; assigning again is fine.

        Example:
            >>> users.assign([7, 8], [[1.0, 2.0], [3.0, 4.0]])
            >>> users.pull([8]).tolist()
            [[3.0, 4.0]]
        """
        self._connection.require_shards("assign")
        self._connection.assign(prepare_assign(self._definition, ids, rows, state, minus_one=self._minus_one), timeout_s)

    def erase(self, ids: ArrayLike, *, timeout_s: float | None = None) -> int:
        """Delete rows, optimizer state included; return how many existed. Ids without a row are fine.

        Unless `timeout_s` is given, a shard has 30 s for every half a million rows.

        Raises:
            InvalidInputError: wrong ids; nothing was sent.
            ParameterServerError: some rows may have been erased, or may still be; erasing again is fine.

        Example:
            >>> users.assign([7], [[1.0, 2.0]])
            >>> users.erase([7, 8])
            1
        """
        shards = self._connection.require_shards("erase")
        prepared = prepare_erase(self._definition, ids)
        with self._connection.changes.change():
            return shards.erase(prepared, timeout_s)

    def export(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read every row that exists.

        Ids come page by page from the shards' indexes, rows from storage. Training may go on meanwhile, so this is no snapshot: rows
        erased in between are left out, and rows created in between may be.

        Returns:
            (ids [n] in the table's id_dtype, rows [n, dim] as `pull` gives them).

        Example:
            >>> users.assign([7], [[1.0, 2.0]])
            >>> ids, rows = users.export()
            >>> ids.tolist(), rows.tolist()
            ([7], [[1.0, 2.0]])
        """
        kept_ids, kept_rows = [np.empty(0, np.uint64)], [np.empty((0, self.dim), self._definition.row_dtype)]
        pages = (
            page[at : at + _EXPORTED_AT_ONCE]
            for page in self._connection.known_ids(self.name)
            for at in range(0, len(page), _EXPORTED_AT_ONCE)
        )
        for ids in pages:
            [(rows, versions)] = self._connection.pull_known([(self._definition, ids)])
            exists = versions != 0
            kept_ids.append(ids[exists])
            kept_rows.append(rows[exists])
        return to_caller(np.concatenate(kept_ids), self._definition.id_dtype), np.concatenate(kept_rows)

    def steps(self, timeout_s: float | None = None) -> int:
        """Return how often the optimizer was applied to the table, on the shard where that is most.

        In sync mode these are the job's steps (in torch those with a gradient of the table), in async mode batches of merged pushes.
        Pushes that are on their way are not among them: `flush` first. Checkpoints save and load the number.

        Raises:
            ShardUnavailableError: a shard did not answer in time (`away_timeout_s` unless given).

        Example:
            >>> users.push([7], [[1.0, 2.0]]).wait_applied(timeout_s=30)
            >>> users.steps()
            1
        """
        return self._connection.require_shards("steps").questions.step(self.name, timeout_s)

    def __len__(self) -> int:
        """Return the number of rows that exist, over all shards."""
        shards = self._connection.require_shards("len")
        self._connection.wait_stored()
        return shards.questions.count(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        return self  # rows are in the cluster; there is nothing to copy

    def __reduce__(self) -> tuple[Any, ...]:
        """As `Cluster.__reduce__`; run-time values and the like are not copied."""
        return _table_of, (self._cluster, self.name)

    def __bool__(self) -> bool:
        return True  # a table without rows is a table

    def __repr__(self) -> str:
        d = self._definition
        return f"<Table {d.name!r}: dim {d.dim}, {d.dtype}, {d.optimizer.kind}, {d.id_dtype} ids>"


def _table_of(cluster: Any, name: str) -> Table:
    table: Table = cluster.table(name)
    return table
