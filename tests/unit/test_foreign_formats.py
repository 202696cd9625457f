"""Readers of foreign formats, whole files at a time: what they yield bit for bit, and what they refuse, without any cluster."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.errors import ConfigError, ForeignRowsError, InvalidInputError
from kvemb.foreign import foreign_rows
from kvemb.foreign.foreign_rows import ArrayNames, ForeignRows
from kvemb.foreign.formats import open_rows
from kvemb.schema.table_def import TableDef

pytest.importorskip("pyarrow")
USER = TableDef("user", 3, kvemb.optim.adagrad(), kvemb.init.zeros())
N = 100
ROWS = np.random.default_rng(5).standard_normal((N, 3), dtype=np.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_rows, "BLOCK_BYTES", 16 * (4 * 6 + 8))


def read(path: object, definition: TableDef = USER, file_format: str = "", **names: object) -> ForeignRows:
    source = open_rows(definition, str(path), ArrayNames(**names), file_format)  # type: ignore[arg-type]
    whole = ForeignRows.concatenate(list(source.blocks()))
    assert source.n_rows in (0, len(whole))
    return whole


def safetensors(**tensors: tuple[str, np.ndarray]) -> bytes:
    head, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, array) in tensors.items():
        head[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}  # type: ignore[assignment]
        data += array.tobytes()
    text = json.dumps(head).encode() + b"  "
    return struct.pack("<Q", len(text)) + text + data


# --- safetensors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("F64", "<f8"), ("F32", "<f4"), ("F16", "<f2"), ("BF16", "bfloat16"), ("I8", "|i1")])
def test_safetensors_of_every_dtype_come_as_they_are(tmp_path: Path, name: str, dtype: str) -> None:
    given = round_nearest(ROWS, dtype) if dtype == "bfloat16" else (ROWS * 10).astype(dtype)
    (tmp_path / "m.safetensors").write_bytes(safetensors(**{"a.weight": (name, given), "bias": ("F32", ROWS[0])}))
    got = read(tmp_path / "m.safetensors")
    expected = to_float32(given, dtype) if dtype == "bfloat16" else given.astype(np.float32)
    assert (got.weights.tobytes(), got.ids.tolist()) == (expected.tobytes(), list(range(N)))


def test_safetensors_with_ids_and_state(tmp_path: Path) -> None:
    ids = np.arange(N)[::-1].copy() - 50
    whole = safetensors(id=("I64", ids), weights=("F32", ROWS), sums=("F32", ROWS + 1))
    (tmp_path / "m.safetensors").write_bytes(whole)
    for state in ("sums", {"sum": "sums"}):
        got = read(tmp_path / "m.safetensors", state=state)
        assert got.ids.view(np.int64).tolist() == ids.tolist()
        assert got.state is not None
        assert got.state.tobytes() == (ROWS + 1).tobytes()
    with pytest.raises(InvalidInputError, match="has state sum; got total"):
        read(tmp_path / "m.safetensors", state={"total": "sums"})
    with pytest.raises(ForeignRowsError, match=r"no array 'w'; there are 'id' \[100\], 'weights'"):
        read(tmp_path / "m.safetensors", weights="w")


def two_tables(data: bytes) -> bytes:
    return safetensors(a=("F32", ROWS), b=("F32", ROWS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "cut off"),
        (lambda data: data + b"x", "cut off, or damaged"),
        (lambda data: b"", "no safetensors file, or cut off"),
        (lambda data: struct.pack("<Q", 1 << 60) + data[8:], "no safetensors file"),
        (lambda data: data[:8] + b"x" + data[9:], "head is damaged"),
        (lambda data: data.replace(b"[100, 3]", b"[100, 4]"), "head is damaged"),
        (lambda data: data.replace(b"[100, 3]", b"[-10, 3]"), "head is damaged"),
        (lambda data: data.replace(b'"F32"', b'"F99"'), "which array holds the weights"),
        (two_tables, "which array holds the weights"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(change(safetensors(w=("F32", ROWS))))
    with pytest.raises(ForeignRowsError, match=message):
        read(tmp_path / "m.safetensors")


# --- torch --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_is_read_by_the_names_of_its_tensors(tmp_path: Path, dtype: str, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    given = torch.from_numpy(ROWS).to(getattr(torch, dtype))
    held = {"state_dict": {"user.weight": given, "bias": given[0]}, "optimizer": {"state": {0: {"step": 3, "sum": given * 2}}}, "lr": 0.1}
    torch.save(held, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    got = read(tmp_path / "m.pt", weights="state_dict.user.weight", state={"sum": "optimizer.state.0.sum"})
    assert got.weights.tobytes() == given.float().numpy().tobytes()
    assert got.state is not None
    assert got.state.tobytes() == (given * 2).float().numpy().tobytes()


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this ran",)


def test_a_file_of_torch_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.from_numpy(ROWS), "x": Harmful()}, tmp_path / "m.pt")
    with pytest.raises(ForeignRowsError, match="cannot be read"):
        read(tmp_path / "m.pt")
    assert "this ran" not in capsys.readouterr().out
    torch.save({"w": torch.from_numpy(ROWS)}, tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes((tmp_path / "m.pt").read_bytes()[:-100])
    with pytest.raises(ForeignRowsError, match=r"m\.pt: cannot be read"):
        read(tmp_path / "m.pt")


def test_a_library_that_is_not_there_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.pt").touch()
    for name, path in (("torch", "m.pt"), ("tensorflow", "m.ckpt.index"), ("pyarrow", "m.parquet")):
        with monkeypatch.context() as patched:
            patched.setitem(__import__("sys").modules, name, None)
            patched.setitem(__import__("sys").modules, f"{name}.parquet", None)
            (tmp_path / path).touch()
            with pytest.raises(ConfigError, match=rf"need {name}, not installed in \S+: pip install '{name}"):
                read(tmp_path / path)


# --- word vectors -------------------------------------------------------------------------------------------------------------------

WORDS = [f"wörd{i}" for i in range(N - 1)] + ['"quo"te']


def word_lines(behind: str = "") -> str:
    return "".join(f"{word} {' '.join(map(repr, row.tolist()))}{behind}\n" for word, row in zip(WORDS, ROWS, strict=True))


@pytest.mark.parametrize("behind", ["", " "])
@pytest.mark.parametrize("head", ["", f"{N} 3\n"])
def test_word_vectors_are_read_with_and_without_a_head(tmp_path: Path, head: str, behind: str) -> None:
    (tmp_path / "w.vec").write_text(head + word_lines(behind), encoding="utf-8")
    got = read(tmp_path / "w.vec")
    assert got.weights.tobytes() == ROWS.tobytes()
    assert got.ids.view(np.int64).tolist() == kvemb.hash_ids(WORDS).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2\n", "has 2 numbers, expected 3"),
        ("a 1 2 3\nb 1 2\n", "cannot be read"),
        ("a 1 2 3\nb 1 x 3\n", "cannot be read"),
        ("a 1 2 3\nb 1 nan 3\n", "missing|NaN"),
        ("a 1 2 3\nb 1 inf 3\n", "infinity"),
        ("", "has 0 numbers"),
    ],
)
def test_wrong_word_vectors_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.txt").write_text(text)
    with pytest.raises(ForeignRowsError, match=message):
        read(tmp_path / "w.txt")
    with pytest.raises(InvalidInputError, match="leave ids, weights and state out"):
        read(tmp_path / "w.txt", ids="word")


# --- any file system ----------------------------------------------------------------------------------------------------------------


def test_files_are_read_from_any_file_system(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    np.save(tmp_path / "rows.npy", ROWS)
    memory = fsspec.filesystem("memory")
    for name, data in (
        ("rows.npy", (tmp_path / "rows.npy").read_bytes()),
        ("m.safetensors", safetensors(w=("F32", ROWS))),
        ("w.vec", word_lines().encode()),
    ):
        memory.pipe_file(f"/foreign/{name}", data)
        assert read(f"memory://foreign/{name}").weights.tobytes() == ROWS.tobytes()
    with pytest.raises(ForeignRowsError, match=r"memory://foreign/none\.npy"):
        read("memory://foreign/none.npy")
    with pytest.raises(ForeignRowsError, match="nosuch"):
        read("nosuch://foreign/rows.npy")
