"""EmbeddingBagCollection and EmbeddingCollection: TorchRec's modules of the same names over kvemb tables.

Several tables, each for one or several jagged features; all of them are one pull. Arguments, names of results and their order are
TorchRec's; tables are created in a cluster, so a config also says how they are trained. What must not live here: jagged tensors
(`jagged`), pulling (`collection_tables`).

Source: torchrec.modules.embedding_modules (interface only).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvemb.errors import InvalidInputError
from trainer.torch.collection_configs import EmbeddingBagConfig, EmbeddingConfig, TableCreator
from trainer.torch.collection_tables import TableCollection, pool
from trainer.torch.eager import eager
from trainer.torch.jagged import JaggedTensor
from trainer.torch.keyed_tensor import KeyedTensor
from trainer.torch.shared import Asked


class KeyedJagged(Protocol):
    """Our KeyedJaggedTensor, or TorchRec's."""

    def keys(self) -> Sequence[str]:
        """The features' names."""
        ...

    def values(self) -> Tensor:
        """All values, feature by feature, bag after bag: [m]."""
        ...

    def lengths(self) -> Tensor:
        """How many values each bag has: [features * b]."""
        ...

    def weights_or_none(self) -> Tensor | None:
        """A weight per value [m], or None."""
        ...


@dataclass(frozen=True, eq=False)
class _Feature:
    """Ids [m] of one feature, in bags of `lengths` [b], with weights [m] or None."""

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None


class _Collection(TableCollection):
    """What both collections share: configs, features by table, names of results."""

    def __init__(self, tables: Sequence[EmbeddingConfig], cluster: TableCreator) -> None:
        names = [config.name for config in tables]
        if not names or len(set(names)) < len(names):
            raise InvalidInputError(f"a collection needs tables of distinct names, got {names}")
        for config in tables:
            if len(set(config.feature_names)) < len(config.feature_names):
                raise InvalidInputError(f"table {config.name!r}: feature_names must be distinct, got {list(config.feature_names)}")
        super().__init__([config.create(cluster) for config in tables])
        self._configs = list(tables)
        every = [feature for config in tables for feature in config.feature_names]
        self._results = {  # per table; a feature of several tables is told apart as "feature@table"
            config.name: [f"{f}@{config.name}" if every.count(f) > 1 else f for f in config.feature_names] for config in tables
        }

    def asked(self, features: KeyedJagged) -> list[Asked]:
        """Return what forward would look up."""
        return self._asked(self._ids(self._features(features)))

    def extra_repr(self) -> str:
        """Name the features of each table."""
        return ", ".join(f"{config.name}({', '.join(config.feature_names)})" for config in self._configs)

    def _ids(self, features: Mapping[str, _Feature]) -> dict[str, Tensor]:
        return {c.name: torch.cat([features[name].ids for name in c.feature_names]) for c in self._configs}

    def _features(self, given: KeyedJagged) -> dict[str, _Feature]:
        """Take features apart; those that no table has are left out."""
        if not all(callable(getattr(given, method, None)) for method in ("keys", "values", "lengths", "weights_or_none")):
            raise InvalidInputError(
                f"features must be a KeyedJaggedTensor, got {type(given).__name__}; of a dict, KeyedJaggedTensor.from_lists and "
                ".from_jt_dict make one"
            )
        for method in ("variable_stride_per_key", "inverse_indices_or_none"):
            if getattr(given, method, bool)():  # TorchRec's, with bags that are not one per example and key
                raise InvalidInputError(f"features with {method}() are not supported: give each key the same number of bags")
        keys, values, lengths = list(given.keys()), given.values(), given.lengths()
        missing = sorted({name for config in self._configs for name in config.feature_names} - set(keys))
        if missing:
            raise InvalidInputError(f"no feature {', '.join(missing)}; there are {', '.join(keys)}")
        if len(lengths) % len(keys):
            raise InvalidInputError(f"{len(lengths)} lengths for {len(keys)} features: each must have the same number of bags")
        per_key = lengths.reshape(len(keys), -1)
        sizes = per_key.sum(1).tolist()
        if sum(sizes) != len(values) or bool((lengths < 0).any()):
            raise InvalidInputError(f"lengths add up to {sum(sizes)} and must be at least 0; there are {len(values)} values")
        weights = given.weights_or_none()
        weights_of = [None] * len(keys) if weights is None else torch.split(weights, sizes)
        parts = zip(keys, torch.split(values, sizes), per_key, weights_of, strict=True)
        return {key: _Feature(*of) for key, *of in parts}


class EmbeddingBagCollection(_Collection):
    """Sum or average the rows of each bag, for several features at once, as torchrec.EmbeddingBagCollection.

    Args:
        tables: one config per table.
        cluster: where tables are created, or opened if they exist with the same identity.
        is_weighted: multiply each row by its value's weight first; with pooling "sum" only, as in torch.

    Raises:
        InvalidInputError: a config cannot be used; nothing was created of it.
        TableMismatchError: a table exists with another identity.

    Example:
        >>> import kvemb
        >>> from trainer.torch import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> tables = [
        ...     EmbeddingBagConfig(name="page", embedding_dim=4, num_embeddings=1000, feature_names=["seen", "liked"]),
        ...     EmbeddingBagConfig(name="ad", embedding_dim=2, num_embeddings=50, pooling="mean"),
        ... ]
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     collection = EmbeddingBagCollection(tables, cluster)
        ...     features = KeyedJaggedTensor.from_lists({"seen": [[1, 2], []], "liked": [[2], [9]], "ad": [[5], [6, 7]]})
        ...     pooled = collection(features)
        >>> pooled.keys(), tuple(pooled.values().shape), pooled["seen"][1].tolist()
        (['seen', 'liked', 'ad'], (2, 10), [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], cluster: TableCreator, *, is_weighted: bool = False) -> None:
        averaged = [config.name for config in tables if config.pooling != "sum"]
        if is_weighted and averaged:
            raise InvalidInputError(f"weights go with pooling 'sum' only; the tables {', '.join(averaged)} have another")
        super().__init__(tables, cluster)
        self._bag_configs = list(tables)
        self._is_weighted = is_weighted

    def is_weighted(self) -> bool:
        """Whether features have weights."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs."""
        return list(self._bag_configs)

    @eager
    def forward(self, features: KeyedJagged) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: a KeyedJaggedTensor, ours or TorchRec's, with at least the tables' features and b bags each.

        Returns:
            KeyedTensor with float32 [b, embedding_dim] per feature, in the order of the tables and their features.

        Raises:
            InvalidInputError: features are missing or do not fit, or have no weights where they should; nothing was sent.
        """
        parts = self._features(features)
        if self._is_weighted and features.weights_or_none() is None:
            raise InvalidInputError("this collection is_weighted, but the features have no weights")
        looked_up = self._look_up(self._ids(parts))
        pooled = [block for config in self._bag_configs for block in self._pool(config, looked_up[config.name], parts)]
        names = [name for config in self._configs for name in self._results[config.name]]
        return KeyedTensor(names, [block.shape[1] for block in pooled], torch.cat(pooled, dim=1))

    def _pool(self, config: EmbeddingBagConfig, rows: tuple[Tensor, Tensor], parts: Mapping[str, _Feature]) -> Iterator[Tensor]:
        """One block per feature of the table."""
        mine = [parts[name] for name in config.feature_names]
        weights = torch.cat([one.weights for one in mine if one.weights is not None]).to(torch.float32) if self._is_weighted else None
        pooled = pool(rows, torch.cat([one.lengths for one in mine]), config.pooling, weights)
        yield from torch.split(pooled, [len(one.lengths) for one in mine])


class EmbeddingCollection(_Collection):
    """Look up the row of every value, for several features at once, as torchrec.EmbeddingCollection.

    Args:
        tables: one config per table. Their dims may differ.
        cluster: where tables are created, or opened if they exist with the same identity.

    Raises:
        InvalidInputError, TableMismatchError: as EmbeddingBagCollection.

    Example:
        >>> import kvemb
        >>> from trainer.torch import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     collection = EmbeddingCollection([EmbeddingConfig(name="page", embedding_dim=4, num_embeddings=None)], cluster)
        ...     sequences = collection(KeyedJaggedTensor.from_lists({"page": [[1, 2**40], [], [3]]}))
        >>> tuple(sequences["page"].values().shape), tuple(sequences["page"].to_padded_dense(2).shape)
        ((3, 4), (3, 2, 4))
    """

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs."""
        return list(self._configs)

    @eager
    def forward(self, features: KeyedJagged) -> dict[str, JaggedTensor]:
        """Look up.

        Args:
            features: a KeyedJaggedTensor, ours or TorchRec's, with at least the tables' features and b bags each.

        Returns:
            Per feature a JaggedTensor with values float32 [m, embedding_dim] in the feature's own bags, and its weights if it has any.

        Raises:
            InvalidInputError: features are missing or do not fit; nothing was sent.
        """
        parts = self._features(features)
        results: dict[str, JaggedTensor] = {}
        for name, (leaf, at) in self._look_up(self._ids(parts)).items():
            mine = [parts[feature] for feature in next(c for c in self._configs if c.name == name).feature_names]
            rows = torch.split(leaf.index_select(0, at), [len(one.ids) for one in mine])
            for result, one, values in zip(self._results[name], mine, rows, strict=True):
                results[result] = JaggedTensor(values, one.lengths, one.weights)
        return results
