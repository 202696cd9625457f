"""DistributedEmbedding: many features looked up in one layer, by keras-rs's words.

Strategy: a `RowEmbedding` for each table, called once for each of its features. The rows of all of them are one pull, for any layers, since
they are pulled around a model's step. So `preprocess` has little to do: it makes ragged ids dense.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

import keras
import numpy as np

from kvemb.errors import InvalidInputError

from .feature_configs import FeatureConfig, TableConfig, dense_ids
from .row_embedding import RowEmbedding
from .whole_ids import is_ragged

_KEY = "preprocessed_inputs"
_MISSING = object()
_UNFIT = re.compile(r"\W")  # in a layer's name: torch takes no dots, Keras no slashes


@keras.saving.register_keras_serializable(package="kvemb", name="DistributedEmbedding")
class DistributedEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """Look features up in tables of a cluster, and combine the rows of each bag.

    `kvemb.keras.distribute(model, cluster)` makes the tables, or opens them, and connects the layer.

    Args:
        feature_configs: a `FeatureConfig`, or dicts, lists and tuples of them, nested at will: the structure of inputs and of results.
        table_stacking: "auto" or None: tables of a cluster need no stacking.
        update_stats: False: there are no buffers to be sized.
        kwargs: of keras.layers.Layer: name, dtype, trainable.

    Raises:
        InvalidInputError: names that occur twice, or a word that means nothing here.
    """

    def __init__(self, feature_configs: Any, *, table_stacking: str | None = "auto", update_stats: bool = False, **kwargs: Any) -> None:
        if table_stacking not in ("auto", None):
            raise InvalidInputError(f"table_stacking is {table_stacking!r}; tables of a cluster are not stacked: leave it out")
        if update_stats:
            raise InvalidInputError("update_stats=True sizes the buffers of a SparseCore, and there are none here: leave it out")
        super().__init__(**kwargs)
        features = _flat(feature_configs, feature_configs)
        _check(features)
        # Behind Keras's tracker, which would make containers of its own of them.
        object.__setattr__(self, "_feature_configs", feature_configs)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "table_configs", {id(one.table): one.table for one in features})
        self._lookups = [  # no dict: torch would make module names of a table's
            RowEmbedding(
                table.name,
                table.combiner,
                output_dim=table.embedding_dim,
                input_dim=table.vocabulary_size,
                name=_UNFIT.sub("_", table.name),
                dtype=self.dtype_policy,
                trainable=self.trainable,
            )
            for table in self.tables
        ]
        object.__setattr__(self, "_of_table", {layer.table_name: layer for layer in self._lookups})

    @property
    def tables(self) -> list[TableConfig]:
        """The tables, each once."""
        found: Mapping[int, TableConfig] = self.table_configs
        return list(found.values())

    def build(self, input_shape: Any = None) -> None:
        """Build nothing: the rows are in the cluster."""
        self.built = True

    def preprocess(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """Make ragged and sparse ids dense, with weights by which padding counts for nothing; needed for these only.

        It pulls nothing, and may be called in a generator, or in the `map` of a tf.data.Dataset.

        Args:
            inputs: ids of each feature, in the structure of `feature_configs`: arrays, arrays of arrays, tf.RaggedTensor, tf.SparseTensor.
            weights: as `inputs`: factors of the rows.
            training: has no effect, in keras-rs it counts for buffers.

        Returns:
            The inputs of the layer's call.
        """
        if _is_preprocessed(inputs):
            return inputs
        ids = self._flat(inputs)
        factors = [None] * len(ids) if weights is None else self._flat(weights)
        made = [dense_ids(of, one, by) for of, one, by in zip(self.features, ids, factors, strict=True)]
        for of, (one, _) in zip(self.features, made, strict=True):
            of.check(one.shape)
        names = [of.name for of in self.features]
        factors_of = {name: by for name, (_, by) in zip(names, made, strict=True) if by is not None}
        ids_of = {name: one for name, (one, _) in zip(names, made, strict=True)}
        return {_KEY: {"inputs": ids_of, **({"weights": factors_of} if factors_of else {})}}

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Look up the ids of each feature, in the structure of `feature_configs`, or as `preprocess` returns them, with weights.

        Returns [batch, dim] each, in that structure, of the layer's compute dtype. Another structure, ids of another shape, and ragged ids
        without `preprocess` are refused.
        """
        if any(is_ragged(one) for one in keras.tree.flatten(inputs)):
            raise InvalidInputError(f"layer {self.name!r} is called with ragged or sparse ids: put preprocess() into the input pipeline")
        given = self.preprocess(inputs, weights)[_KEY]
        ids, factors = given["inputs"], given.get("weights", {})
        rows = [self._of_table[of.table.name](of.flat(ids[of.name]), weights=of.flat(factors.get(of.name))) for of in self.features]
        return _packed(self._feature_configs, iter(rows))

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return shapes and dtypes of the result."""
        ids = self.preprocess(inputs, weights)[_KEY]["inputs"]
        specs = [self._of_table[of.table.name].compute_output_spec(ids[of.name]) for of in self.features]
        return _packed(self._feature_configs, iter(specs))

    def _flat(self, given: Any) -> list[Any]:
        flat = _flat(self._feature_configs, given)
        if any(one is _MISSING for one in flat):
            names = keras.tree.map_structure(lambda of: of.name, self._feature_configs)
            raise InvalidInputError(
                f"layer {self.name!r} takes features in the structure {names}; got {type(given).__name__} of another one"
            )
        return [np.asarray(one, object if _uneven(one) else None) if isinstance(one, list | tuple) else one for one in flat]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer; a table that features share stands there once."""
        places = {id(table): place for place, table in enumerate(self.tables)}
        features = keras.tree.map_structure(lambda of: {**of.get_config(), "table": places[id(of.table)]}, self._feature_configs)
        return {**super().get_config(), "feature_configs": features, "tables": [table.get_config() for table in self.tables]}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make a layer that `distribute` connects."""
        rest = dict(config)
        tables = [TableConfig.from_config(one) for one in rest.pop("tables")]

        def feature(given: Any) -> Any:
            if isinstance(given, Mapping) and isinstance(given.get("name"), str):
                return FeatureConfig(**{**given, "table": tables[given["table"]]})
            return None  # a container: look into it

        return cls(keras.tree.traverse(feature, rest.pop("feature_configs")), **rest)


def _check(features: list[Any]) -> None:
    if not features or not all(isinstance(of, FeatureConfig) for of in features):
        raise InvalidInputError("feature_configs must be FeatureConfig objects, in dicts, lists or tuples")
    tables = list({id(of.table): of.table for of in features}.values())
    for what, names in (("features", [of.name for of in features]), ("tables", [table.name for table in tables])):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidInputError(f"several {what} are named {', '.join(twice)}; features share a table by naming one TableConfig object")


def _flat(configs: Any, given: Any) -> list[Any]:
    """Return the value given for each feature, in the order of `configs`; keras.tree has another order on each backend."""
    if isinstance(configs, Mapping):
        fits = isinstance(given, Mapping) and given.keys() == configs.keys()
        return [one for key in configs for one in (_flat(configs[key], given[key]) if fits else [_MISSING])]
    if isinstance(configs, list | tuple):
        fits = isinstance(given, list | tuple) and len(given) == len(configs)
        return [one for at, of in enumerate(configs) for one in (_flat(of, given[at]) if fits else [_MISSING])]
    return [given]


def _packed(configs: Any, values: Iterator[Any]) -> Any:
    if isinstance(configs, Mapping):
        return {key: _packed(of, values) for key, of in configs.items()}
    if isinstance(configs, list | tuple):
        return type(configs)([_packed(of, values) for of in configs])
    return next(values)


def _is_preprocessed(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and _KEY in inputs


def _uneven(rows: Any) -> bool:
    return len({len(one) if hasattr(one, "__len__") else -1 for one in rows}) > 1
