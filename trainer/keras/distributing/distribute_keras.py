"""distribute: a Keras model's large embeddings become tables, in place, in one line; fit, evaluate and predict stay as they are.

Each layer becomes one over its table. It stays the same object, so that references to it remain valid.

materialize: a plain Keras copy of a model over tables, to save, export or look at. It knows no cluster, and trains like any model.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import keras

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from ...bridge.convert_model import Conversion, Distributed, DistributeOptions, convert_model
from ...bridge.filled_tables import First, Site, SiteTable, TableOptions, WeightPlace, check_bytes, rows_of_table
from ...bridge.pushed_steps import MAX_UNAPPLIED, PushedSteps, check_max_unapplied
from ...bridge.shared_lookups import SharedLookups
from ..layers.row_embedding import RowEmbedding
from ..steps.ids_plan import Feature, layers_over_tables
from ..steps.kept_weights import add_to_built, hand_over_each_batch, is_shadow
from ..steps.model_state import ModelState, StepValues, n_batches_of, n_per_step, refuse_unfit, rule_of
from ..steps.step_seam import ConnectedModel, is_connected
from .keras_rules import MappedRule, is_excluded, undecayed
from .keras_sites import DeclaredTable, counterpart, declared_tables, make_declared, places_of, problems_of

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
    optimizer: Any = None,
    features: Mapping[str, Feature | Sequence[Feature]] | None = None,
    max_unapplied: int = MAX_UNAPPLIED,
    **options: Unpack[DistributeOptions],
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
        optimizer: a Keras optimizer, whose rule and learning rate the tables of replaced layers follow, and which the model's own
            train_step gives their gradients. None: the one that the model is compiled with. Or a `kvemb.optim` rule of their own. A
            TableConfig has its own.
        features: what feeds a layer, by its name: a key of x, or a function of x; a list of them, where a step calls it several times.
            Only for models and steps whose code cannot be followed.
        max_unapplied: in an async job, how many of its pushes may not be applied yet when a step is over.
        options: `DistributeOptions`: min_rows, names, prefix, leave, initializer, dtype, seed, reduce, quiet.

    Raises:
        InvalidInputError: an embedding or an optimizer that has no counterpart, or arguments that do not go together. Nothing was changed.
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: of a table; the model is as it was, tables may have been made.
    """
    _check(model, optimizer)
    check_max_unapplied(max_unapplied)
    return convert_model(KerasModel(model, optimizer, dict(features or {}), max_unapplied), cluster, **options)


class KerasModel(Conversion[DistributedKeras]):
    """A Keras model, with the optimizer that hands the gradients of rows over."""

    kind = "layer"
    sought = "keras.layers.Embedding"

    def __init__(self, model: Any, optimizer: Any, features: dict[str, Feature | Sequence[Feature]], max_unapplied: int) -> None:
        self._model, self._features, self._max_unapplied = model, features, max_unapplied
        self._hands = _hands(model, optimizer)
        self._ours = layers_over_tables(model)
        self._over = [(layer.name, layer.table_name) for layer in self._ours]
        self.none_there = None if self._ours else super().none_there
        self._given = optimizer if isinstance(optimizer, OptimizerSpec) else None
        self._mapped: MappedRule | None = None
        self._declared: list[DeclaredTable] = []

    def places(self) -> list[WeightPlace]:
        """As `places_of`."""
        return places_of(self._model)

    def problems(self, holders: Sequence[WeightPlace]) -> Iterator[str]:
        """As `problems_of`."""
        return (f"{one.paths[0]!r}: {problem}" for one in holders for problem in problems_of(self._model, one.holder))

    def rules(self, sites: Sequence[Site], options: TableOptions) -> Mapping[str, OptimizerSpec]:
        """One rule for all."""
        self._declared = declared_tables(self._model, options.initializer)
        hands = self._hands()
        self._mapped = MappedRule(hands) if self._given is None and hands is not None else None
        rule = self._given if self._mapped is None else self._mapped.spec
        if sites and rule is None:
            raise InvalidInputError(
                "the model is not compiled, so its tables would have no update rule: compile it before, or give optimizer=kvemb.optim.…"
            )
        if sites and hands is not None and rule_of(hands).built:
            raise InvalidInputError(
                "nothing was changed: the model's optimizer has state for its embeddings already. Compile the model again, and "
                "call distribute before the first fit; the weights learned so far are carried"
            )
        return {} if rule is None else {site.table: rule for site in sites}

    def first_rows(self, sites: Sequence[Site], given: Initializer | None, exists: Callable[[Site], bool]) -> dict[str, First]:
        """A layer that is not built has no weights: its initializer draws them."""
        first = dict(super().first_rows(sites, given, exists))
        return first if given is not None else {site.table: first[site.table] if site.weight.built else _drawn(site) for site in sites}

    def convert(self, tables: Sequence[SiteTable], cluster: "Cluster", options: TableOptions) -> Callable[..., DistributedKeras]:
        """Make layers over tables of the embeddings, and put pull and push around the model's steps."""
        for of in self._declared:
            make_declared(cluster, of, options)
        opened = {layer.table_name: cluster.table(layer.table_name) for layer in self._ours if not layer.connected}
        for layer in self._ours if self._mapped is not None else ():
            _check_follows(layer, layer.table if layer.connected else opened[layer.table_name], self._mapped)
        for one in tables:
            _become(one, rule_of(self._hands()) if self._mapped is not None else None)
        for layer in self._ours:
            if not layer.connected:
                layer.connect(opened[layer.table_name])
        own = {of.config.name: of for of in self._declared}
        connected = _connect(self._model, self._hands, self._mapped, own, self._features, self._max_unapplied)
        return partial(DistributedKeras, tables=tuple(connected.tables.values()), steps=connected.steps)

    def notes(self, tables: Sequence[SiteTable]) -> list[str]:
        """Name layers that were over tables, and say how rows are pulled ahead, which a model does on request alone."""
        cluster = layers_over_tables(self._model)[0].table.cluster
        how = ', consistency="exact") pulls them while the steps before run, with the same losses'
        return [
            *(f"layer {layer!r}: over table {table!r}" for layer, table in self._over),
            "fit pulls the rows of a batch when it comes to it; kvemb.keras.prepare(model"
            + (how if cluster.mode == "sync" else ") pulls them while the steps before run: rows are older then, see consistency="),
        ]


def _check(model: Any, optimizer: object) -> None:
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


def _check_follows(layer: RowEmbedding, table: Any, mapped: Any) -> None:
    """Refuse another rule than that of a table whose rows follow the model's optimizer."""
    kept, wanted = table.definition.optimizer, mapped.spec
    if layer.follows and kept.identity() != wanted.identity():
        raise InvalidInputError(
            f"nothing was changed: table {table.name!r} has the rule {kept.kind} {dict(kept.options)}, and the model is compiled for "
            f"{wanted.kind} {dict(wanted.options)}; compile it with an optimizer of the table's rule"
        )


def _drawn(site: Site) -> First:
    given = site.weight.embeddings_initializer
    found = counterpart(given, site.n_rows, site.dim)
    if found is None:
        raise InvalidInputError(
            f"nothing was changed: {site} is not built, and its {type(given).__name__} has no counterpart; build the model, so that its "
            "weights are carried, or give initializer=kvemb.init.…"
        )
    return First(False, found)


def _become(one: SiteTable, follows: Any) -> None:
    """Make a layer one over its table, the same object, whose rows follow that optimizer, if any."""
    layer = one.site.weight
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
    check_bytes({layer.table_name: layer.table for layer in layers}.values(), max_bytes)


def _plain(layer: RowEmbedding) -> Any:
    return keras.layers.Embedding(layer.input_dim, layer.output_dim, mask_zero=layer.mask_zero, name=layer.name, dtype=layer.dtype_policy)
