"""Word vectors as text: a line per word, of the word and its numbers, as word2vec, fastText (.vec) and GloVe write them.

A first line of two numbers says how many words and numbers there are; GloVe leaves it out. pyarrow parses the lines, a block at a time.
Words are text: they are hashed as `kvemb.hash_ids` does.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvemb.checkpoint.checkpoint_storage import shown
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign.foreign_file import ForeignFile, translated
from kvemb.foreign.foreign_rows import ArrayNames, ForeignRows, block_rows, gathered, ids_of, weights_of
from kvemb.process.extras import require_extra
from kvemb.schema.table_def import TableDef

_HEAD_BYTES, _PARSED_BYTES = 4 << 20, 16 << 20


class WordVectors:
    """The words of a file and their vectors: a RowSource.

    Raises:
        ForeignRowsError: it is missing, or its vectors are not of the table's dim.
        InvalidInputError: names are given, which text has not.
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, definition: TableDef, url: str, names: ArrayNames) -> None:
        self.where, self._url, self._definition = shown(url), url, definition
        if names != ArrayNames():
            raise InvalidInputError(f"{self.where}: word vectors are words and numbers: leave ids, weights and state out")
        with ForeignFile(url) as file:
            head = file.read(0, min(_HEAD_BYTES, file.size_bytes)).tobytes()
        first, _, rest = head.partition(b"\n")
        counts = first.split()
        self._has_head = len(counts) == 2 and all(count.isdigit() for count in counts)
        self.n_rows = int(counts[0]) if self._has_head else 0
        line = (rest if self._has_head else head).partition(b"\n")[0]
        self._ends_in_blank = line.rstrip(b"\r").endswith(b" ")
        dim = len(line.split()) - 1
        if (self.n_rows or not self._has_head) and dim != definition.dim:
            raise ForeignRowsError(f"{self.where}: its first word has {max(0, dim)} numbers, expected {definition.dim}")

    def blocks(self) -> Iterator[ForeignRows]:
        """See `RowSource.blocks`."""
        return gathered(self._blocks(), block_rows(self._definition))

    def _blocks(self) -> Iterator[ForeignRows]:
        first = 0
        with ForeignFile(self._url) as file:
            with translated(self.where):
                reader = self._reader(file) if self.n_rows or not self._has_head else ()
            batches = iter(reader)
            while True:
                with translated(self.where):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield self._block(batch, first)
                first += batch.num_rows

    def _reader(self, file: ForeignFile) -> Any:
        pa, csv = require_extra("pyarrow"), require_extra("pyarrow.csv")
        names = ["word", *map(str, range(self._definition.dim)), *(["behind"] if self._ends_in_blank else [])]
        numbers = {str(column): pa.float32() for column in range(self._definition.dim)}
        return csv.open_csv(
            file.stream,
            csv.ReadOptions(column_names=names, skip_rows=int(self._has_head), block_size=_PARSED_BYTES),
            csv.ParseOptions(delimiter=" ", quote_char=False, double_quote=False),
            csv.ConvertOptions(
                column_types={"word": pa.string(), **numbers, "behind": pa.string()}, include_columns=names[: len(numbers) + 1]
            ),
        )

    def _block(self, batch: Any, first: int) -> ForeignRows:
        numbers = [batch.column(str(column)) for column in range(self._definition.dim)]
        if any(column.null_count for column in numbers):
            raise ForeignRowsError(f"{self.where}: a number is missing in words {first} to {first + batch.num_rows}")
        table = np.stack([column.to_numpy() for column in numbers], axis=1)
        weights = weights_of(table, self._definition, self.where, first=first)
        words = np.array(batch.column("word").to_pylist(), object)
        return ForeignRows(ids_of(words, self._definition, self.where), weights, None)
