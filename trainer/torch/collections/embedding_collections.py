"""EmbeddingBagCollection and EmbeddingCollection: TorchRec's modules of the same names over kvemb tables.

Several tables, each for one or several jagged features; all of them are one pull. Arguments, names of results and their order are
TorchRec's; tables are created in a cluster, so a config also says how they are trained.

Source: torchrec.modules.embedding_modules (interface only).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..lookup.parameter_walks import eager
from ..modules.table_collection import TableCollection
from .jagged_tensors import JaggedTensor, KeyedTensor
from .keyed_recipes import BagRecipe, EmbeddingBagConfig, EmbeddingConfig, KeyedJagged, SequenceRecipe

if TYPE_CHECKING:
    from kvemb.api import Cluster


class EmbeddingBagCollection(TableCollection[BagRecipe]):
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
        >>> from kvemb.torch import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
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

    def __init__(self, tables: Sequence[EmbeddingBagConfig], cluster: "Cluster", *, is_weighted: bool = False) -> None:
        recipe = BagRecipe(tables, is_weighted)  # refuses before a table is created
        super().__init__([config.create(cluster) for config in tables], recipe)

    def is_weighted(self) -> bool:
        """Whether features have weights."""
        return self.recipe.is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs."""
        return list(self.recipe.bag_configs)

    @eager
    def forward(self, features: KeyedJagged) -> KeyedTensor:
        """Look up and pool the features of a KeyedJaggedTensor, ours or TorchRec's: at least the tables', b bags each.

        Returns float32 [b, embedding_dim] per feature, in the order of the tables and their features. Wrong features are refused; nothing
        was sent.
        """
        result = self.recipe.run(features, self._look_up)
        return KeyedTensor(result.keys(), result.length_per_key(), result.values().to(self.dtype))


class EmbeddingCollection(TableCollection[SequenceRecipe]):
    """Look up the row of every value, for several features at once, as torchrec.EmbeddingCollection.

    Args:
        tables: one config per table. Their dims may differ.
        cluster: where tables are created, or opened if they exist with the same identity.

    Raises:
        InvalidInputError, TableMismatchError: as EmbeddingBagCollection.

    Example:
        >>> import kvemb
        >>> from kvemb.torch import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     collection = EmbeddingCollection([EmbeddingConfig(name="page", embedding_dim=4, num_embeddings=None)], cluster)
        ...     sequences = collection(KeyedJaggedTensor.from_lists({"page": [[1, 2**40], [], [3]]}))
        >>> tuple(sequences["page"].values().shape), tuple(sequences["page"].to_padded_dense(2).shape)
        ((3, 4), (3, 2, 4))
    """

    def __init__(self, tables: Sequence[EmbeddingConfig], cluster: "Cluster") -> None:
        recipe = SequenceRecipe(tables)
        super().__init__([config.create(cluster) for config in tables], recipe)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs."""
        return list(self.recipe.configs)

    @eager
    def forward(self, features: KeyedJagged) -> dict[str, JaggedTensor]:
        """Look up the features of a KeyedJaggedTensor, ours or TorchRec's: at least the tables', b bags each.

        Returns per feature float32 [m, embedding_dim] in its own bags, with its weights if any. Wrong features are refused; nothing was
        sent.
        """
        results = self.recipe.run(features, self._look_up)
        return {name: JaggedTensor(of.values().to(self.dtype), of.weights_or_none(), of.lengths()) for name, of in results.items()}
