"""Word vectors: words and their numbers, as word2vec, fastText (.vec) and GloVe write them, as text, a line per word, or binary.

A first line of two numbers says how many words and numbers there are; GloVe leaves it out. pyarrow parses lines, a block at a time; those
with blanks in their word, as GloVe has some, are parsed here. word2vec's binary format has a word, a blank and float32 numbers in turns.
Either may be in gzip. Words are text: they are hashed as `kvemb.hash_ids` does.

Source: https://code.google.com/archive/p/word2vec/ (the format is that of its program's -binary 1).
"""

import gzip
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from kvemb.checkpoint.checkpoint_storage import shown
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign.foreign_file import ForeignFile, translated
from kvemb.foreign.foreign_rows import ArrayNames, ForeignRows, block_rows, gathered, ids_of, weights_of
from kvemb.process.extras import require_extra
from kvemb.schema.table_def import TableDef

_HEAD_BYTES, _PARSED_BYTES = 4 << 20, 16 << 20
_MOST_ODD_LINES = 100_000  # with blanks in their word: they wait in memory
_NUMBER = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")
_LATIN1 = "it is not UTF-8. Convert the file, from Latin-1 if it is that: iconv -f latin1 -t utf-8"


@dataclass(frozen=True)
class _Layout:
    """What the beginning of a file says of the rest; n_words is None where nothing does."""

    n_words: int | None
    is_binary: bool
    blank: str
    ends_in_blank: bool


class WordVectors:
    """The words of a file and their vectors: a RowSource."""

    def __init__(self, definition: TableDef, url: str, names: ArrayNames) -> None:
        self.where, self._url, self._definition = shown(url), url, definition
        if names != ArrayNames():
            raise InvalidInputError(f"{self.where}: word vectors are words and numbers: leave ids, weights and state out")
        with self._stream() as stream, translated(self.where):
            self._layout = _layout(_read(stream, _HEAD_BYTES), definition.dim, self.where)
        self.n_rows = self._layout.n_words or 0

    def blocks(self) -> Iterator[ForeignRows]:
        if self._layout.n_words == 0:
            return iter(())
        return gathered(self._binary() if self._layout.is_binary else self._lines(), block_rows(self._definition))

    @contextmanager
    def _stream(self) -> Iterator[Any]:
        """The bytes of the file, unpacked where they are packed."""
        with ForeignFile(self._url) as file:
            is_gzip = file.read(0, min(2, file.size_bytes)).tobytes() == b"\x1f\x8b"
            yield gzip.GzipFile(fileobj=file.stream) if is_gzip else file.stream

    def _block(self, words: list[str], numbers: np.ndarray[Any, Any], first: int) -> ForeignRows:
        texts = np.array(words, object)
        weights = weights_of(numbers, self._definition, self.where, first=first)
        return ForeignRows(ids_of(texts, self._definition, self.where), weights, None, texts)

    def _lines(self) -> Iterator[ForeignRows]:
        first, odd = 0, list[str]()
        with self._stream() as stream:
            batches = None
            while True:
                try:
                    with translated(self.where):
                        batches = batches or iter(self._reader(stream, odd))
                        batch = next(batches, None)
                    if batch is None:
                        break
                    numbers = [batch.column(str(column)) for column in range(self._definition.dim)]
                    if any(column.null_count for column in numbers):
                        raise ForeignRowsError(f"{self.where}: a number is missing")
                    yield self._block(batch.column("word").to_pylist(), np.stack([column.to_numpy() for column in numbers], axis=1), first)
                except ForeignRowsError as error:
                    self._say_which(error)
                first += batch.num_rows
        if odd:
            yield self._odd_block(sorted(odd), first)

    def _reader(self, stream: Any, odd: list[str]) -> Any:
        pa, csv, layout = require_extra("pyarrow"), require_extra("pyarrow.csv"), self._layout
        names = ["word", *map(str, range(self._definition.dim)), *(["behind"] if layout.ends_in_blank else [])]
        numbers = {str(column): pa.float32() for column in range(self._definition.dim)}

        def keep(row: Any) -> str:
            """Of a line with more blanks: leave it to `_odd_block`."""
            if row.actual_columns < row.expected_columns or len(odd) == _MOST_ODD_LINES:
                return "error"
            odd.append(row.text)
            return "skip"

        return csv.open_csv(
            stream,
            csv.ReadOptions(column_names=names, skip_rows=int(layout.n_words is not None), block_size=_PARSED_BYTES),
            csv.ParseOptions(delimiter=layout.blank, quote_char=False, double_quote=False, invalid_row_handler=keep),
            csv.ConvertOptions(
                column_types={"word": pa.string(), **numbers, "behind": pa.string()}, include_columns=names[: len(numbers) + 1]
            ),
        )

    def _odd_block(self, lines: list[str], first: int) -> ForeignRows:
        """The rows of lines whose word has blanks: the last numbers of each are its vector."""
        split = [self._split(line.encode()) for line in lines]
        if any(problem for _, problem in split):
            self._say_which(ForeignRowsError(f"{self.where}: has lines of other lengths than its first one"))
        numbers = np.array([[float(number) for number in fields[1:]] for fields, _ in split])
        return self._block([fields[0].decode() for fields, _ in split], numbers, first)

    def _split(self, line: bytes) -> tuple[list[bytes], str]:
        """Return the word of a line and its numbers, and what is wrong with them, "" if nothing is."""
        blank, dim = self._layout.blank.encode(), self._definition.dim
        fields = line.rstrip(b"\r\n").removesuffix(blank if self._layout.ends_in_blank else b"").rsplit(blank, dim)
        if len(fields) <= dim:
            return fields, f"has {len(fields) - 1} numbers, expected {dim}"
        if blank in fields[0] and _NUMBER.fullmatch(fields[0].rpartition(blank)[2]):
            return fields, f"has more than {dim} numbers"
        if wrong := [field for field in fields[1:] if not _NUMBER.fullmatch(field)]:
            return fields, f"holds {wrong[0].decode(errors='replace')!r}, expected a number"
        return fields, "" if _is_utf8(fields[0]) else _LATIN1

    def _say_which(self, error: ForeignRowsError) -> NoReturn:
        """Raise the error, with the first line that is wrong if one is found: lines are read once more, one by one."""
        with suppress(Exception), self._stream() as stream:
            for number, line in enumerate(stream, 1):
                if (number == 1 and self._layout.n_words is not None) or not line.strip(b"\r\n"):
                    continue
                fields, problem = self._split(line)
                if problem:
                    word = fields[0].decode(errors="replace")[:60]
                    error = ForeignRowsError(f"{self.where}: line {number}, of the word {word!r}: {problem}")
                    break
        raise error

    def _binary(self) -> Iterator[ForeignRows]:
        n_words, size, step = self.n_rows, 4 * self._definition.dim, block_rows(self._definition)
        words, vectors, done = list[str](), list[bytes](), 0
        with self._stream() as stream:
            with translated(self.where):
                rest = _read(stream, _PARSED_BYTES)
            at = rest.index(b"\n") + 1
            while done < n_words:
                end = rest.find(b" ", at)
                if end < 0 or end + size >= len(rest):  # the last byte of the vector lies at end + size
                    with translated(self.where):
                        more = _read(stream, _PARSED_BYTES)
                    if not more:
                        raise ForeignRowsError(f"{self.where}: ends in word {done} of {n_words}: it is cut off")
                    rest, at = rest[at:] + more, 0
                    continue
                words.append(self._decoded(rest[at:end].lstrip(b"\n"), done))
                vectors.append(rest[end + 1 : end + 1 + size])
                at, done = end + 1 + size, done + 1
                if len(words) == step or done == n_words:
                    yield self._block(words, np.frombuffer(b"".join(vectors), "<f4").reshape(-1, size // 4), done - len(words))
                    words, vectors = [], []
            with translated(self.where):
                if (rest[at:] + _read(stream, 2)).strip(b"\n"):
                    raise ForeignRowsError(f"{self.where}: goes on behind the {n_words} words of its head: damaged, or of another dim")

    def _decoded(self, word: bytes, number: int) -> str:
        if not _is_utf8(word):
            raise ForeignRowsError(f"{self.where}: word {number} is {word[:60]!r}: {_LATIN1}")
        return word.decode()


def _read(stream: Any, n_bytes: int) -> bytes:
    """Read so many bytes, fewer at the end: a stream may give less at a time."""
    pieces, left = list[bytes](), n_bytes
    while left and (piece := stream.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _layout(head: bytes, dim: int, where: str) -> _Layout:
    """Tell from the first bytes how a file is laid out; refuse one of another dim, or of something else."""
    counts = re.match(rb"(\d+) (\d+)\r?\n", head)
    n_words = int(counts[1]) if counts else None
    if counts and int(counts[2]) != dim and n_words:
        raise ForeignRowsError(f"{where}: its head says vectors of {int(counts[2])} numbers, expected {dim}")
    rest = head[counts.end() :] if counts else head
    line = rest.partition(b"\n")[0].rstrip(b"\r")
    blank = b"\t" if b"\t" in line else b" "
    ends_in_blank = line.endswith(blank)
    fields = line.removesuffix(blank).split(blank)
    n_numbers = next((n for n, field in enumerate(reversed(fields[1:])) if not _NUMBER.fullmatch(field)), len(fields) - 1)
    if n_words and n_numbers < dim and (_CONTROL.search(rest, 0, 64 + 4 * dim) or not _is_utf8(line)):
        return _Layout(n_words, True, "", False)
    if n_words != 0 and n_numbers != dim:
        raise ForeignRowsError(f"{where}: its first word has {n_numbers} numbers, expected {dim}; it begins with {line[:60]!r}")
    return _Layout(n_words, False, blank.decode(), ends_in_blank)
