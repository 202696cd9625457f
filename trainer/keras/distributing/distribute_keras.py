"""distribute: a Keras model's large embeddings become tables, in place, in one line; fit, evaluate and predict stay as they are.

Strategy: everything is checked before anything changes. Then tables are made and filled. Then each layer becomes one over its table. It
stays the same object, so that references to it remain valid.

materialize: a plain Keras copy of a model over tables, to save, export or look at.

The copy knows no cluster, and trains like any model.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from ...bridge.distributed import Distributed
from ...bridge.filled_tables import (
    CARRIED,
    First,
    SiteTable,
    TableOptions,
    check_connection,
    fill,
    make_table,
    none_replaced,
    rows_of_table,
    shared_already,
)
from ...bridge.pushed_steps import MAX_UNAPPLIED, PushedSteps, check_max_unapplied
from ...bridge.shared_lookups import SharedLookups
from ..layers.row_embedding import RowEmbedding
from ..steps.ids_plan import Feature, layers_over_tables
from ..steps.kept_weights import add_to_built, hand_over_each_batch, is_shadow
from ..steps.model_state import ModelState, StepValues, n_batches_of, n_per_step, refuse_unfit, rule_of
from ..steps.step_seam import ConnectedModel, is_connected
from .keras_rules import MappedRule, is_excluded, undecayed
from .keras_sites import DeclaredTable, KerasSite, Names, counterpart, declared_tables, find_sites, make_declared

if TYPE_CHECKING:
    from kvemb.api import Cluster


@dataclass(frozen=True, eq=False, kw_only=True)
class DistributedKeras(Distributed):
    """The result of `distribute`.

    Args:
        steps: push the gradients: `last_ack` is of the newest push.
    """

    steps: PushedSteps


def distribute(
    model: Any,
    cluster: "Cluster",
    *,
    min_rows: int = 10_000,
    optimizer: Any = None,
    names: Names | None = None,
    prefix: str = "",
    leave: Collection[str] = (),
    features: Mapping[str, Feature | Sequence[Feature]] | None = None,
    initializer: Initializer | None = None,
    dtype: str = "float32",
    seed: int = 0,
    reduce: str = "sum",
    max_unapplied: int = MAX_UNAPPLIED,
    quiet: bool = False,
) -> DistributedKeras:
    """Replace a Keras model's large Embedding layers by ones whose rows the cluster keeps, in place, and connect its steps.

    `fit`, `train_on_batch`, `evaluate`, `predict` are used as before, on any backend. Every trainer of a job calls it, with the same
    arguments; so does one that resumes, and one that has loaded a saved model. Layers over tables that the model has already
    (`kvemb.keras.Embedding`) are connected, too. Tables that a `kvemb.keras.DistributedEmbedding` declares are made, or opened.

    A table begins with the layer's own weights, where it has some: the trainer that makes the table assigns them, others wait until they
    are there. A layer that is not built has none yet, and can be larger than this machine: its rows are drawn by the layer's initializer.

    Args:
        model: Sequential, functional or subclassed; compiled, unless `optimizer` is given.
        cluster: of `kvemb.connect`.
        min_rows: embeddings of fewer rows stay, and so do frozen ones.
        optimizer: a Keras optimizer, whose rule and learning rate the tables of replaced layers follow, and which the model's own
            train_step gives their gradients. None: the one that the model is compiled with. Or a `kvemb.optim` rule of their own. A
            TableConfig has its own.
        names: of the tables, by layer's name, or a function from it; the layer's name unless given.
        prefix: stands before the name of each table, as "ranker/": a model that is not to share rows with another one needs its own.
        leave: names of layers that stay.
        features: what feeds a layer, by its name: a key of x, or a function of x; a list of them, where a step calls it several times.
            Only for models and steps whose code cannot be followed.
        initializer: draws the rows, in place of the weights.
        dtype, seed, reduce: of the tables; see `kvemb.schema.table_def.TableDef`.
        max_unapplied: in an async job, how many of its pushes may not be applied yet when a step is over.
        quiet: do not write the report to stderr.

    Raises:
        InvalidInputError: an embedding or an optimizer that has no counterpart, or arguments that do not go together. Nothing was changed.
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: a table exists with another identity, is missing, or is not filled.
            The model is as it was; tables may have been made.
    """
    _check(model, cluster, optimizer)
    check_max_unapplied(max_unapplied)
    sites, left = find_sites(model, min_rows, names, leave, prefix)
    ours = layers_over_tables(model)
    declared = declared_tables(model, initializer)
    if not sites and not ours:
        raise none_replaced("keras.layers.Embedding", left, "the model has none")
    hands = _hands(model, optimizer)
    mapped = MappedRule(hands()) if not isinstance(optimizer, OptimizerSpec) and hands() is not None else None
    rule = optimizer if isinstance(optimizer, OptimizerSpec) else mapped.spec if mapped else None
    if sites and rule is None:
        raise InvalidInputError(
            "the model is not compiled, so its tables would have no update rule: compile it before, or give optimizer=kvemb.optim.…"
        )
    _refuse_built(hands(), sites)
    first = {site.table: _first(site, initializer) for site in sites}
    tables, options = [], TableOptions(dtype, seed, reduce)
    for site in sites:
        assert rule is not None
        tables.append(make_table(cluster, site, rule, options, first[site.table], None))
    fill(tables, None)
    for of in declared:
        make_declared(cluster, of, options)
    opened = {layer.table_name: cluster.table(layer.table_name) for layer in ours if not layer.connected}
    if mapped is not None:
        for layer in ours:
            _check_follows(layer, layer.table if layer.connected else opened[layer.table_name], mapped)
    for one in tables:
        _convert(one, rule_of(hands()) if mapped is not None else None)
    for layer in ours:
        if not layer.connected:
            layer.connect(opened[layer.table_name])
    own = {of.config.name: of for of in declared}
    connected = _connect(model, hands, mapped, own, dict(features or {}), max_unapplied)
    lines = [*_lines(tables, left, ours), *shared_already(tables), _ahead_line(cluster.mode)]
    done = DistributedKeras(tables=tuple(connected.tables.values()), lines=tuple(lines), steps=connected.steps)
    done.report(quiet=quiet)
    return done


def _check(model: Any, cluster: Any, optimizer: object) -> None:
    if not isinstance(model, keras.Model):
        packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
        instead = (
            ", of Keras 2 (tf_keras): look its rows up with kvemb.tensorflow, in its train_step (docs/frameworks.md)"
            if "tf_keras" in packages
            else ", a program without Keras's models: kvemb.tensorflow.distribute converts it (docs/frameworks.md)"
            if "tensorflow" in packages
            else ""
        )
        raise InvalidInputError(
            f"the model must be a keras.Model, got {model if isinstance(model, type) else type(model).__name__}{instead}"
        )
    check_connection(cluster)
    if is_connected(model):
        raise InvalidInputError(f"model {model.name!r} is connected already: distribute is for once, and a second compile() needs none")
    if optimizer is not None and not isinstance(optimizer, OptimizerSpec | keras.optimizers.Optimizer):
        raise InvalidInputError(f"optimizer is {optimizer!r}; give a Keras optimizer that trains the model, or one of kvemb.optim's rules")
    if (hands := _hands(model, optimizer)()) is not None:
        refuse_unfit(hands)
    replicas = getattr(getattr(model, "distribute_strategy", None), "num_replicas_in_sync", 1)
    if replicas > 1 or keras.distribution.distribution() is not None:
        raise InvalidInputError(
            "the model is spread over devices (a tf.distribute strategy, or keras.distribution): each would have other rows, "
            "and Keras would "
            "average their gradients. Start a trainer process for each device instead; the parameter servers add up what they push"
        )
    if keras.config.is_nnx_enabled():
        raise InvalidInputError("Keras runs with NNX enabled, which takes train_step from the class; unset KERAS_NNX_ENABLED")


def _hands(model: Any, optimizer: Any) -> Callable[[], Any]:
    """Return a function that returns the optimizer that hands the gradients of rows over."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return lambda: optimizer
    return lambda: getattr(model, "optimizer", None)


def _check_follows(layer: RowEmbedding, table: Any, mapped: MappedRule) -> None:
    """Refuse another rule than that of a table whose rows follow the model's optimizer."""
    kept, wanted = table.definition.optimizer, mapped.spec
    if layer.follows and kept.identity() != wanted.identity():
        raise InvalidInputError(
            f"nothing was changed: table {table.name!r} has the rule {kept.kind} {dict(kept.options)}, and the model is compiled for "
            f"{wanted.kind} {dict(wanted.options)}; compile it with an optimizer of the table's rule"
        )


def _refuse_built(optimizer: Any, sites: Sequence[KerasSite]) -> None:
    if sites and optimizer is not None and rule_of(optimizer).built:
        raise InvalidInputError(
            "nothing was changed: the model's optimizer has state for its embeddings already. Compile the model again, and "
            "call distribute before the "
            "first fit; the weights learned so far are carried"
        )


def _first(site: KerasSite, given: Initializer | None) -> First:
    if given is not None:
        given.check_dim(site.dim)
        return First(False, given, "given")
    if site.layer.built:
        return First(True, CARRIED, "")
    found = counterpart(site.layer.embeddings_initializer, site.n_rows, site.dim)
    if found is None:
        raise InvalidInputError(
            f"nothing was changed: {site} is not built, and its {type(site.layer.embeddings_initializer).__name__} has no "
            "counterpart; build the model, "
            "so that its weights are carried, or give initializer=kvemb.init.…"
        )
    return First(False, found, "read off")


def _convert(one: SiteTable[KerasSite], follows: Any) -> None:
    """Make a layer one over its table, the same object, whose rows follow that optimizer, if any."""
    layer = one.site.layer
    weight_key = follows._var_key(layer._embeddings) if layer.built and follows is not None else None
    if layer.built:
        layer._untrack_variable(layer._embeddings)
        layer._embeddings = None
    layer.__class__ = RowEmbedding
    layer.become_rows(one.site.table, None, follows=follows is not None, weight_key=weight_key)
    layer.connect(one.table)
    layer.built = True


def _connect(
    model: Any,
    hands: Callable[[], Any],
    mapped: MappedRule | None,
    declared: Mapping[str, DeclaredTable],
    features: dict[str, Feature | Sequence[Feature]],
    max_unapplied: int,
) -> ConnectedModel:
    """Put pull and push around the model's steps. Tables that were made for an optimizer follow it, others keep their own values."""
    layers = layers_over_tables(model)
    tables = {layer.table.name: layer.table for layer in layers}
    follows = {layer.table.name: layer.weight_key for layer in layers if layer.follows}
    clusters = {id(table.cluster) for table in tables.values()}
    if len(clusters) > 1:
        raise InvalidInputError("the model's layers are over tables of several clusters; a step is one push, to one")
    cluster = next(iter(tables.values())).cluster
    steps = PushedSteps(cluster, {name: table.definition.id_dtype for name, table in tables.items()}, max_unapplied=max_unapplied)
    trained_by = [hands()]

    def values(now: ModelState) -> dict[str, StepValues]:
        optimizer = hands()
        if trained_by[0] is not None and optimizer is not trained_by[0] and follows and mapped is not None:
            _say_state_stays(optimizer, follows, mapped.spec)
        trained_by[0], rule = optimizer, rule_of(optimizer)
        n_batches = n_batches_of(rule, now)
        n_steps = n_batches // n_per_step(rule)
        ours = mapped.at(optimizer, now, n_steps, n_batches) if mapped is not None else None
        found = {}
        for name, table in tables.items():
            if name in declared:
                found[name] = declared[name].rule.at(declared[name].optimizer, now, n_steps, n_steps)
            elif ours is not None and name in follows:
                found[name] = undecayed(ours) if is_excluded(rule, follows[name]) else ours
            else:
                found[name] = StepValues(dict(table.hyper), clipnorm=rule.clipnorm, clipvalue=rule.clipvalue)
        return found

    connected = ConnectedModel(model, tables, steps, SharedLookups(tables, cluster), values, hands, features)
    if hands() is not None:
        add_to_built(hands(), model)
        if n_per_step(hands()) > 1:
            hand_over_each_batch(rule_of(hands()))
    connected.install()
    return connected


def _say_state_stays(optimizer: Any, tables: Collection[str], rule: OptimizerSpec) -> None:
    if state := ", ".join(one.name for one in rule.state_fields()):
        warnings.warn(
            f"the model was compiled again: its new {type(rule_of(optimizer)).__name__} begins without state, and the rows of "
            f"{', '.join(sorted(tables))} keep theirs ({state}), which is stored beside them",
            stacklevel=2,
        )


def _lines(tables: Sequence[SiteTable[KerasSite]], left: Sequence[tuple[str, str]], ours: Sequence[RowEmbedding]) -> list[str]:
    made = [
        f"layer {one.site.layer.name!r}: {one.site.n_rows} x {one.site.dim} -> table {one.site.table!r}, "
        f"{'made' if one.made else 'opened'}, "
        f"{one.table.definition.optimizer.kind}" + (", its weights carried" if one.first.carried and one.made else "")
        for one in tables
    ]
    return [
        *made,
        *(f"layer {layer.name!r}: over table {layer.table_name!r}" for layer in ours),
        *(f"layer {name!r} stays: {why}" for name, why in left),
    ]


def _ahead_line(mode: str) -> str:
    """Return a line on pulling ahead, which a model does only on request: without this line users would not know of it."""
    how = ', consistency="exact") pulls them while the steps before run, with the same losses'
    return "fit pulls the rows of a batch when it comes to it; kvemb.keras.prepare(model" + (
        how if mode == "sync" else ") pulls them while the steps before run: rows are older then, see consistency="
    )


MAX_BYTES = 1 << 30


def materialize(model: Any, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return a copy whose layers are keras.layers.Embedding with the rows of now.

    Args:
        model: Sequential or functional, or a subclassed one that keras.models.clone_model can copy; not changed.
        max_bytes: of all rows together.

    Raises:
        InvalidInputError: a table has no num_ids or more bytes than that, a layer has a combiner, or there is nothing to copy.
    """
    layers = {layer.name: layer for layer in layers_over_tables(model)}
    if not layers:
        raise InvalidInputError("the model has no layer over a table")
    _check_copied(list(layers.values()), max_bytes)
    for layer in layers.values():
        layer.mark.before_lookup(False)
        layer.table.cluster.flush()

    def copied(layer: Any) -> Any:
        return _plain(layer) if isinstance(layer, RowEmbedding) else type(layer).from_config(layer.get_config())

    copy = keras.models.clone_model(model, clone_function=copied)
    if not copy.built:
        copy.build(model.input_shape)
    for old, new in zip(model._flatten_layers(include_self=False), copy._flatten_layers(include_self=False), strict=True):
        if isinstance(old, RowEmbedding):
            new.set_weights([rows_of_table(old.table)])
        elif not old._layers:
            for to, of in zip(new.weights, [one for one in old.weights if not is_shadow(one)], strict=True):
                to.assign(of.numpy())  # a copy: on JAX a step gives the memory of its arrays away
    return copy


def _check_copied(layers: list[RowEmbedding], max_bytes: int) -> None:
    tables = {layer.table_name: layer.table.definition for layer in layers}
    if endless := [name for name, definition in tables.items() if definition.num_ids is None]:
        raise InvalidInputError(
            f"table {', '.join(endless)}: any 64-bit number is an id, so a copy cannot have all rows; make it with num_ids"
        )
    if combining := [layer.name for layer in layers if layer.combiner is not None]:
        raise InvalidInputError(f"layer {', '.join(combining)}: keras.layers.Embedding has no combiner, so there is no plain copy")
    needed = sum(4 * (definition.num_ids or 0) * definition.dim for definition in tables.values())
    if needed > max_bytes:
        raise InvalidInputError(f"all rows of {', '.join(tables)} are {needed} bytes, above max_bytes={max_bytes}; raise it")


def _plain(layer: RowEmbedding) -> Any:
    return keras.layers.Embedding(layer.input_dim, layer.output_dim, mask_zero=layer.mask_zero, name=layer.name, dtype=layer.dtype_policy)
