"""The embeddings of flax.nnx and equinox models: found, and replaced by ones over tables.

Neither library is imported before a model of it comes.

flax.nnx: an Embed becomes another class in place, the same object, so that all references to it stay valid. equinox: modules do not change,
so a new model is made, with other modules in the places of its embeddings.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from kvemb.errors import InvalidInputError

from ..bridge.filled_tables import Site
from .traced_lookups import rows_at


@dataclass(frozen=True)
class Library:
    """What `distribute` needs of a library.

    Args:
        embeddings: of a model, (path, module, weight, why it cannot be a table, or "").
        replaced: returns a model with rows in the places of sites.
        parts: of a model over tables: its parameters, arrays only, and the function that makes a model of them again.
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
