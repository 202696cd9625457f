"""embed: from a loss over rows to a step that pulls them, differentiates by them, and pushes.

Rows enter jit as arguments [capacity, dim], and positions in them; `rows[at]` is a plain gather, whose gradient is XLA's. A callback inside
of jit would hang where the runtime has one thread, and costs more than a pull. A second program updates parameters, once the rows'
gradients were handed over: a push that failed has changed nothing.

The capacity only grows, by about a half at a time, so a step is compiled a few times and then never again. The last row is always zeros: it
stands for padding.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ..bridge.batches_ahead import AheadOptions, BatchesAhead, checked_ahead
from ..bridge.pushed_steps import MAX_UNAPPLIED, GatheredBatches
from ..bridge.shared_lookups import Asked, LookupResult, SharedLookups
from ..bridge.step_tables import Gradient, OwnProcess, StepTables, asked_of, has_long_ids
from ..lookahead.cluster_ports import AckPort, ClusterPort, TablePort
from .optax_names import follows_schedule, gathering_of, of_all_gradients, step_under_way

_LEAST = 8
_ALIGNED_BYTES = 64  # what JAX takes over from NumPy without a copy, on a CPU


def capacity_of(n_rows: int) -> int:
    """Return the least capacity for so many rows and one of padding: 2**k, or 1.5 times that."""
    capacity = _LEAST
    while capacity <= n_rows:
        capacity += capacity // 2 if capacity & (capacity - 1) == 0 else capacity // 3
    return capacity


def padded(rows: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
    """Return rows [n, dim] in an array [capacity, dim] of its own, zeros behind them: the one copy of a pull."""
    made = _aligned(capacity, rows.shape[1])
    made[: len(rows)] = rows
    made[len(rows) :] = 0
    return made


def positions(inverse: NDArray[np.intp], kept: NDArray[np.bool_] | None, shape: tuple[int, ...], capacity: int) -> NDArray[np.int32]:
    """Return where each id's row is, in the ids' shape: `inverse` intp [k] for those `kept` bool [m], the last row for others."""
    if kept is None:
        return inverse.astype(np.int32).reshape(shape)
    at = np.full(kept.shape, capacity - 1, np.int32)
    at[kept] = inverse
    return at.reshape(shape)


def _aligned(n_rows: int, dim: int) -> NDArray[np.float32]:
    n_bytes = 4 * n_rows * dim
    raw: NDArray[Any] = np.empty(n_bytes + _ALIGNED_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNED_BYTES
    return raw[start : start + n_bytes].view(np.float32).reshape(n_rows, dim)


Loss = Callable[[Any, Mapping[str, jax.Array], Any], Any]
Grads = Callable[[Any, dict[str, jax.Array]], tuple[Any, dict[str, jax.Array]]]
"""From the gradients of parameters and of rows, by feature [capacity, dim], to those that are used."""
_PATIENCE = 3  # steps


@dataclass(frozen=True, eq=False)
class _Wanted:
    """A feature's ids: how many are padding, and the others."""

    asked: Asked
    kept: NDArray[np.bool_] | None
    shape: tuple[int, ...]


class EmbeddedStep:
    """One training step over rows of tables; made by `embed`. One thread; it does not survive fork().

    Without an optimizer it is jax.value_and_grad of the loss by its parameters: `loss, grads = step(params, batch)`. With one, an optax
    transformation, `params, opt_state, loss = step(params, opt_state, batch)`; both are donated. The rows are trained in either case.
    """

    def __init__(
        self,
        loss_fn: Loss,
        tables: Mapping[str, TablePort],
        ids: Callable[[Any], Mapping[str, Any]] | None,
        padding_id: int | None,
        optimizer: Any,
        has_aux: bool,
        tables_of_step: StepTables,
        on_grads: Grads | None,
    ) -> None:
        self._table_of, self._ids, self._padding_id, self._optimizer = dict(tables), ids, padding_id, optimizer
        self._tables, self._process = tables_of_step, OwnProcess("JAX")
        self._capacity = {feature: 0 for feature in tables}
        self._gathering, self._gathered = gathering_of(optimizer), GatheredBatches[list[Gradient]]()
        self._rates_to_follow = _PATIENCE if optimizer is not None and follows_schedule(optimizer) else 0
        self._first_hyper = {name: dict(values) for name, values in tables_of_step.hyper.items()}

        def loss_of(params: Any, rows: Mapping[str, jax.Array], at: Mapping[str, jax.Array], batch: Any) -> Any:
            return loss_fn(params, {feature: rows[feature][at[feature]] for feature in rows}, batch)

        def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return jax.tree.map(jnp.add, params, updates), opt_state

        differentiated = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=has_aux)

        def grads_of(*args: Any) -> Any:
            loss, (grads, row_grads) = differentiated(*args)
            if on_grads is not None:  # the last row stands for padding, which trains nothing
                grads, row_grads = on_grads(grads, {feature: grad.at[-1].set(0) for feature, grad in row_grads.items()})
            return loss, (grads, row_grads)

        self._value_and_grad = jax.jit(grads_of)
        self._value = jax.jit(loss_of)
        self._update = jax.jit(update, donate_argnums=(1, 2))

    @property
    def hyper(self) -> dict[str, dict[str, float]]:
        """The run-time values of the tables' optimizers, by table's name, as the next push carries them. Schedules change them."""
        return self._tables.hyper

    @property
    def cluster(self) -> ClusterPort:
        """The cluster of the tables."""
        return self._tables.cluster

    @property
    def last_ack(self) -> AckPort | None:
        """Of the newest push; None before."""
        return self._tables.last_ack

    def __call__(self, params: Any, *rest: Any) -> Any:
        """Take a step: pull, differentiate, push; with an optimizer, update the parameters.

        Returns:
            With an optimizer (params, opt_state, loss), without one (loss, grads); `loss` is (loss, aux) where the loss has that.

        Raises:
            InvalidInputError: arguments that do not fit, ids that a table does not take, a call inside of jax.jit, pmap or vmap, or
                gradients that are not finite; nothing was pushed.
            KvembError: the push or an earlier one failed: it may be applied later. Parameters and state are as they were.
        """
        *state, batch = self._checked(rest)
        found, rows, at = self._look_up((params, *rest), batch)
        loss, (grads, row_grads) = self._value_and_grad(params, rows, at, batch)
        gradients = [(self._table_of[feature].name, one, np.asarray(row_grads[feature])[: len(one.ids)]) for feature, one in found.items()]
        self._push(gradients, state, loss[0] if isinstance(loss, tuple) else loss)
        if self._optimizer is None:
            return loss, grads
        self._say_rates_stay()
        return (*self._update(grads, state[0], params), loss)

    def _push(self, gradients: list[Gradient], state: list[Any], loss: Any) -> None:
        """Push a step's gradients; of an optimizer that gathers those of several batches, all of them with the last."""
        if self._gathering is None:
            self._tables.push(gradients, loss=loss)
            return
        (of,), gathered = state, self._gathered
        n_before, n_batches, divisor = step_under_way(self._gathering, of)
        gathered.begin(n_before)
        if n_before < n_batches - 1:
            gathered.add(gradients)
            return
        made = [(name, one, gradient / np.float32(divisor)) for batch in (*gathered.batches, gradients) for name, one, gradient in batch]
        self._tables.push(made, loss=loss, use_up=gathered.clear)

    def _say_rates_stay(self) -> None:
        """Warn, once, if the parameters' rate changes and that of rows is unchanged after a few steps."""
        self._rates_to_follow -= 1
        if self._rates_to_follow == 0 and self._tables.hyper == self._first_hyper:
            warnings.warn(
                "the optimizer's learning rate follows a schedule, and that of rows stays as their tables were created: set "
                "step.hyper[table]['lr'] before each step",
                stacklevel=3,
            )

    def evaluate(self, params: Any, batch: Any) -> Any:
        """Return the loss of a batch, with aux where there is one. Nothing is pushed; raises as a step."""
        _, rows, at = self._look_up((params, batch), batch)
        return self._value(params, rows, at, batch)

    def rows(self, batch: Any) -> dict[str, jax.Array]:
        """Return the loss's rows: by feature float32 [..., dim], a row for each id, zeros for padding. Nothing is pushed."""
        _, rows, at = self._look_up(batch, batch)
        return {feature: rows[feature][at[feature]] for feature in rows}

    def asked(self, batch: Any) -> list[Asked]:
        """Return the lookups of a batch; in any thread, nothing is sent."""
        return [wanted.asked for wanted in self._wanted(batch).values()]

    @property
    def shared(self) -> SharedLookups:
        """The lookups in its tables."""
        return self._tables.shared

    def _checked(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        expected = 1 if self._optimizer is None else 2
        if len(rest) != expected:
            shape = "step(params, batch)" if self._optimizer is None else "step(params, opt_state, batch)"
            raise InvalidInputError(f"call {shape}; got {1 + len(rest)} arguments")
        return rest

    def _look_up(self, given: Any, batch: Any) -> tuple[dict[str, LookupResult], dict[str, Any], dict[str, Any]]:
        """Look a batch's rows up; return the results, the rows [capacity, dim] and the positions, each by feature."""
        self._process.check()
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given)):
            raise InvalidInputError(
                "a step over kvemb tables was called inside of jax.jit, pmap, vmap or grad, where rows cannot be pulled: call it as it is; "
                "it compiles the loss itself. For several devices shard the batch (jax.device_put), or use shard_map inside of the loss"
            )
        wanted = self._wanted(batch)
        found = dict(zip(wanted, self._tables.look_up([one.asked for one in wanted.values()]), strict=True))
        rows, at = {}, {}
        for feature, one in found.items():
            capacity = self._capacity[feature] = max(self._capacity[feature], capacity_of(len(one.ids)))
            rows[feature] = padded(one.rows, capacity)
            at[feature] = positions(one.inverse, wanted[feature].kept, wanted[feature].shape, capacity)
        return found, rows, at

    def _wanted(self, batch: Any) -> dict[str, _Wanted]:
        if self._ids is None and not isinstance(batch, Mapping):
            raise InvalidInputError(
                f"the batch is {type(batch).__name__}, no mapping from feature to ids: give embed ids=, a function of it"
            )
        by_feature = batch if self._ids is None else self._ids(batch)
        missing = [feature for feature in self._table_of if feature not in by_feature]
        if missing:
            raise InvalidInputError(f"no ids of {', '.join(missing)}; there are {', '.join(map(str, by_feature))}")
        return {feature: self._wanted_of(feature, table, by_feature[feature]) for feature, table in self._table_of.items()}

    def _wanted_of(self, feature: str, table: TablePort, ids: Any) -> _Wanted:
        if isinstance(ids, jax.Array):
            _check_array(feature, table, ids)
        array = np.asarray(ids)
        if self._padding_id is None:
            return _Wanted(asked_of(table, array), None, array.shape)
        kept = array.reshape(-1) != self._padding_id
        return _Wanted(asked_of(table, array.reshape(-1)[kept]), kept, array.shape)


def _check_array(feature: str, table: TablePort, ids: jax.Array) -> None:
    """Refuse a JAX array on devices of other processes, or one whose ids may have lost bits when it was made."""
    if not ids.is_fully_addressable:
        raise InvalidInputError(
            f"feature {feature!r}: its ids lie on devices of other processes too, and this process can only look up what it has. Give "
            "each process its own part as a NumPy array; each is a trainer of the cluster"
        )
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64 and has_long_ids(table):
        raise InvalidInputError(
            f"feature {feature!r}: its ids are a JAX array of {ids.dtype}, and the ids of table {table.name!r} have 64 bits. Without "
            "jax_enable_x64 JAX cuts longer ids off without a word, and another row would be trained. Give these ids as a NumPy array "
            "(the rest of the batch may be on devices), create the table with num_ids up to 2**31, or set jax_enable_x64"
        )


def embed(
    loss_fn: Loss,
    tables: Mapping[str, TablePort],
    *,
    ids: Callable[[Any], Mapping[str, Any]] | None = None,
    padding_id: int | None = None,
    optimizer: Any = None,
    has_aux: bool = False,
    row_grads: Grads | None = None,
    timeout_s: float | None = None,
    max_unapplied: int = MAX_UNAPPLIED,
) -> EmbeddedStep:
    """Make a training step of a loss over rows.

    Args:
        loss_fn: `loss_fn(params, rows, batch)`: rows float32 [..., dim] by feature, of the shape of that feature's ids. Pure, as for
            jax.jit, which compiles it. Ids of 64 bits come in truncated to 32 unless jax_enable_x64 is set: the rows are those of all bits.
        tables: by feature; one table may serve several.
        ids: from a batch to ids by feature, integers of any shape; `batch[feature]` unless given. NumPy arrays. Arrays of JAX's are taken
            where they hold all bits: with jax_enable_x64, or of a table with num_ids up to 2**31.
        padding_id: an id that stands for none: its row is zeros, and nothing is pulled or trained.
        optimizer: an optax transformation for the parameters. Rows have the optimizer that their table was created with. With
            optax.MultiSteps rows change where the parameters do, by the mean or sum of the same batches' gradients.
        has_aux: whether the loss returns (loss, aux).
        row_grads: `row_grads(grads, row_grads)` returns both as they are used: it may clip or change the gradients of the whole model, rows
            included. Pure, compiled with the loss. Rows' gradients come by feature [capacity, dim], summed by id within a feature, zeros
            beyond the batch's rows. A transformation for the parameters alone that does so is refused without.
        timeout_s: how long a step waits for the other trainers' parts in a sync job, for pushes to be applied in an async one;
            as long as a shard may be away (`parameter_servers.away_timeout_s`) unless given.
        max_unapplied: in an async job, how many pushes may not be applied yet when a step is over.

    Raises:
        InvalidInputError: no tables, tables of several clusters, or a wrong option.

    Example: clip rows and parameters by one norm.
        def clipped(grads, row_grads):
            return optax.clip_by_global_norm(1.0).update((grads, row_grads), optax.EmptyState())[0]
        step = embed(loss_fn, tables, optimizer=optax.adam(1e-3), row_grads=clipped)

    Example:
        >>> import jax.numpy as jnp, kvemb, numpy as np
        >>> from kvemb.jax import embed, sgd
        >>> def loss_fn(params, rows, batch):
        ...     return jnp.sum(params * rows["word"])
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     words = cluster.create_table("word", dim=2, optimizer=sgd(0.5), initializer=kvemb.init.zeros())
        ...     step = embed(loss_fn, {"word": words})
        ...     loss, grads = step(jnp.ones(2), {"word": np.array([[7, 8, 7]])})
        ...     cluster.flush()
        ...     words.pull([7, 8])
        array([[-1. , -1. ],
               [-0.5, -0.5]], dtype=float32)
    """
    if not isinstance(tables, Mapping) or not tables:
        raise InvalidInputError(f"tables must be a mapping from feature to kvemb table, got {tables!r}")
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InvalidInputError(f"optimizer is {type(optimizer).__name__}; give an optax transformation, for the parameters")
    if row_grads is None and (parts := of_all_gradients(optimizer)):
        raise InvalidInputError(
            f"the optimizer holds optax's {', '.join(parts)}, which would see the gradients of the parameters and not those of rows. "
            "Give what changes gradients as row_grads=, a function of both (row_grads=lambda grads, rows: (grads, rows) leaves rows out on "
            "purpose). optax.MultiSteps, outside of all others, gathers those of rows, too"
        )
    of_step = StepTables(list(tables.values()), timeout_s=timeout_s, max_unapplied=max_unapplied)
    return EmbeddedStep(loss_fn, tables, ids, padding_id, optimizer, has_aux, of_step, row_grads)


def prepare(step: EmbeddedStep, loader: Iterable[Any], **options: Unpack[AheadOptions]) -> BatchesAhead:
    """Pull the rows of batches before they are used; the step and the loop stay as they are.

    Args:
        step: made by `embed`.
        loader: any iterable of batches.
        options: `AheadOptions`: consistency, k, threads_num, capacity, executor, report.

    Returns:
        An iterable to use instead of the loader; a context manager, with the length of the loader if that has one.

    Raises:
        InvalidInputError: a wrong option. While iterating: any error of the loader or a pull, at the batch concerned.

    Example:
        for batch in prepare(step, loader):
            params, opt_state, loss = step(params, opt_state, batch)
    """
    if not isinstance(step, EmbeddedStep):
        raise InvalidInputError(f"step is {type(step).__name__}; give what kvemb.jax.embed returned")
    return checked_ahead(step.cluster, **options).batches(loader, step.asked, step.shared)
