"""Ours under the arguments of a peer: what its tests make without a cluster gets one in this process."""

from collections.abc import Sequence
from typing import Any

from creating_cluster import CreatingCluster

from trainer import torch as ours


def _tables(kind: type[Any], tables: Sequence[Any], fields: Sequence[str]) -> list[Any]:
    """TorchRec's configs as ours."""
    return [kind(**{field: getattr(table, field) for field in ("name", "embedding_dim", "num_embeddings", *fields)}) for table in tables]


class EmbeddingBagCollection(ours.EmbeddingBagCollection):
    """As TorchRec makes one."""

    def __init__(self, tables: Sequence[Any], is_weighted: bool = False, device: Any = None) -> None:
        configs = _tables(ours.EmbeddingBagConfig, tables, ("feature_names", "pooling"))
        super().__init__(configs, CreatingCluster(), is_weighted=is_weighted)


class EmbeddingCollection(ours.EmbeddingCollection):
    """As TorchRec makes one."""

    def __init__(self, tables: Sequence[Any], device: Any = None, need_indices: bool = False) -> None:
        super().__init__(_tables(ours.EmbeddingConfig, tables, ("feature_names",)), CreatingCluster())
