"""One lookup in TensorFlow: rows as a tensor [n, dim], positions in it, and the gradient that waits for a step.

Strategy: rows come in one of three ways. Eagerly they are pulled where the lookup stands. In a tf.function they come through
tf.numpy_function. While a step function is traced (`step_function`) they are its arguments. In all of them the tensor is the result of a
function with a gradient of its own (tf.custom_gradient), of one variable that is always 0: the anchor. Backward hands that function the
rows' gradient, wherever it runs: in this graph, one inside of it, or eagerly. A tape watches the anchor as any variable that is read.

RowsOptimizer: the gradients of lookups under a tape are pushed to the parameter servers, one push for all tables.

One thread; it does not survive fork().
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ..bridge.pushed_steps import MAX_UNAPPLIED
from ..bridge.shared_lookups import Asked, LookupResult, SharedLookups
from ..bridge.step_tables import Gradient, StepTables, asked_of, check_table
from ..lookahead.cluster_ports import AckPort, TablePort

LookedUp = tuple[Any, Any]
"""A tensor float32 [n, dim], and int64 [m], where in it each id's row is. n is 1 where there is no id."""
AskedTensor = tuple[TablePort, Any]
"""A table and a tensor of ids [m]."""
Take = Callable[[Any], Any]
"""Takes a gradient float32 [n, dim]; returns a number that is 0, to be computed with it."""


@dataclass(eq=False)
class ClusterLookups:
    """The lookups in one cluster's tables, and by table the optimizer that takes their gradients, and what is told of each result."""

    shared: SharedLookups
    takers: dict[str, "RowsOptimizer"] = field(default_factory=dict)
    told: dict[str, Callable[[LookupResult], None]] = field(default_factory=dict)
    n_lookups: int = 0


@dataclass(eq=False)
class Slots:
    """Lookups of a step function that is being traced; `given`: rows and positions that are its arguments, None: placeholders are made."""

    graph: Any
    given: Sequence[LookedUp] | None
    asked: list[AskedTensor] = field(default_factory=list)
    gradients: dict[int, Any] = field(default_factory=dict)
    """By lookup."""
    steps: list[Any] = field(default_factory=list)
    """Optimizers whose step stands in the function."""

    def next(self, table: TablePort, ids: Any) -> tuple[LookedUp, Take]:
        """Return the next lookup's rows, and the function that takes their gradient."""
        at = len(self.asked)
        self.asked.append((table, tf.identity(ids)))  # ids may be an eager tensor, of no graph
        if self.given is not None:
            return self.given[at], lambda gradient: self._take(at, gradient)
        rows = tf.compat.v1.placeholder(tf.float32, [None, table.dim])
        return (rows, tf.compat.v1.placeholder(tf.int64, [None])), lambda gradient: self._take(at, gradient)

    def _take(self, at: int, gradient: Any) -> Any:
        if gradient.graph is not self.graph:
            raise InvalidInputError(
                f"table {self.asked[at][0].name!r}: its rows' gradient is computed inside of a tf.cond, a loop or another tf.function of "
                "the step, out of which it cannot be handed. Ask the tape outside of it, or leave kvemb.tensorflow.function out"
            )
        self.gradients[at] = gradient if at not in self.gradients else self.gradients[at] + gradient
        return tf.zeros([])


class _Here(threading.local):
    def __init__(self) -> None:
        self.slots: Slots | None = None


here = _Here()
"""Whether a step function is being traced in this thread."""
_clusters: "WeakKeyDictionary[Any, ClusterLookups]" = WeakKeyDictionary()
_anchors: list[Any] = []


def anchor() -> Any:
    """Return the variable that every lookup's rows depend on, in name only."""
    if not _anchors:
        with tf.init_scope():
            _anchors.append(tf.Variable(0.0, name="kvemb_rows_are_in_a_cluster_and_in_no_SavedModel"))
    return _anchors[0]


def lookups_of(cluster: Any) -> ClusterLookups:
    """Return the lookups in a cluster's tables, the same object at every call."""
    if cluster not in _clusters:
        _clusters[cluster] = ClusterLookups(SharedLookups({}, cluster))
    return _clusters[cluster]


def look_up(asked: Sequence[AskedTensor]) -> list[LookedUp]:
    """Look ids up in tables, in one pull for each cluster; their RowsOptimizer takes the gradients. Arguments and errors: see `find`."""
    return [_anchored(looked_up, take) for looked_up, take in find(asked)]


def find(asked: Sequence[AskedTensor]) -> list[tuple[LookedUp, Take]]:
    """Look ids [m] up in tables, a pull for each cluster; return rows and positions, constants to a tape, and what hands a gradient on."""
    for table, _ in asked:
        check_table(table)
    _refuse_replicas()
    if not (tf.executing_eagerly() or tf.inside_function()):
        raise InvalidInputError(
            "a lookup stands in a graph of TensorFlow 1, which a session runs: its gradients are lost. Run eagerly, or make the step a "
            "tf.function (tf.compat.v1.wrap_function takes code of TensorFlow 1)"
        )
    slots = here.slots
    if slots is not None and slots.graph is tf.compat.v1.get_default_graph():
        return [slots.next(table, ids) for table, ids in asked]
    if tf.executing_eagerly():
        found = pull([asked_of(table, ids.numpy()) for table, ids in asked])
        return [_eager(table, one) for (table, _), one in zip(asked, found, strict=True)]
    return _in_graph(asked)


def pull(asked: Sequence[Asked]) -> list[LookupResult]:
    """Look several up, those of one cluster together."""
    found: dict[int, LookupResult] = {}
    places: dict[int, list[int]] = {}
    for at, (table, _) in enumerate(asked):
        places.setdefault(id(table.cluster), []).append(at)
    for of_cluster in places.values():
        lookups = lookups_of(asked[of_cluster[0]][0].cluster)
        lookups.n_lookups += len(of_cluster)
        results = lookups.shared.look_up([asked[at] for at in of_cluster], recording=False)
        found |= zip(of_cluster, results, strict=True)
        for at, result in zip(of_cluster, results, strict=True):
            if (told := lookups.told.get(asked[at][0].name)) is not None:
                told(result)
    return [found[at] for at in range(len(asked))]


def rows_of(table: TablePort, found: LookupResult) -> NDArray[np.float32]:
    """Return the rows found, or one row of zeros if no id was asked for: positions that fill gaps need one."""
    return found.rows if len(found.rows) else np.zeros((1, table.dim), np.float32)


def take(table: TablePort, found: LookupResult, gradient: NDArray[np.float32]) -> None:
    """Hand a gradient of `rows_of` to the optimizer that pushes the table's."""
    taker = lookups_of(table.cluster).takers.get(table.name)
    if taker is None:
        raise InvalidInputError(
            f"table {table.name!r}: its rows have a gradient, and no RowsOptimizer trains them: make one of the table first, or look rows "
            "up outside of the tape"
        )
    taker.take(table.name, found, gradient[: len(found.ids)])


def _anchored(looked_up: LookedUp, take: Take) -> LookedUp:
    """Attach a gradient."""
    rows, at = looked_up

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def attached(anchor: Any) -> tuple[Any, Take]:
        return tf.identity(rows), lambda gradient: take(tf.convert_to_tensor(gradient))

    return attached(tf.convert_to_tensor(anchor())), at


def _eager(table: TablePort, found: LookupResult) -> tuple[LookedUp, Take]:
    def take_now(gradient: Any) -> Any:
        take(table, found, gradient.numpy())
        return tf.zeros([])

    at = found.inverse.astype(np.int64, copy=False)
    return (tf.convert_to_tensor(rows_of(table, found)), tf.convert_to_tensor(at)), take_now


def _in_graph(asked: Sequence[AskedTensor]) -> list[tuple[LookedUp, Take]]:
    tables = [table for table, _ in asked]

    def pull_now(*ids: NDArray[Any]) -> list[NDArray[Any]]:
        found = pull([asked_of(table, of) for table, of in zip(tables, ids, strict=True)])
        made: list[NDArray[Any]] = []
        for table, one in zip(tables, found, strict=True):
            made += [rows_of(table, one), one.inverse.astype(np.int64), one.ids.view(np.int64), one.versions.view(np.int64)]
        return made

    flat = tf.numpy_function(pull_now, [ids for _, ids in asked], [tf.float32, tf.int64, tf.int64, tf.int64] * len(asked))
    made = []
    for i, table in enumerate(tables):
        rows, at, ids, versions = flat[4 * i : 4 * i + 4]
        made.append(((tf.ensure_shape(rows, [None, table.dim]), tf.ensure_shape(at, [None])), _take_later(table, ids, versions)))
    return made


def _take_later(table: TablePort, ids: Any, versions: Any) -> Take:
    def take_now(ids: NDArray[np.int64], versions: NDArray[np.int64], gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        found = LookupResult(ids.view(np.uint64), np.empty(0, np.intp), gradient, versions.view(np.uint64))
        take(table, found, np.array(gradient))
        return np.float32(0)  # type: ignore[return-value]

    def later(gradient: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(take_now, [ids, versions, gradient], tf.float32), [])

    return later


def _refuse_replicas() -> None:
    """Refuse replicas, of which a process may have several. A worker that is one replica is a trainer as any other."""
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    if context is None or context.num_replicas_in_sync == 1:
        return
    worker = isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not (worker and len(context.strategy.extended.worker_devices) == 1):
        raise InvalidInputError(
            f"rows are looked up in a replica of tf.distribute ({context.num_replicas_in_sync} of them), which would average gradients of "
            "different rows. Train one process for each device instead, each a trainer of the cluster"
        )


class RowsOptimizer:
    """Train the rows of tables by the optimizers that these were created with. A newer one over a table takes it over.

    Every tape.gradient() through a lookup leaves its rows' gradients here, for any sources; they add up until step(). With one tape inside
    of another (gradient penalties), look up before the inner one begins, unless its gradients are meant, too.

    Args:
        tables: of one cluster.
        timeout_s: how long step() waits for the other trainers' parts in a sync job, for pushes to be applied in an async one;
            as long as a shard may be away (`parameter_servers.away_timeout_s`) unless given.
        max_unapplied: in an async job, how many of its pushes may not be applied yet when step() returns.

    Raises:
        InvalidInputError: no tables, tables of several clusters, or an option out of range.

    Example:
        >>> import kvemb, tensorflow as tf
        >>> from kvemb.tensorflow import RowsOptimizer, embedding_lookup
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     words = cluster.create_table("word", dim=2, optimizer=kvemb.optim.sgd(0.5), initializer=kvemb.init.zeros())
        ...     rows = RowsOptimizer([words])
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_sum(embedding_lookup(words, [[7, 8, 7]]))
        ...     _ = tape.gradient(loss, [])
        ...     rows.step()
        ...     cluster.flush()
        ...     words.pull([7, 8])
        array([[-1. , -1. ],
               [-0.5, -0.5]], dtype=float32)
    """

    def __init__(self, tables: Sequence[TablePort], *, timeout_s: float | None = None, max_unapplied: int = MAX_UNAPPLIED) -> None:
        for table in tables:
            check_table(table)
        if not tables:
            raise InvalidInputError("give the tables that are trained, got none")
        self._lookups = lookups_of(tables[0].cluster)
        self._tables = StepTables(tables, timeout_s=timeout_s, max_unapplied=max_unapplied, shared=self._lookups.shared)
        self._waiting: list[Gradient] = []
        self._trained, self._n_before = False, self._lookups.n_lookups
        for name in self._tables.by_name:
            self._lookups.takers[name] = self

    @property
    def hyper(self) -> dict[str, dict[str, float]]:
        """The run-time values of the tables' optimizers, by table, as the next push carries them. Schedules change them."""
        return self._tables.hyper

    @property
    def last_ack(self) -> AckPort | None:
        """Of the newest push; None before."""
        return self._tables.last_ack

    def take(self, table: str, found: LookupResult, gradient: NDArray[np.float32]) -> None:
        """Keep a gradient for the next step. Called in backward."""
        self._waiting.append((table, found, gradient))

    def drop(self) -> None:
        """Forget the gradients that wait."""
        self._waiting.clear()

    def step(self, loss: Any = None) -> None:
        """Push the gradients of all lookups since the last step; in a tf.function, at the place of the call.

        Args:
            loss: for the report; a number or an eager tensor.

        Raises:
            InvalidInputError: rows were looked up and none has a gradient, gradients that are not finite, or run-time values out of
                range; nothing was sent.
            KvembError: the push or, in an async job, an earlier one failed: it may be applied later. Gradients that were not handed over
                are kept until `drop`.
        """
        if here.slots is not None:
            here.slots.steps.append(self)
        elif tf.executing_eagerly():
            self._push(loss)
        else:
            tf.numpy_function(self._push_in_graph, [], [])

    def _push_in_graph(self) -> None:
        self._push(None)

    def _push(self, loss: Any) -> None:
        if not self._waiting and not self._trained and self._lookups.n_lookups > self._n_before:
            raise InvalidInputError(
                f"rows were looked up {self._lookups.n_lookups - self._n_before} times, and none has a gradient: look them up under a "
                "tf.GradientTape that watches variables (watch_accessed_variables), and ask it for the loss's gradient"
            )
        self._trained = True
        self._tables.push(self._waiting, None if loss is None else float(loss), use_up=self.drop)
