"""The n-gram memory of a language model, in Redis, Valkey or memcached, under the names that Mooncake's EngramStore has.

    store = EngramStore({1: EngramStoreConfig([17, 19], 264)}, kvemb.connect("kvemb.yaml"))
    store.populate(1, [first_head, second_head])         # uint8 [17, 264], [19, 264]
    store.lookup_into(1, row_ids, output)                # int64 [B, L, H] -> uint8 [B, L, H, 264], in place

Each head is a table of opaque rows, and a look-up of all heads is one call: one round trip to each storage node, whatever H is. The output
needs no registration. `python examples/engram_mooncake.py` shows it on a cluster that it starts.

Source of the names: https://github.com/kvcache-ai/Mooncake, docs/source/design/store/engram.md
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import kvemb
from kvemb.errors import InvalidInputError, UnknownTableError


@dataclass
class EngramStoreConfig:
    """The layout of one layer: rows of each head, bytes of a row."""

    table_vocab_sizes: list[int] = field(default_factory=list)
    row_bytes: int = 0


class EngramStore:
    """All Engram layers of a model. Thread-safe.

    Args:
        layers: by the layer's number.
        store: an open cluster of kvemb.
    """

    def __init__(self, layers: Mapping[int, EngramStoreConfig], store: kvemb.Cluster) -> None:
        if not layers:
            raise InvalidInputError("give at least one layer")
        self._layers, self._cluster = dict(layers), store

    def populate(self, layer_id: int, embedding_buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Create the tables of a layer, and set their rows; uint8 [N_h, row_bytes] of each head.

        Raises:
            InvalidInputError: shapes do not fit, or a table is there already: `remove_from_store` first. No row was set.
        """
        layer, names = self._layers[layer_id], self.get_store_keys(layer_id)
        expected = [(n, layer.row_bytes) for n in layer.table_vocab_sizes]
        got = [buffer.shape for buffer in embedding_buffers]
        if got != expected:
            raise InvalidInputError(f"layer {layer_id}: buffers have shapes {got}, expected {expected}")
        for name, n_rows in zip(names, layer.table_vocab_sizes, strict=True):
            self._cluster.create_table(name, dtype=f"bytes:{layer.row_bytes}", num_ids=n_rows)
        for name, rows in zip(names, embedding_buffers, strict=True):
            self._cluster.files.import_rows(name, (np.arange(len(rows)), rows))

    def lookup_into(self, layer_id: int, row_ids: NDArray[np.int64], output: NDArray[np.uint8]) -> None:
        """Fill `output`, uint8 [B, L, H, row_bytes], with the rows of `row_ids`, int64 [B, L, H]: of head h from table h.

        Raises:
            InvalidInputError: shapes or dtypes do not fit, or an id is outside of its table; nothing was asked.
        """
        names = self.get_store_keys(layer_id)
        if row_ids.ndim != 3 or row_ids.shape[2] != len(names):
            raise InvalidInputError(f"layer {layer_id}: row_ids have shape {row_ids.shape}, expected (B, L, {len(names)})")
        ids = {name: row_ids[:, :, head] for head, name in enumerate(names)}
        self._cluster.pull_versions(ids, out={name: output[:, :, head] for head, name in enumerate(names)})

    def remove_from_store(self, layer_id: int, force: bool = False) -> None:
        """Drop the tables of a layer, with their rows; with `force` those that are not there are fine."""
        for name in self.get_store_keys(layer_id):
            try:
                self._cluster.drop_table(name)
            except UnknownTableError:
                if not force:
                    raise

    def get_layer_ids(self) -> list[int]:
        return list(self._layers)

    def get_table_vocab_sizes(self, layer_id: int) -> list[int]:
        return self._layers[layer_id].table_vocab_sizes

    def get_store_keys(self, layer_id: int) -> list[str]:
        """The names of the heads' tables."""
        return [f"engram:l{layer_id}:h{head}" for head in range(self.get_num_heads(layer_id))]

    def get_num_heads(self, layer_id: int) -> int:
        return len(self._layers[layer_id].table_vocab_sizes)

    def get_row_bytes(self, layer_id: int) -> int:
        return self._layers[layer_id].row_bytes


def main() -> None:
    """Two heads, 16,384 look-ups of both in one call."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 256, (n, 264), dtype=np.uint8) for n in (50_021, 50_023)]
    with kvemb.local() as url, kvemb.connect(url) as cluster:
        store = EngramStore({1: EngramStoreConfig([len(head) for head in heads], 264)}, cluster)
        store.populate(1, heads)
        row_ids = rng.integers(0, 50_000, (8, 2048, 2))
        output = np.empty((*row_ids.shape, store.get_row_bytes(1)), np.uint8)
        store.lookup_into(1, row_ids, output)
        same = all((output[:, :, h] == head[row_ids[:, :, h]]).all() for h, head in enumerate(heads))
        print(f"{output.shape[:-1]} rows of {output.shape[-1]} bytes, {'as' if same else 'NOT as'} they were written")


if __name__ == "__main__":
    main()
