"""The n-gram memory of one layer, in Redis, Valkey or memcached, under the names that SGLang's EngramStore has.

    store = LayerEngramStore(256, vocab_size, layer_id=1, dtype=torch.float8_e4m3fn, cluster=kvemb.connect("kvemb.yaml"))
    store.put_sharded(vocab_table)                       # [vocab_size, 256]
    store.get_many(indices, 1, torch.device("cuda"))     # of any shape [*] -> [*, 256]

A layer is one table, and a row the bytes of its numbers in `dtype`: whatever dtype torch has comes back bit for bit. Heads lie side by side
in it: an index counts through all of them. `python examples/engram_sglang.py` shows it on a cluster that it starts.

Source of the names: https://github.com/sgl-project/sglang/pull/20231
"""

from types import TracebackType

import numpy as np
import torch

import kvemb
from kvemb.errors import InvalidInputError

_ROWS_AT_ONCE = 1 << 16


class LayerEngramStore:
    """The store of one layer. Thread-safe.

    Args:
        embedding_dim: numbers of a row.
        vocab_size: rows, of all heads together.
        layer_id: which layer; its table is named for it.
        dtype: of rows.
        cluster: open; it stays open when the store is closed.
    """

    def __init__(
        self, embedding_dim: int, vocab_size: int, layer_id: int, dtype: torch.dtype = torch.float16, *, cluster: kvemb.Cluster
    ) -> None:
        self.embedding_dim, self.vocab_size, self.layer_id, self.dtype = embedding_dim, vocab_size, layer_id, dtype
        self._table: kvemb.Table | None = cluster.create_table(
            f"engram:l{layer_id}", dtype=f"bytes:{embedding_dim * dtype.itemsize}", num_ids=vocab_size, exist_ok=True
        )

    def put_sharded(self, vocab_table: torch.Tensor) -> None:
        """Set all rows: [vocab_size, embedding_dim] of any dtype, which becomes the store's."""
        if vocab_table.shape != (self.vocab_size, self.embedding_dim):
            raise InvalidInputError(f"vocab_table has shape {tuple(vocab_table.shape)}, expected {(self.vocab_size, self.embedding_dim)}")
        table = self._open()
        parts = ((at, vocab_table[at : at + _ROWS_AT_ONCE]) for at in range(0, self.vocab_size, _ROWS_AT_ONCE))
        blocks = ((np.arange(at, at + len(part)), part.to(self.dtype).contiguous().view(torch.uint8).numpy()) for at, part in parts)
        table.cluster.files.import_rows(table.name, blocks)

    def get_one(self, index: int, layer_id: int, device: torch.device) -> torch.Tensor:
        """Return one row, [embedding_dim]; zeros if the index is outside of the table."""
        return self.get_many(torch.tensor(index), layer_id, device)

    def get_many(self, indices: torch.Tensor, layer_id: int, device: torch.device) -> torch.Tensor:
        """Return the rows of indices of any shape: [*indices.shape, embedding_dim] on the device; zeros for those outside of the table."""
        if layer_id != self.layer_id:
            raise InvalidInputError(f"this is the store of layer {self.layer_id}, asked for {layer_id}")
        ids = indices.cpu()
        outside = (ids < 0) | (ids >= self.vocab_size)
        rows = torch.from_numpy(self._open().pull(ids.masked_fill(outside, 0).numpy()))  # uint8 [*, bytes of a row]
        rows[outside] = 0
        return rows.view(self.dtype).to(device)

    def close(self) -> None:
        """Let the table go; its rows stay in the cluster."""
        self._table = None

    def _open(self) -> kvemb.Table:
        if self._table is None:
            raise InvalidInputError(f"the store of layer {self.layer_id} is closed; make another one")
        return self._table

    def __enter__(self) -> "LayerEngramStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def main() -> None:
    """Look 8 x 256 tokens of 16 heads up."""
    vocab_table = torch.randn(100_000, 256, dtype=torch.float16)
    indices = torch.randint(0, len(vocab_table), (8, 256, 16))
    with kvemb.local() as url, kvemb.connect(url) as cluster, LayerEngramStore(256, 100_000, 1, cluster=cluster) as store:
        store.put_sharded(vocab_table)
        found = store.get_many(indices, 1, torch.device("cpu"))
        same = torch.equal(found, vocab_table[indices])
        print(f"{tuple(found.shape)} of {found.dtype}, {'as' if same else 'NOT as'} they were written")


if __name__ == "__main__":
    main()
