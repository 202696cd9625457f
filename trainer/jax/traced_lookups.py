"""A loss over a model whose embeddings are tables, taken apart: which ids a batch asks each table for, and the loss of rows.

Strategy: an embedding over a table binds a primitive that stands for its rows. It knows its batching rule, so `vmap` may stand around it,
and nothing else: it is never compiled. The loss is traced to a jaxpr. What comes of the batch alone up to the primitives makes the ids.
With the rows of these in the primitives' place the whole is the loss. All lookups of a table are one feature of `embed`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive, jaxprs_in_params
from jax.extend.core.primitives import jit_p, remat_p
from jax.interpreters import batching

from kvemb.errors import InvalidInputError

ModelLoss = Callable[[Any, Any], Any]
"""loss_fn(params, batch) over a model's parameters."""

rows_p = Primitive("rows_of_table")
rows_p.def_abstract_eval(lambda ids, *, table, dim: jax.core.ShapedArray((*ids.shape, dim), np.float32))


def _outside(*_: Any, table: str, dim: int) -> Any:
    raise InvalidInputError(
        f"rows of table {table!r} were asked for outside of a step: use the model in the loss of step(loss_fn), or step.evaluate"
    )


rows_p.def_impl(_outside)
batching.primitive_batchers[rows_p] = lambda args, dims, **of: (rows_p.bind(jnp.moveaxis(args[0], dims[0], 0), **of), 0)


def rows_at(ids: Any, table: str, dim: int) -> Any:
    """Stand for the rows of ids [...]: float32 [..., dim]."""
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InvalidInputError(f"ids of table {table!r} are {ids.dtype}, not integers")
    return rows_p.bind(ids, table=table, dim=dim)


class TracedLookups:
    """A loss taken apart, batch structure by batch structure."""

    def __init__(self, loss_fn: ModelLoss, params: Any, tables: Sequence[str]) -> None:
        self._loss_fn, self._params, self._tables = loss_fn, jax.tree.map(_shape, params), list(tables)
        self._ids: dict[Any, tuple[Callable[[Any], dict[str, Any]], list[bool]]] = {}

    def ids(self, batch: Any) -> Mapping[str, Any]:
        """Return the ids [m] that a batch asks each table for, one lookup after the other."""
        shapes, structure = jax.tree.flatten(jax.tree.map(_shape, batch))
        key = (structure, *((one.shape, one.dtype) for one in shapes))
        if key not in self._ids:
            ids_of = self._ids_of(batch)
            self._ids[key] = jax.jit(ids_of), _used(jax.make_jaxpr(ids_of)(batch).jaxpr)
        ids, used = self._ids[key]
        for leaf in (leaf for leaf, it in zip(jax.tree.leaves(batch), used, strict=True) if it):
            _refuse_cut(leaf)
        return {name: np.asarray(of) for name, of in ids(batch).items()}

    def loss(self, params: Any, rows: Mapping[str, Any], batch: Any) -> Any:
        """Return the loss, with the rows [m, dim] of the ids of each table."""
        closed, made = jax.make_jaxpr(self._loss_fn, return_shape=True)(params, batch)
        left = dict(rows)

        def of_rows(ids: Any, table: str, dim: int) -> Any:
            n = prod(ids.shape)
            taken, left[table] = left[table][:n], left[table][n:]
            return taken.reshape(*ids.shape, dim)

        outs = _run(closed.jaxpr, closed.consts, jax.tree.leaves((params, batch)), of_rows)
        return jax.tree.unflatten(jax.tree.structure(made), outs)

    def _ids_of(self, batch: Any) -> Callable[[Any], dict[str, Any]]:
        closed = jax.make_jaxpr(self._loss_fn)(self._params, jax.tree.map(_shape, batch))
        unknown = [_UNKNOWN] * len(jax.tree.leaves(self._params))

        def ids_of(batch: Any) -> dict[str, Any]:
            asked: dict[str, list[Any]] = {name: [] for name in self._tables}

            def ask(ids: Any, table: str, dim: int) -> Any:
                if ids is _UNKNOWN:
                    raise InvalidInputError(
                        f"ids of table {table!r} are made of parameters or of rows, so they are not known before the step: make them of "
                        "the batch alone, or keep that embedding local with leave=[…]"
                    )
                asked[table].append(ids.reshape(-1))
                return _UNKNOWN

            _run(closed.jaxpr, closed.consts, [*unknown, *jax.tree.leaves(batch)], ask)
            return {name: jnp.concatenate(ids) if ids else jnp.zeros(0, jnp.int32) for name, ids in asked.items()}

        return ids_of


_UNKNOWN = object()
"""A value that is not known from the batch alone."""


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(dtype))


def _used(jaxpr: Any) -> list[bool]:
    """Return which arguments of a program its results are made of."""
    needed = {of for of in jaxpr.outvars if not isinstance(of, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed |= {of for of in eqn.invars if not isinstance(of, Literal)}
    return [of in needed for of in jaxpr.invars]


def _refuse_cut(leaf: Any) -> None:
    """Refuse an array of integers that do not keep their values in JAX."""
    given = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    short = jax.dtypes.canonicalize_dtype(given.dtype)
    if short.kind in "iu" and short != given.dtype and not (given.astype(short) == given).all():
        raise InvalidInputError(
            f"ids of a batch are made of {given.dtype} up to {given.max()}, which JAX would cut to 32 bits without a word, and other rows "
            "would be trained. Set jax_enable_x64, or look these rows up with kvemb.jax.embed, which takes ids from the batch as it is"
        )


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], of_rows: Callable[..., Any]) -> list[Any]:
    """Evaluate a jaxpr, with `of_rows` in the place of lookups; what comes of unknown values is unknown, and not computed."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(of: Any) -> Any:
        return of.val if isinstance(of, Literal) else values[of]

    for eqn in jaxpr.eqns:
        given = [read(of) for of in eqn.invars]
        inner = [one for one in jaxprs_in_params(eqn.params) if _looks_up(one)]
        if eqn.primitive is rows_p:
            outs = [of_rows(*given, **eqn.params)]
        elif inner and eqn.primitive in (jit_p, remat_p):
            outs = _run(inner[0], getattr(eqn.params["jaxpr"], "consts", ()), given, of_rows)
        elif inner:
            raise InvalidInputError(
                f"a table is looked up inside of {eqn.primitive.name}, of which a batch's ids cannot be taken: look rows up before it"
            )
        elif any(one is _UNKNOWN for one in given):
            outs = [_UNKNOWN] * len(eqn.outvars)
        else:
            with eqn.ctx.manager:
                outs = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
            outs = outs if eqn.primitive.multiple_results else [outs]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(of) for of in jaxpr.outvars]


def _looks_up(jaxpr: Any) -> bool:
    return any(eqn.primitive is rows_p or any(map(_looks_up, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)
