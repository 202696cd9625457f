"""distribute: the large embeddings of a flax.nnx or equinox model become tables, in one line; the loss stays as it is.

Neither library is imported before a model of it comes. flax.nnx: an Embed becomes another class in place, so references to it stay valid.
equinox: a new model is made, for modules do not change.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Unpack

import jax
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ..bridge.convert_model import Conversion, Distributed, DistributeOptions, convert_model
from ..bridge.filled_tables import Site, SiteTable, TableOptions, WeightPlace
from .embedded_step import EmbeddedStep, embed
from .traced_lookups import TracedLookups, rows_at

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
        """Make a training step of the loss that the plain model has; it raises as `EmbeddedStep`, or if ids are not known before a step.

        Args:
            loss_fn: `loss_fn(model, batch)`, as for nnx.value_and_grad and eqx.filter_value_and_grad. Pure. Ids must come of the batch
                alone; embeddings may stand under jax.vmap and jax.jit, not in loops.
            options: of `embed`: optimizer, has_aux, timeout_s, max_unapplied.
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
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: of a table; the model is as it was, tables may have been made.

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


@dataclass(frozen=True)
class Library:
    """What `distribute` needs of a library.

    embeddings: (path, module, weight, why it cannot be a table, or "") of a model. replaced: a model with rows in the places of sites.
    parts: its parameters, arrays only, and the function that makes a model of them again.
    """

    embeddings: Callable[[Any], list[tuple[str, Any, Any, str]]]
    replaced: Callable[[Any, Sequence[Site]], Any]
    parts: Callable[[Any], tuple[Any, Callable[[Any], Any]]]


def library_of(model: Any) -> Library:
    """Return the library of a model."""
    for name, base, made in (("flax.nnx", "Module", _nnx), ("equinox", "Module", _equinox)):
        module = sys.modules.get(name)
        if module is not None and isinstance(model, getattr(module, base)):
            return made()
    raise InvalidInputError(
        f"model is {type(model).__name__}: distribute takes a flax.nnx.Module or an equinox.Module. For others, linen's too, write the "
        "loss over rows, loss_fn(params, rows, batch), and give it to kvemb.jax.embed"
    )


def _problem(module: Any, kind: type, dtype: Any) -> str:
    if type(module) is not kind:
        return f"{type(module).__name__} is a class of its own"
    return "" if dtype == np.float32 else f"its weight is {dtype}, and rows are looked up as float32 (storage may be 16 bits: dtype=)"


@lru_cache(1)
def _nnx() -> Library:
    from flax import nnx

    class NnxRows(nnx.Module):  # type: ignore[misc]
        """An Embed over a table."""

        table: str
        features: int

        def __call__(self, inputs: Any) -> Any:
            return rows_at(inputs, self.table, self.features)

        def attend(self, query: Any) -> Any:
            raise InvalidInputError(f"attend() needs all rows of table {self.table!r}: keep that Embed local, distribute(…, leave=[…])")

    def embeddings(model: Any) -> list[tuple[str, Any, Any, str]]:
        found = []
        for path, module in nnx.iter_modules(model):
            if isinstance(module, nnx.Embed):
                weight = module.embedding[...]
                problem = _problem(module, nnx.Embed, weight.dtype)
                problem = problem or ("" if module.dtype == np.float32 else f"its dtype is {module.dtype}, and rows are float32")
                found.append((".".join(map(str, path)), module, weight, problem))
        return sorted(found, key=lambda one: one[0])

    def replaced(model: Any, sites: Sequence[Site]) -> Any:
        for site in sites:
            for name in ("embedding", "num_embeddings", "dtype", "param_dtype", "promote_dtype"):
                delattr(site.places[0].holder, name)
            site.places[0].holder.__class__ = NnxRows
            site.places[0].holder.table = site.table
        return model

    def parts(model: Any) -> tuple[Any, Callable[[Any], Any]]:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        if kinds := sorted({type(one).__name__ for one in jax.tree.leaves(rest, is_leaf=lambda one: isinstance(one, nnx.Variable))}):
            raise InvalidInputError(
                f"the model holds {', '.join(kinds)} beside nnx.Param, which a loss of parameters cannot change (dropout, batch "
                "statistics): write the loss over rows and give it to kvemb.jax.embed, which hands on what has_aux=True returns"
            )
        return params, lambda params: nnx.merge(graph, params)

    return Library(embeddings, replaced, parts)


@lru_cache(1)
def _equinox() -> Library:
    import equinox as eqx

    class EqxRows(eqx.Module):  # type: ignore[misc]
        """An Embedding over a table; vmap as usual."""

        table: str = eqx.field(static=True)
        embedding_size: int = eqx.field(static=True)

        def __call__(self, x: Any, *, key: Any = None) -> Any:
            if np.shape(x) != ():
                raise InvalidInputError(f"the embedding of table {self.table!r} takes one id, as eqx.nn.Embedding does: use jax.vmap")
            return rows_at(x, self.table, self.embedding_size)

    def is_embedding(node: Any) -> bool:
        return isinstance(node, eqx.nn.Embedding)

    def by_path(model: Any) -> Iterator[tuple[str, Any]]:
        for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_embedding)[0]:
            yield ".".join(str(getattr(one, "name", getattr(one, "idx", getattr(one, "key", one)))) for one in path), node

    def embeddings(model: Any) -> list[tuple[str, Any, Any, str]]:
        found = [(path, node) for path, node in by_path(model) if is_embedding(node)]
        tied = any(isinstance(one, eqx.nn.Shared) for one in jax.tree.leaves(model, is_leaf=lambda one: isinstance(one, eqx.nn.Shared)))
        shared = "eqx.nn.Shared ties weights of this model together, and rows are tied to none" if tied else ""
        return [(path, node, node.weight, shared or _problem(node, eqx.nn.Embedding, node.weight.dtype)) for path, node in found]

    def replaced(model: Any, sites: Sequence[Site]) -> Any:
        of = {site.path: EqxRows(site.table, site.dim) for site in sites}
        nodes = [of.get(path, node) for path, node in by_path(model)]
        return jax.tree.unflatten(jax.tree.structure(model, is_leaf=is_embedding), nodes)

    def parts(model: Any) -> tuple[Any, Callable[[Any], Any]]:
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        return params, lambda params: eqx.combine(params, rest)

    return Library(embeddings, replaced, parts)
