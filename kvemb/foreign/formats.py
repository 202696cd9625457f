"""The list of formats that rows are read from: how each is recognised, and who reads it; and what other files are, by name."""

import os
from collections.abc import Mapping

from kvemb.checkpoint.checkpoint_storage import shown
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign.array_files import ArrayRows, open_npy, open_raw, open_safetensors
from kvemb.foreign.foreign_file import ForeignFile, foreign_url, is_local
from kvemb.foreign.foreign_rows import ArrayNames, RowSource
from kvemb.foreign.framework_arrays import CheckpointVariables, TorchArrays
from kvemb.foreign.parquet_folder import ENDINGS, parquet_files
from kvemb.foreign.parquet_rows import ParquetRows
from kvemb.foreign.word_vectors import WordVectors
from kvemb.schema.table_def import TableDef

FORMATS: Mapping[str, tuple[str, ...]] = {
    "npy": (".npy",),
    "safetensors": (".safetensors",),
    "parquet": ENDINGS,
    "torch": (".pt", ".pth"),
    "tensorflow": (".index",),
    "word2vec": (".vec", ".w2v", ".txt", ".bin", ".vec.gz", ".w2v.gz", ".txt.gz", ".bin.gz"),
    "raw": (".raw",),
}
"""By the format's name the endings of its files."""

_PACKED = "packed: unpack it. Word vectors in gzip are read as they are (.vec.gz, .txt.gz, .bin.gz)"
_PICKLE = "a pickle, which could run code, and is not read. Of gensim: vectors.save_word2vec_format('words.vec')"
_OTHER = "of a format that is not read: let the program that knows it write Parquet, safetensors or npy"
_INDEX = "an index of several files: name the one that holds the rows"
_ENDINGS_OF_OTHERS: Mapping[str, tuple[str, ...]] = {
    _PACKED: (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar"),
    "an archive of arrays: write the one that is meant by np.save": (".npz",),
    _PICKLE: (".pkl", ".pickle", ".model", ".kv"),
    _INDEX: (".index.json",),
    _OTHER: (".csv", ".tsv", ".json", ".jsonl", ".orc", ".avro", ".arrow", ".feather", ".h5", ".hdf5", ".keras", ".onnx", ".gguf"),
}
# By how a file begins: the formats that do, and what it is where another one was expected.
_BEGINNINGS: Mapping[bytes, tuple[tuple[str, ...], str]] = {
    b"PK\x03\x04": (("torch",), _PACKED),
    b"\x80\x02\x8a\x0al\xfc\x9cF": (("torch",), _PICKLE),  # of torch before 1.6
    b"\x80": ((), _PICKLE),
    b"\x1f\x8b": (("word2vec",), _PACKED),
    b"BZh91AY": ((), _PACKED),
    b"\xfd7zXZ": ((), _PACKED),
    b"\x28\xb5\x2f\xfd": ((), _PACKED),
    b"PAR1": (("parquet",), "Parquet: say so (format='parquet')"),
    b"\x93NUMPY": (("npy",), "npy: say so (format='npy')"),
    b"\x89HDF": ((), _OTHER),
    b"ARROW1": ((), _OTHER),
    b"\xba\x16\x4f\x2f": (
        (),
        "a model of fastText, which makes vectors of parts of words. Take the .vec beside it, or write model.get_word_vector(word) of "
        "each word of model.get_words() into one",
    ),
}


def open_rows(definition: TableDef, url: str, names: ArrayNames, file_format: str = "") -> RowSource:
    """Open a file of rows of a table, and check that it fits; its rows are not read yet."""
    url = foreign_url(url)
    kind = format_of(url, "parquet" if not file_format and is_local(url) and os.path.isdir(url) else file_format)
    if kind == "raw":
        return ArrayRows(definition, *open_raw(url, names, definition))
    if kind == "tensorflow":
        return ArrayRows(definition, CheckpointVariables(url), names)
    if kind == "parquet":
        return ParquetRows(definition, parquet_files(url), names)
    if kind == "safetensors":
        return ArrayRows(definition, open_safetensors(url), names)
    kind = _by_beginning(url, kind)
    if kind == "npy":
        return ArrayRows(definition, *open_npy(url, names))
    if kind == "torch":
        return ArrayRows(definition, TorchArrays(url), names)
    return WordVectors(definition, url, names)


def format_of(url: str, file_format: str = "") -> str:
    """Return the name of a file's format: as given, else by its ending."""
    if file_format and file_format not in FORMATS:
        raise InvalidInputError(f"format is {file_format!r}; known: {', '.join(FORMATS)}")
    name = url.partition("?")[0] if "://" in url else url
    kind = file_format or next((kind for kind, ends in FORMATS.items() if name.endswith(ends)), "")
    if not kind:
        if other := next((what for what, ends in _ENDINGS_OF_OTHERS.items() if name.endswith(ends)), ""):
            raise InvalidInputError(f"{shown(url)}: is {other}")
        ends = ", ".join(end for ends in FORMATS.values() for end in ends)
        raise InvalidInputError(
            f"{shown(url)}: which format is it? Known by their endings are {ends}; else give one of {', '.join(FORMATS)} (for a folder "
            "parquet)"
        )
    return kind


def _by_beginning(url: str, kind: str) -> str:
    """Return a file's format; refuse one that begins as files of another do, by what it is."""
    with ForeignFile(url) as file:
        begin = file.read(0, min(8, file.size_bytes)).tobytes()
    kinds, what = next((of for magic, of in _BEGINNINGS.items() if begin.startswith(magic)), ((kind,), ""))
    if kind in kinds:
        return kind
    if kinds == ("torch",) and url.endswith(".bin"):  # so Hugging Face names them
        return "torch"
    raise ForeignRowsError(f"{shown(url)}: is {what}")
