"""distribute: the large embeddings of a flax.nnx or equinox model become tables, in one line; the loss stays as it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import jax
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ..bridge.convert_model import Conversion, Distributed, DistributeOptions, convert_model
from ..bridge.filled_tables import Site, SiteTable, TableOptions, WeightPlace
from .embedded_step import EmbeddedStep, embed
from .models_of_libraries import library_of
from .traced_lookups import TracedLookups

if TYPE_CHECKING:
    from kvemb.api import Cluster


@dataclass(frozen=True, eq=False, kw_only=True)
class DistributedJax(Distributed):
    """The result of `distribute`.

    Args:
        params: what is left of the model, as arrays: to be trained by `step`, and to make an optimizer's state of.
        model: of parameters: makes a model over tables of them.
    """

    params: Any
    model: Callable[[Any], Any]

    def step(self, loss_fn: Callable[[Any, Any], Any], **options: Any) -> EmbeddedStep:
        """Make a training step of the loss that the plain model has.

        Args:
            loss_fn: `loss_fn(model, batch)`, as for nnx.value_and_grad and eqx.filter_value_and_grad. Pure. Ids must come of the batch
                alone; embeddings may stand under jax.vmap and jax.jit, not in loops.
            options: of `embed`: optimizer, has_aux, timeout_s, max_unapplied.

        Raises:
            InvalidInputError: a wrong option. At a step: as `EmbeddedStep`, or ids that are not known before the step.
        """
        traced = TracedLookups(lambda params, batch: loss_fn(self.model(params), batch), self.params, [one.name for one in self.tables])
        return embed(traced.loss, {one.name: one for one in self.tables}, ids=traced.ids, **options)


def distribute(model: Any, cluster: "Cluster", *, optimizer: OptimizerSpec, **options: Unpack[DistributeOptions]) -> DistributedJax:
    """Replace the large embeddings of a flax.nnx or equinox model by ones whose rows the cluster keeps.

    A nnx model is changed in place; of an equinox model a new one is made. Every trainer of a job calls it, with the same arguments; so
    does one that resumes. A table begins with the embedding's own weights: the trainer that makes it assigns them, others wait until they
    are there. A model made by nnx.eval_shape or eqx.filter_eval_shape has none, and can be larger than this machine: give `initializer`.

    Args:
        model: with nnx.Embed or eqx.nn.Embedding in it.
        cluster: of `kvemb.connect`.
        optimizer: the tables' rule: `kvemb.jax.adagrad(0.1)` and others, or one of `kvemb.optim`.
        options: `DistributeOptions`: min_rows, names, prefix, leave, initializer, dtype, seed, reduce, quiet.

    Raises:
        InvalidInputError: a model of another library, an embedding that cannot be a table, or arguments that do not go together. Nothing
            was changed.
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: a table exists with another identity, is missing, or is not filled.
            The model is as it was; tables may have been made.

    Example:
        done = distribute(model, cluster, optimizer=kvemb.jax.adagrad(0.1))
        step, params = done.step(loss_fn, optimizer=optax.adam(1e-3)), done.params
        opt_state = optax.adam(1e-3).init(params)
        for batch in prepare(step, loader):
            params, opt_state, loss = step(params, opt_state, batch)
    """
    if not isinstance(optimizer, OptimizerSpec):
        raise InvalidInputError(
            f"optimizer is {optimizer!r}; an optax transformation cannot be asked for its rule. Give the tables' as kvemb.jax.adagrad(…), "
            "sgd, adam, adamw or rmsprop, and the transformation for the parameters to step(loss_fn, optimizer=…)"
        )
    return convert_model(JaxModel(model, optimizer), cluster, **options)


class JaxModel(Conversion[DistributedJax]):
    """A model of flax.nnx or equinox."""

    def __init__(self, model: Any, rule: OptimizerSpec) -> None:
        self._model, self._rule, self._library = model, rule, library_of(model)
        self._found = self._library.embeddings(model)

    def places(self) -> list[WeightPlace]:
        """Find the embeddings."""
        return [
            WeightPlace((path,), module, weight, int(weight.shape[0]), int(weight.shape[1]), partial(_rows, weight))
            for path, module, weight, _ in self._found
        ]

    def problems(self, holders: Sequence[WeightPlace]) -> Iterator[str]:
        """Yield why an embedding cannot become one over a table."""
        problem_of = {path: problem for path, *_, problem in self._found if problem}
        return (f"{one.paths[0]!r}: {problem_of[one.paths[0]]}" for one in holders if one.paths[0] in problem_of)

    def rules(self, sites: Sequence[Site], options: TableOptions) -> Mapping[str, OptimizerSpec]:
        """The given one for all."""
        self._library.parts(self._model)
        if options.initializer is None and (empty := [site for site in sites if isinstance(site.weight, jax.ShapeDtypeStruct)]):
            raise InvalidInputError(f"nothing was changed: {empty[0]} has a shape and no weights; give initializer=kvemb.init.…")
        return {site.table: self._rule for site in sites}

    def convert(self, tables: Sequence[SiteTable], cluster: "Cluster", options: TableOptions) -> Callable[..., DistributedJax]:
        """Replace them, and take the parameters of what is left."""
        params, model_of = self._library.parts(self._library.replaced(self._model, [one.site for one in tables]))
        return partial(DistributedJax, tables=tuple(one.table for one in tables), params=params, model=model_of)


def _rows(weight: Any, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.asarray(weight[ids], np.float32)
