"""Readers of foreign formats, whole files at a time: what they yield bit for bit, and what they refuse, without any cluster."""

import gzip
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.arrays.rounding import from_int8, round_nearest, to_float32, to_int8
from kvemb.errors import ConfigError, ForeignRowsError, InvalidInputError
from kvemb.foreign import foreign_rows, word_vectors
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
    (tmp_path / "m.safetensors").write_bytes(
        safetensors(**{"a.weight": (name, given), **({} if name == "I8" else {"bias": ("F32", ROWS[0])})})
    )
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
        (lambda data: data.replace(b'"F32"', b'"F99"'), "'w' holds F99, which is not read"),
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
    with pytest.raises(ForeignRowsError, match=r"holds print .* no code of a file is run here.*torch\.save\(model\.state_dict"):
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
        ("a 1 2\n", "has 2 numbers, expected 3; it begins with b'a 1 2'"),
        ("a,1,2,3\n", "has 0 numbers, expected 3; it begins with b'a,1,2,3'"),
        ("a 1 2 3\nb 1 2\n", "line 2, of the word 'b': has 2 numbers, expected 3"),
        ("a 1 2 3\nb 1 2 3 4\n", "line 2, of the word 'b 1': has more than 3 numbers"),
        ("a 1 2 3\nb c 1 x 3\n", "line 2, of the word 'b c': holds 'x', expected a number"),
        ("a 1 2 3\nb 1 x 3\n", "line 2, of the word 'b': holds 'x', expected a number"),
        ("a 1 2 3\nb 1  3\n", "line 2, of the word 'b': holds '', expected a number"),
        ("a 1 2 3\nb 1 nan 3\n", "line 2, of the word 'b': holds 'nan', expected a number"),
        ("a 1 2 3\nb 1 inf 3\n", "line 2, of the word 'b': holds 'inf'"),
        ("a 1 2 3\ncafé 1 2 3\n", r"line 2, of the word 'caf.': it is not UTF-8.*iconv -f latin1"),
        ("2 3\na 1 2 3\nb 1 x 3\n", "line 3, of the word 'b': holds 'x'"),
        ("2 4\na 1 2 3 4\n", "its head says vectors of 4 numbers, expected 3"),
        ("", "has 0 numbers"),
    ],
)
def test_wrong_word_vectors_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.txt").write_bytes(text.encode("latin1"))
    with pytest.raises(ForeignRowsError, match=message):
        read(tmp_path / "w.txt")
    with pytest.raises(InvalidInputError, match="leave ids, weights and state out"):
        read(tmp_path / "w.txt", ids="word")


def test_words_with_blanks_as_glove_has_some_are_read(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text(", 1 2 3\n. . . 4 5 6\nat name@domain.com 7 8 9\nend 0 1 2\n")
    got = read(tmp_path / "w.txt")
    assert dict(zip(got.texts.tolist(), got.weights[:, 0].tolist(), strict=True)) == {",": 1, ". . .": 4, "at name@domain.com": 7, "end": 0}
    assert got.ids.view(np.int64).tolist() == kvemb.hash_ids(got.texts).tolist()


def binary(behind: bytes = b"\n", words: list[str] = WORDS, head: str = f"{N} 3\n") -> bytes:
    return head.encode() + b"".join(word.encode() + b" " + row.tobytes() + behind for word, row in zip(words, ROWS, strict=True))


@pytest.mark.parametrize("behind", [b"\n", b""])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("is_binary", [False, True])
def test_word2vec_s_binary_format_and_gzip_are_read(
    tmp_path: Path, behind: bytes, packed: bool, is_binary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_vectors, "_PARSED_BYTES", 50 if is_binary else 500)
    path = tmp_path / ("w.bin" if is_binary else "w.txt") if not packed else tmp_path / ("w.bin.gz" if is_binary else "w.vec.gz")
    data = binary(behind) if is_binary else word_lines().encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    got = read(path)
    assert got.weights.tobytes() == ROWS.tobytes()
    assert got.ids.view(np.int64).tolist() == kvemb.hash_ids(WORDS).tolist()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (binary()[:-5], "ends in word 99 of 100: it is cut off"),
        (binary(head=f"{N - 1} 3\n"), "goes on behind the 99 words of its head"),
        (binary(head=f"{N} 4\n"), "its head says vectors of 4 numbers, expected 3"),
        (gzip.compress(binary())[:-20], "cannot be read: EOFError"),
        (f"{N} 3\ncaf".encode() + b"\xe9 " + bytes(12 * N), r"word 0 is b'caf\\xe9': it is not UTF-8"),
    ],
)
def test_damaged_binary_word_vectors_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "w.bin").write_bytes(data)
    with pytest.raises(ForeignRowsError, match=message):
        read(tmp_path / "w.bin")


# --- what files are that are not read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "begin", "message"),
    [
        ("ft.bin", b"\xba\x16\x4f\x2f", r"a model of fastText.*Take the \.vec beside it"),
        ("kv.bin", b"\x80\x04\x95", "a pickle.*save_word2vec_format"),
        ("w.txt", b"PK\x03\x04", "packed: unpack it"),
        ("w.npy", b"PK\x03\x04", "packed: unpack it"),
        ("w.vec", b"PAR1\x15\x04", r"Parquet: say so \(format='parquet'\)"),
        ("w.pt", b"\x89HDF", "of a format that is not read: let the program that knows it write Parquet"),
        ("w.npy.gz", b"", "packed: unpack it"),
        ("w.npz", b"", "an archive of arrays: write the one that is meant by np.save"),
        ("w.csv", b"", "let the program that knows it write Parquet"),
        ("model.kv", b"", "a pickle.*save_word2vec_format"),
        ("model.safetensors.index.json", b"", "an index of several files: name the one"),
    ],
)
def test_what_is_not_read_is_named_with_the_way_on(tmp_path: Path, name: str, begin: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(begin + bytes(20))
    with pytest.raises((ForeignRowsError, InvalidInputError), match=message):
        read(tmp_path / name)


def test_a_state_dict_that_is_called_bin_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"user.weight": torch.from_numpy(ROWS)}, tmp_path / "pytorch_model.bin")
    assert read(tmp_path / "pytorch_model.bin").weights.tobytes() == ROWS.tobytes()


@pytest.mark.filterwarnings("ignore:.*TorchScript")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("held", ["module", "array", "script"])
def test_torch_s_advice_to_run_a_file_s_code_is_not_handed_on(tmp_path: Path, held: str) -> None:
    torch = pytest.importorskip("torch")
    if held == "script":
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "m.pt")
    else:
        torch.save({"module": torch.nn.Linear(2, 2), "array": {"x": ROWS}}[held], tmp_path / "m.pt")
    what = {"module": r"torch\.nn\.modules\.linear\.Linear", "array": "_reconstruct", "script": "objects"}[held]
    with pytest.raises(ForeignRowsError, match=rf"holds .*{what} beside tensors .*torch\.save\(model\.state_dict\(\), path\)") as raised:
        read(tmp_path / "m.pt")
    assert "weights_only" not in str(raised.value)


# --- numbers that mean others, and ids that stand elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_int8_beside_one_scale_for_each_row_is_multiplied(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values, scale = to_int8(ROWS)
    (tmp_path / "m.safetensors").write_bytes(safetensors(weights=("I8", values), scale=("F32", scale.reshape(shape))))
    assert read(tmp_path / "m.safetensors").weights.tobytes() == from_int8(values, scale).tobytes()


@pytest.mark.parametrize("name", ["I8", "U8", "I32"])
@pytest.mark.parametrize(
    "beside",
    [
        {"weights.scale": ("F32", np.ones((N, 1), np.float32))},
        {"scales": ("F16", np.ones(N, np.float16))},
        {"scale": ("F32", np.ones(3, np.float32))},
        {"scale": ("F32", np.ones((), np.float32))},
        {"scale": ("F32", np.ones(N, np.float32)), "zero_point": ("I8", np.ones(N, np.int8))},
        {"SCB": ("F32", np.ones(N, np.float32))},
    ],
)
def test_integers_that_something_beside_them_may_scale_are_refused(tmp_path: Path, name: str, beside: dict[str, object]) -> None:
    values = (ROWS * 20).astype({"I8": np.int8, "U8": np.uint8, "I32": np.int32}[name])
    (tmp_path / "m.safetensors").write_bytes(safetensors(weights=(name, values), **beside))  # type: ignore[arg-type]
    with pytest.raises(ForeignRowsError, match=r"may have to be multiplied|'scale' has shape"):
        read(tmp_path / "m.safetensors")


def test_a_quantized_tensor_of_torch_is_its_numbers_and_float8_is_refused_by_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings(action="ignore"):
        given = torch.quantize_per_channel(torch.from_numpy(ROWS), torch.full((N,), 0.02), torch.zeros(N), 0, torch.qint8)
        torch.save({"w": given}, tmp_path / "m.pt")
        assert read(tmp_path / "m.pt").weights.tobytes() == given.dequantize().numpy().tobytes()
    for changed, dtype in ((torch.from_numpy(ROWS).to(torch.float8_e4m3fn), "float8_e4m3fn"), (torch.eye(3).to_sparse(), "sparse_coo")):
        torch.save({"w": changed}, tmp_path / "m.pt")
        with pytest.raises(ForeignRowsError, match=f"'w' holds {dtype}, which is not read: write it as float16 or float32"):
            read(tmp_path / "m.pt")


def test_rows_beside_integers_that_may_be_their_ids_are_not_numbered(tmp_path: Path) -> None:
    """As TensorFlow's hash tables are saved: keys and values."""
    whole = safetensors(**{"user-keys": ("I64", np.arange(N) + 7), "user-values": ("F32", ROWS), "bias": ("F32", ROWS[:, 0].copy())})
    (tmp_path / "m.safetensors").write_bytes(whole)
    with pytest.raises(ForeignRowsError, match=r"say which array holds the ids \(ids=\): 'user-keys'\?"):
        read(tmp_path / "m.safetensors")
    assert read(tmp_path / "m.safetensors", ids="user-keys").ids.tolist() == list(range(7, N + 7))


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    whole = safetensors(aa=("F32", ROWS), bb=("F32", ROWS))
    (tmp_path / "m.safetensors").write_bytes(whole.replace(b'"bb"', b'"aa"'))
    with pytest.raises(ForeignRowsError, match="two of its names are the same"):
        read(tmp_path / "m.safetensors")


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


def test_a_url_means_what_it_says(tmp_path: Path) -> None:
    """fsspec takes what stands before '::', and the path of a file:// URL with its escapes."""
    folder = tmp_path / "my run::lr=0.1?x=%20"
    folder.mkdir()
    np.save(folder / "rows.npy", ROWS)
    for url in (folder / "rows.npy", (folder / "rows.npy").as_uri(), (folder / "rows.npy").as_uri().replace("///", "//localhost/")):
        assert read(url).weights.tobytes() == ROWS.tobytes()
    pytest.importorskip("fsspec").filesystem("memory").pipe_file("/sweep/rows.npy", (folder / "rows.npy").read_bytes())
    for url, message in (
        ("memory://sweep::memory/rows.npy", "'::' chains file systems"),
        ("file://elsewhere/rows.npy", "names a file of this machine"),
        ("https://user:secret@localhost:1/rows.npy?signature=secret", r"https://\*\*\*@localhost:1/rows.npy\?\*\*\*"),
    ):
        with pytest.raises((ForeignRowsError, ConfigError), match=message):
            read(url)
