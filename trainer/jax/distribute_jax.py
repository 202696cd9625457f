"""distribute: the large embeddings of a flax.nnx or equinox model become tables, in one line; the loss stays as it is.

Strategy: everything is checked before anything changes. Then tables are made and filled, and then the embeddings replaced.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from ..bridge.distributed import Distributed
from ..bridge.filled_tables import CARRIED, First, SiteTable, TableOptions, check_connection, fill, make_table, shared_already
from .embedded_step import EmbeddedStep, embed
from .models_of_libraries import JaxSite, Names, find_sites, library_of
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


def distribute(
    model: Any,
    cluster: "Cluster",
    *,
    optimizer: OptimizerSpec,
    min_rows: int = 10_000,
    names: Names | None = None,
    prefix: str = "",
    leave: Collection[str] = (),
    initializer: Initializer | None = None,
    dtype: str = "float32",
    seed: int = 0,
    reduce: str = "sum",
    quiet: bool = False,
) -> DistributedJax:
    """Replace the large embeddings of a flax.nnx or equinox model by ones whose rows the cluster keeps.

    A nnx model is changed in place; of an equinox model a new one is made. Every trainer of a job calls it, with the same arguments; so
    does one that resumes. A table begins with the embedding's own weights: the trainer that makes it assigns them, others wait until they
    are there. A model made by nnx.eval_shape or eqx.filter_eval_shape has none, and can be larger than this machine: give `initializer`.

    Args:
        model: with nnx.Embed or eqx.nn.Embedding in it.
        cluster: of `kvemb.connect`.
        optimizer: the tables' rule: `kvemb.jax.adagrad(0.1)` and others, or one of `kvemb.optim`.
        min_rows: embeddings of fewer rows stay.
        names: of the tables, by path in the model ("towers.user"), or a function from it; the path unless given.
        prefix: stands before the name of each table, as "ranker/": a model that is not to share rows with another one needs its own.
        leave: paths of embeddings that stay.
        initializer: draws the rows, in place of the weights.
        dtype, seed, reduce: of the tables; see `kvemb.schema.table_def.TableDef`.
        quiet: do not write the report to stderr.

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
    check_connection(cluster)
    if not isinstance(optimizer, OptimizerSpec):
        raise InvalidInputError(
            f"optimizer is {optimizer!r}; an optax transformation cannot be asked for its rule. Give the tables' as kvemb.jax.adagrad(…), "
            "sgd, adam, adamw or rmsprop, and the transformation for the parameters to step(loss_fn, optimizer=…)"
        )
    library = library_of(model)
    sites, left = find_sites(library, model, min_rows, names, leave, prefix)
    options, first = TableOptions(dtype, seed, reduce), {site.table: _first(site, initializer) for site in sites}
    library.parts(model)
    tables = [make_table(cluster, site, optimizer, options, first[site.table], None) for site in sites]
    fill(tables, None)
    params, model_of = library.parts(library.replaced(model, sites))
    lines = [*_lines(tables), *(f"embedding {path!r} stays: {why}" for path, why in left), *shared_already(tables)]
    done = DistributedJax(tables=tuple(one.table for one in tables), lines=tuple(lines), params=params, model=model_of)
    done.report(quiet=quiet)
    return done


def _first(site: JaxSite, given: Initializer | None) -> First:
    if given is not None:
        given.check_dim(site.dim)
        return First(False, given, "given")
    if isinstance(site.weight, jax.ShapeDtypeStruct):
        raise InvalidInputError(f"nothing was changed: {site} has a shape and no weights; give initializer=kvemb.init.…")
    return First(True, CARRIED, "")


def _lines(tables: list[SiteTable[JaxSite]]) -> list[str]:
    return [
        f"embedding {one.site.path!r}: {one.site.n_rows} x {one.site.dim} -> table {one.site.table!r}, "
        f"{'made' if one.made else 'opened'}, {one.table.definition.optimizer.kind}"
        + (", its weights carried" if one.first.carried and one.made else "")
        for one in tables
    ]
