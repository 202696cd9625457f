"""RowsOptimizer: what lookups under a tape left of gradients is pushed to the parameter servers, one push for all tables.

What must not live here: update rules (the parameter servers apply them), lookups (`row_lookups`). One thread; it does not survive fork().
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ..bridge.cluster_ports import AckPort, TablePort
from ..bridge.pushed_steps import MAX_UNAPPLIED
from ..bridge.shared_lookups import LookupResult
from ..bridge.step_tables import Gradient, StepTables, check_table
from .row_lookups import here, lookups_of


class RowsOptimizer:
    """Train the rows of tables by the optimizers that these were created with. A newer one over a table takes it over.

    Every tape.gradient() through a lookup leaves its rows' gradients here, whatever it is asked for; they add up until step(). Under a tape
    inside of another one (gradient penalties) look up before the inner one begins, unless its gradients are meant, too.

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
        """The run-time values of the tables' optimizers, by table: what the next push carries. Schedules change them."""
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
        """Push the gradients of all lookups since the last step. In a tf.function it is done where it stands.

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
