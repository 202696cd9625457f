"""Every error this product raises on purpose, in one tree.

Each class says whose fault it is. Each message says where (node, shard, table, id), the value found and the one expected, and the next
step. A missing row or a write conflict is a result, not an exception, and does not live here. The class names travel between processes (see
`to_wire` / `from_wire`), so that a trainer sees the error the parameter server saw, with its type.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches


class KvembError(Exception):
    """Root of every error of this product. Catch it to catch them all."""


class RowsRestoredWarning(UserWarning):
    """Rows that a pull did not find do exist: they were deleted in storage, and have been restored since. No push is lost."""


def n_of(n: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, for messages.

    Example:
        >>> n_of(1, "shard"), n_of(12_000, "shard"), n_of(0, "push", "pushes")
        ('1 shard', '12,000 shards', '0 pushes')
    """
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question for the end of a message about a word that is not known; "" where none that is comes near.

    Example:
        >>> did_you_mean("dims", ["dim", "dtype"]), did_you_mean("x", ["dim"])
        (". Did you mean 'dim'?", '')
    """
    near = get_close_matches(word, [*known], 1)
    return f". Did you mean {near[0]!r}?" if near else ""


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error of a module's `__getattr__`, with what it has.

    Example:
        >>> no_attribute("kvemb.init", "norma", ["normal", "zeros"])
        AttributeError("module 'kvemb.init' has no attribute 'norma'; it has normal, zeros. Did you mean 'normal'?")
    """
    known = sorted(known)
    return AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(known)}{did_you_mean(name, known)}")


# --- the caller's fault: nothing was sent, nothing changed -------------------------------------------------------------------------


class InvalidInputError(KvembError, ValueError):
    """An argument is unusable (dtype, shape, range, NaN). Raised before any I/O; nothing changed."""


class FrozenTableError(InvalidInputError):
    """The table takes no gradients: it was created frozen, or its rows are opaque bytes. Its rows come by `assign` and imports."""


class ConfigError(KvembError, ValueError):
    """kvemb.yaml, an option or an environment variable is wrong. The message holds the path of the key."""


class UnknownTableError(KvembError, KeyError):
    """No table of that name exists in the cluster. The message lists those that do."""

    def __str__(self) -> str:  # KeyError would print the repr of the message, quotes and all.
        return str(self.args[0]) if self.args else ""


class TableDroppedError(UnknownTableError):
    """The table was dropped, or is being dropped. Nothing of this call was accepted; rows that it pulled may be initial rows."""


class TableAlteredError(TableDroppedError):
    """The table has another definition now than the caller opened. Nothing of this call was accepted; open the table again."""


class UnknownViewError(KvembError):
    """No view of that name is whole in the target, or the one that was read is not there any more. The message lists those that are."""


class TableMismatchError(KvembError):
    """A table of that name exists with another identity; the message shows both definitions."""


class ReadOnlyError(KvembError):
    """The cluster was opened with read_only=True and a verb that writes was called."""


class ClosedError(KvembError):
    """The cluster, table or connection was closed before this call."""


class RankLostError(KvembError, ConnectionError):
    """Another rank of a job whose ranks exchange rows ended, or did not answer within the timeout of their group. Start the job again."""


# --- storage ------------------------------------------------------------------------------------------------------------------------


class StorageError(KvembError):
    """A storage node could not carry out a request."""


class NodeUnavailableError(StorageError, ConnectionError):
    """A node refused, reset or closed the connection. A write in flight may or may not have landed. Retryable."""


class NodeRefusesError(NodeUnavailableError, ConfigError):
    """A node refuses this process's user or password, or does not permit the command. Nothing was done; retryable once that is mended."""


class DeadlineExceededError(StorageError, TimeoutError):
    """The deadline of the whole batch passed; the message names the nodes that had not answered. A write may have landed. Retryable."""


class NodeLostError(StorageError):
    """A node that held rows has no marker any more: restarted empty, flushed or evicted. Its rows are gone; nothing was re-initialised."""


class FolderUnavailableError(StorageError):
    """A shard cannot read its own data folder, so it writes no rows: it cannot tell whether they are still its own. Retryable."""


class WrongNodeError(StorageError):
    """A node carries the marker of another node, generation, topology or cluster: swapped addresses or a foreign server."""


class MapChangedError(WrongNodeError):
    """This process routes by a cluster map that is no longer in force; the message names both serials. Connect again."""


class NodeSuspectError(StorageError):
    """A node is another process than the one the marker was written for (restart from a snapshot, failover): rows may be old."""


class NotProvisionedError(StorageError):
    """No node carries a marker: the cluster was never provisioned. Start the parameter servers; shard 0 provisions empty nodes."""


class UnsafeNodeError(StorageError):
    """The node's settings can lose rows (eviction, slab reassignment, warm restart, CAS off). The message holds setting and mend."""


class NodeFullError(StorageError):
    """The node is out of memory for this write. Nothing was acknowledged for the rows it names."""


class ProtocolError(StorageError):
    """A node's reply could not be understood. The connection was dropped."""


class RecordError(StorageError):
    """A stored value is not this row's record: wrong size, schema or id check. It was not used."""


class ForeignPageError(RecordError):
    """Another program put a value of another type under a page's key: rows of several shards are gone with it.

    The shards compare the rows of the node (`address`) with their indexes and restore them.
    """

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class LostRowError(StorageError):
    """A row that exists by its shard's index is missing in storage, or has another version. It was not re-initialised."""


# --- parameter servers --------------------------------------------------------------------------------------------------------------


class ParameterServerError(KvembError):
    """A parameter-server shard could not carry out a request."""


class ShardUnavailableError(ParameterServerError, ConnectionError):
    """A shard did not answer within the deadline. An unacknowledged push may or may not have been accepted. Retryable."""


class ShardStartingError(ShardUnavailableError):
    """A shard is starting: it waits for storage, or replays its journal. Nothing was taken; ask again. The message says how far it is."""


class ShardFailedError(ParameterServerError):
    """A shard stopped applying after an error from which it may not go on; the message holds the cause. Restart it once that is mended.

    After the restart, connections of async jobs go on pushing; trainers of a sync job connect again.
    """


class PushRejectedError(ParameterServerError):
    """A shard refused a push part as a whole (unknown table, wrong dim, NaN, sequence gap, other data under a used sequence)."""


class SlotsMovedError(ParameterServerError):
    """Rows were sent to a shard by a cluster map that is not in force: none of them was taken. They are sent again."""


class ClusterLoadedError(ParameterServerError):
    """A push was made before a checkpoint was loaded here: nothing of it was taken. What the load has not replaced is sent again."""


class FeedBehindError(ParameterServerError):
    """A feed cannot go on where its subscriber was: later changes are not known any more. The message says where to begin again."""


class AccessDeniedError(ParameterServerError):
    """A shard does not let this process do this: its certificate or token is not good for it. Nothing was changed."""


class MoveRefusedError(ParameterServerError):
    """A move of slots cannot begin or be taken back now, or blocks the request; nothing was changed."""


class FencedError(ParameterServerError):
    """A newer incarnation of this trainer, or a newer owner of this shard, has taken over. This process must stop pushing."""


class BarrierError(ParameterServerError):
    """A synchronous step could not be completed: a trainer is missing at the barrier's deadline, or all places are taken."""


class JournalFullError(ParameterServerError):
    """The journal could not be written (disk full, quota, failed sync). Nothing that it was asked to keep was acknowledged. Retryable."""


class JournalDamagedError(ParameterServerError):
    """A journal or snapshot file has other bytes than were written. The message names file and offset; nothing after it was used."""


class JournalBehindError(JournalDamagedError):
    """A journal lacks batches that were acknowledged: storage was told of them, or holds rows of them. No row was set back."""


class CheckpointError(KvembError):
    """A checkpoint is missing, unfinished, damaged, or does not fit here; the message names the file. The cluster was left as it was."""


class BaseOutdatedError(CheckpointError):
    """A checkpoint cannot be the base of an increment: rows have other owners since, a table was dropped, or the cluster is another one.

    Save without a base. Nothing of the increment counts.
    """


class ForeignRowsError(KvembError, ValueError):
    """Rows of another program are missing, damaged, or do not fit the table; the message names the file. No row of it was set."""


class MessageError(KvembError, ValueError):
    """A message is malformed, truncated, oversized or of another protocol version. Nothing of it was used."""


def other_format(what: str, got: object, reads: Sequence[int]) -> str:
    """Return the message that refuses a cluster's data in the format of another release, with the way on, step by step (docs/upgrade.md).

    Args:
        what: the data, and where they are.
        got: their format.
        reads: the formats that this release reads.
    """
    return (
        f"{what} has format {got}, this release of kvemb reads {' and '.join(map(str, reads))}. Nothing was changed. Either go on with the "
        "release that wrote it. Or move to this one: with that release run `kvemb save URL`, and stop its shards; in kvemb.yaml name "
        "other, empty nodes (storage.nodes) and another, empty data folder (parameter_servers.data_dir); start the shards with this "
        "release, and run `kvemb load URL` (docs/upgrade.md)."
    )


def _subclasses(cls: type[KvembError]) -> list[type[KvembError]]:
    return [cls, *(c for sub in cls.__subclasses__() for c in _subclasses(sub))]


def to_wire(error: BaseException) -> dict[str, str]:
    """Describe an error for a reply message: class name and message. Foreign exceptions travel as ParameterServerError."""
    if isinstance(error, KvembError):
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": "ParameterServerError", "message": f"{type(error).__name__}: {error}"}


def from_wire(fields: Mapping[str, str]) -> KvembError:
    """Rebuild the error a reply describes; an unknown class name (a newer server) becomes ParameterServerError."""
    known = {cls.__name__: cls for cls in _subclasses(KvembError)}
    return known.get(fields["type"], ParameterServerError)(fields["message"])
