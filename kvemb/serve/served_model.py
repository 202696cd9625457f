"""Model: the rows of a request and the dense part that takes them, of one view.

A dense part is a program with rows among its inputs: of ONNX, run by onnxruntime, or of torch.export. Which table an input's rows are of
stands in the file (`kvemb.torch.export_dense`), or is told. Where the part is that of a view, it is loaded before the view is used; rows
and part are then switched together.
"""

import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.errors import ConfigError, InvalidInputError, UnknownViewError
from kvemb.net.deadline import Deadline
from kvemb.serve.row_sources import RowSet, ViewSource
from kvemb.serve.serving_client import ServingClient

T = TypeVar("T")
_LOAD_S = 30.0
_Arrays = dict[str, NDArray[Any]]
_ONNX_DTYPES = {"float": "float32", "double": "float64"}  # others are named as NumPy names them


class _Program(Protocol):
    """A program: `kvemb.torch.DenseProgram`, which describes the attributes, or one of ONNX."""

    about: dict[str, Any]
    inputs: set[str] | None

    def computed(self, inputs: _Arrays) -> _Arrays: ...
    def run(self, inputs: _Arrays) -> Any: ...


class _Part:
    """A program, and which of its inputs take rows of which table."""

    def __init__(self, program: _Program, inputs: Mapping[str, str] | None) -> None:
        about, all_inputs = program.about, program.inputs
        if (inputs is None) != bool(about):
            what = "names its inputs of rows itself; leave `inputs` out" if about else "does not say which inputs take rows; give `inputs`"
            raise ConfigError(f"the dense file {what}")
        told = about["rows"] if about else {name: {"table": table, "ids": name} for name, table in (inputs or {}).items()}
        if all_inputs is not None and not told.keys() <= all_inputs:
            raise ConfigError(f"the dense file has the inputs {sorted(all_inputs)}; `inputs` names {sorted(told)}")
        self.program, self.tables = program, {name: one["table"] for name, one in told.items()}
        self._given = {name: one["ids"] for name, one in told.items() if one["ids"]}
        self._callers = set(about["inputs"]) if about else all_inputs

    def asked(self, inputs: _Arrays) -> _Arrays:
        """Return the ids of each input of rows. Raises InvalidInputError: an input is missing, or there is no such."""
        wanted = set(self.tables) if self._callers is None else self._callers
        if not wanted <= inputs.keys() or (self._callers is not None and not inputs.keys() <= wanted):
            raise InvalidInputError(f"the dense part has the inputs {sorted(wanted)}; got {sorted(inputs)}")
        return {name: inputs[ids] for name, ids in self._given.items()} | _ran(lambda: self.program.computed(inputs), inputs)


class Model:
    """Answers requests: looks rows up, and runs the dense part on them. Thread-safe.

    The first call takes seconds, in which the part's runtime makes itself ready: call it once before requests come.

    Args:
        client: that looks rows up; closed by its owner.
        dense: path of the dense part, .onnx or .pt2; None for that of the view, with which it is switched.
        inputs: by name of an input that takes rows, float32 [*ids.shape, dim], the table. None for a file that tells it itself.

    Raises:
        ConfigError: the file cannot be used, or there is none, or the package that runs it is not installed.

    Example: see docs/serve.md.
    """

    def __init__(self, client: ServingClient, dense: str | os.PathLike[str] | None = None, inputs: Mapping[str, str] | None = None) -> None:
        self._client, self._inputs = client, inputs
        self._fixed = None if dense is None else _loaded(os.fspath(dense), _content(dense), inputs)
        if self._fixed is None:
            if not isinstance(client.source, ViewSource):
                raise ConfigError("Model: give the path of the dense part; only a view has one of its own")
            self._part(client.source.now())
            client.source.before_use.append(self._load)

    def __call__(
        self, ids: Mapping[str, ArrayLike], /, *, return_view: bool = False, timeout_ms: float | None = None, **others: ArrayLike
    ) -> Any:
        """Answer a request.

        Returns:
            What the part returns, as arrays: one, a tuple, or a dict; with `return_view` (that, name).
        """
        inputs = {name: np.asarray(value) for name, value in {**ids, **others}.items()}
        deadline = Deadline.of_caller(self._client.timeout_s if timeout_ms is None else timeout_ms / 1e3)
        rows = self._client.source.now()
        try:
            answer = self._answer(rows, inputs, timeout_ms)
        except UnknownViewError as error:  # it was dropped meanwhile
            rows = self._client.source.again(rows, error, deadline)
            answer = self._answer(rows, inputs, 1e3 * max(deadline.remaining_s(), 1e-3))
        return (answer, rows.view) if return_view else answer

    def __repr__(self) -> str:
        return f"<Model of {'the view' if self._fixed is None else 'a file'} over {self._client!r}>"

    def _answer(self, rows: RowSet, inputs: _Arrays, timeout_ms: float | None) -> Any:
        part = self._part(rows)
        asked = part.asked(inputs)
        by_table: dict[str, list[str]] = {}
        for name, table in part.tables.items():
            by_table.setdefault(table, []).append(name)
        wanted = {table: np.concatenate([asked[name].reshape(-1) for name in names]) for table, names in by_table.items()}
        found = self._client.lookup_in(rows, wanted, timeout_ms=timeout_ms)
        given: _Arrays = {}
        for table, names in by_table.items():
            ends = np.cumsum([asked[name].size for name in names])
            for name, some in zip(names, np.split(found[table], ends[:-1]), strict=True):
                given[name] = some.reshape(*asked[name].shape, some.shape[1])
        return _ran(lambda: part.program.run({**inputs, **given}), inputs)

    def _part(self, rows: RowSet) -> _Part:
        """Return the dense part that goes with rows; load it if that was not done."""
        found: _Part = self._fixed or rows.made(self._load)
        return found

    def _load(self, rows: RowSet) -> _Part:
        projected = rows.projected
        if projected is None or projected.view is None or projected.view.dense is None:
            raise ConfigError(f"view {rows.view!r} has no dense file; make one with --model, or give Model the path of a file")
        return _loaded(projected.view.dense.name, projected.dense(Deadline.after(_LOAD_S)), self._inputs)


class _OnnxProgram:
    """A dense part of ONNX. Thread-safe."""

    def __init__(self, content: bytes) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError("a dense part of ONNX is run by onnxruntime: pip install onnxruntime") from error
        try:
            self._session = onnxruntime.InferenceSession(content)
        except Exception as error:  # its own are of many kinds
            raise ConfigError(f"the dense file is no ONNX model that this onnxruntime runs: {error}") from error
        self.about: dict[str, Any] = json.loads(self._session.get_modelmeta().custom_metadata_map.get("kvemb", "{}"))
        types = {one.name: one.type.removeprefix("tensor(").removesuffix(")") for one in self._session.get_inputs()}
        self._dtypes = {name: _ONNX_DTYPES.get(dtype, dtype) for name, dtype in types.items()}
        self.inputs: set[str] | None = set(self._dtypes)

    def computed(self, inputs: _Arrays) -> _Arrays:
        return {}

    def run(self, inputs: _Arrays) -> Any:
        taken = {name: np.asarray(inputs[name], dtype) for name, dtype in self._dtypes.items()}  # ids that only look rows up are none
        found = self._session.run(None, taken)
        return found[0] if len(found) == 1 else tuple(found)


def _ran(program: Callable[[], T], inputs: _Arrays) -> T:
    try:
        return program()
    except Exception as error:  # torch and onnxruntime raise many kinds, an AssertionError among them
        shapes = ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in sorted(inputs.items()))
        raise InvalidInputError(f"the dense part does not run on these inputs: {shapes}. Its program says: {error}") from error


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the dense file {path} cannot be read: {error.strerror}") from error


def _loaded(name: str, content: bytes, inputs: Mapping[str, str] | None) -> _Part:
    if name.endswith(".onnx"):
        return _Part(_OnnxProgram(content), inputs)
    if name.endswith(".pt2"):
        bridge: Any = import_module("kvemb.torch")  # only who serves such a part has torch
        return _Part(bridge.DenseProgram(content), inputs)
    raise ConfigError(f"the dense file {name!r} ends in neither .onnx nor .pt2, which say how it is run")
