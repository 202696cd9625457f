"""export_dense: the part of a model that is not in tables, as a file that takes rows as inputs; and that file, loaded and run.

Strategy: the model is deep-copied with a stand-in for each module over a table. Two programs are exported of the copy. In the first a
stand-in notes the ids that it was asked for, which are the result: what a model computes of its inputs before it looks rows up (slices,
offsets, hashes) is served as it was trained. In the second it gives the rows that it was given. Both go through torch.export with sizes
left open.
"""

import base64
import copy
import io
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from kvemb.errors import ConfigError, InvalidInputError
from kvemb.process import ForkLock

from ..lookup.table_module import TableModule
from ..modules.embedding import EmbeddingBag, ScaledEmbedding
from ..modules.table_collection import TableCollection
from ..optimizer.sparse_optimizer import leave_out
from .materialize import table_modules

_ABOUT = "kvemb.json"
_loading = ForkLock()  # torch.export.load refuses a second thread
_Arrays = dict[str, NDArray[Any]]


def export_dense(model: nn.Module, inputs: Mapping[str, Tensor], file: str | os.PathLike[str]) -> dict[str, str]:
    """Write the dense part of a model over tables into a file that `kvemb.serve.Model` runs, with rows as inputs.

    The model is not changed; the part is as it computes in eval mode. Rows are not in the file.

    Args:
        model: with Embedding and EmbeddingBag over tables, as `distribute` leaves them.
        inputs: an example of each argument of its forward, tensors by name; at least two of everything, for sizes of one are not left open.
        file: ends in .pt2 (torch.export), or .onnx, which needs the package onnxscript.

    Returns:
        By name of each further input of the part, rows float32 [*ids.shape, dim] of one look-up, the table.

    Raises:
        InvalidInputError: the model has collections or DenseFeatures, or no module over a table. Or, for .onnx, it computes ids itself.
        ConfigError: the file's ending is none of these, or a package is missing.

    Example:
        >>> import kvemb, kvemb.serve, tempfile
        >>> from trainer.torch import Embedding
        >>> file = tempfile.mkdtemp() + "/model.pt2"
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     items = cluster.create_table("items", dim=2, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.constant(0.5))
        ...     export_dense(nn.Sequential(Embedding(items), nn.Flatten()), {"input": torch.tensor([[1, 2], [3, 4], [5, 6]])}, file)
        ...     with kvemb.serve.connect(url) as client:
        ...         kvemb.serve.Model(client, file)({"input": [[7, 8]]})
        {'rows.0': 'items'}
        array([[0.5, 0.5, 0.5, 0.5]], dtype=float32)
    """
    kind = Path(file).suffix
    if kind not in (".pt2", ".onnx"):
        raise ConfigError(f"{file}: end the file's name in .pt2 or .onnx")
    names = sorted(inputs)
    examples = {name: inputs[name] for name in names}
    part, turn = _copied(model)
    with torch.no_grad():
        asked = _Asked(part, turn)(examples)
        tables = {name: turn.tables[name] for name in asked}
        computing = _exported(_Asked(part, turn), examples)
        rows = {name: torch.zeros(*ids.shape, tables[name][1]) for name, ids in asked.items()}
        program = _exported(_Dense(part, turn, tuple(names)), examples | rows)
    given = _given_ids(computing, names)
    about = {
        "inputs": {name: str(tensor.numpy().dtype) for name, tensor in examples.items()},
        "rows": {name: {"table": tables[name][0], "ids": ids} for name, ids in zip(asked, given, strict=True)},
    }
    if kind == ".onnx":
        _save_onnx(program, about, [*names, *rows], file)
    else:
        content = io.BytesIO()
        if not all(given):
            torch.export.save(computing, content)
        about["computing"] = base64.b64encode(content.getvalue()).decode()
        torch.export.save(program, file, extra_files={_ABOUT: json.dumps(about)})
    return {name: table for name, (table, _) in tables.items()}


class DenseProgram:
    """A dense part in the format of torch.export, which need not be of `export_dense`. Thread-safe.

    Args:
        content: of the file.

    Attributes:
        about: what `export_dense` notes: "inputs", the caller's, with their dtypes; "rows", by name of an input of rows its "table" and the
            input that its "ids" are, "" where they are computed. Empty for other files, which are called by keywords.
        inputs: all names; None where they are not known.

    Raises:
        ConfigError: it is no such file.
    """

    def __init__(self, content: bytes) -> None:
        more = {_ABOUT: ""}
        self._module = _loaded(content, more)
        self.about: dict[str, Any] = json.loads(more[_ABOUT] or "{}")
        self._dtypes: dict[str, str] = self.about.get("inputs", {})
        self.inputs: set[str] | None = {*self._dtypes, *self.about["rows"]} if self.about else None
        computing = base64.b64decode(self.about.get("computing", ""))
        self._computing = _loaded(computing, {}) if computing else None

    def computed(self, inputs: _Arrays) -> _Arrays:
        """Return the ids of each input of rows that the part computes."""
        if self._computing is None:
            return {}
        with torch.no_grad():
            return {name: ids.numpy() for name, ids in self._computing(self._tensors(inputs)).items()}

    def run(self, inputs: _Arrays) -> Any:
        """Return what the program makes of its inputs, rows among them; its tensors as arrays."""
        tensors = self._tensors(inputs)
        with torch.no_grad():
            return _as_arrays(self._module(tensors) if self.about else self._module(**tensors))

    def _tensors(self, arrays: _Arrays) -> dict[str, Tensor]:
        return {name: torch.tensor(np.asarray(value, self._dtypes.get(name))) for name, value in arrays.items()}


class _Turn:
    """What stand-ins are given, and note, in one forward pass. No module: torch.export must not take it for a part of one."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[str, int]] = {}  # by name of an input of rows: table, dim
        self.begin(None)

    def begin(self, rows: Mapping[str, Tensor] | None) -> None:
        """Begin a pass with these rows; None: ids are noted, and rows are zeros."""
        self._rows, self.asked, self._calls = rows, dict[str, Tensor](), Counter[str]()

    def rows(self, stand_in: "_StandIn", input: Tensor) -> Tensor:
        """Return the rows of one call: [*input.shape, dim]."""
        self._calls[stand_in.path] += 1
        n = self._calls[stand_in.path]
        name = f"rows.{stand_in.path}" + (f".{n}" if n > 1 else "")
        self.asked[name], self.tables[name] = input, (stand_in.table, stand_in.dim)
        if self._rows is None:
            return torch.zeros((*input.shape, stand_in.dim))
        return self._rows[name]


class _StandIn(nn.Module):
    """Stands where a module over a table was."""

    def __init__(self, path: str, module: TableModule, turn: _Turn) -> None:
        super().__init__()
        self.path, self.table, self.dim, self._turn = path, module.table.name, module.table.dim, turn
        self.dtype, self._factor = module.dtype, module.factor if isinstance(module, ScaledEmbedding) else None
        self._bag = (module.mode, module.include_last_offset, module.padding_idx) if isinstance(module, EmbeddingBag) else None

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return what the module does, of the rows that are given."""
        rows = self._turn.rows(self, input)
        if self._bag is None:
            rows = rows.to(self.dtype)
            return rows if self._factor is None else rows * self._factor
        if offsets is None:
            offsets, last = torch.arange(input.shape[0], device=input.device) * input.shape[1], False
        else:
            last = self._bag[1]
        factors = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        return self._bags(input.reshape(-1), rows.reshape(-1, self.dim), offsets, last, factors).to(self.dtype)

    def _bags(self, ids: Tensor, rows: Tensor, offsets: Tensor, last: bool, factors: Tensor | None) -> Tensor:
        """Pool rows [m, dim] of ids [m]: [b, dim]. Not by torch's padding_idx, for which a program has to know m."""
        assert self._bag is not None
        mode, _, padding = self._bag
        at = torch.arange(ids.shape[0], device=ids.device)
        if padding is None:
            return F.embedding_bag(at, rows, offsets, mode=mode, per_sample_weights=factors, include_last_offset=last)
        at = torch.where(ids == padding, 0, at + 1)  # the row of padding comes first
        nothing = rows.new_full((1, self.dim), float("-inf") if mode == "max" else 0.0)
        kind = "max" if mode == "max" else "sum"
        pooled = F.embedding_bag(at, torch.cat([nothing, rows]), offsets, mode=kind, per_sample_weights=factors, include_last_offset=last)
        if mode == "sum":
            return pooled
        ones = torch.cat([rows.new_zeros(1, 1), rows.new_ones(ids.shape[0], 1)])
        n_rows = F.embedding_bag(at, ones, offsets, mode="sum", include_last_offset=last)  # float32 [b, 1]: without padding
        return torch.where(n_rows > 0, pooled, 0.0) if mode == "max" else pooled / n_rows.clamp(min=1.0)


class _Asked(nn.Module):
    """Which ids a model asks for."""

    def __init__(self, model: nn.Module, turn: _Turn) -> None:
        super().__init__()
        self.model, self._turn = model, turn

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids of each look-up."""
        self._turn.begin(None)
        self.model(**inputs)
        return dict(self._turn.asked)


class _Dense(nn.Module):
    """What a model makes of inputs and rows."""

    def __init__(self, model: nn.Module, turn: _Turn, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._turn, self._names = model, turn, names

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        """Return what the model does."""
        self._turn.begin(inputs)
        return self.model(**{name: inputs[name] for name in self._names})


def _copied(model: nn.Module) -> tuple[nn.Module, _Turn]:
    if any(isinstance(module, TableCollection) for module in model.modules()):
        raise InvalidInputError(
            "export_dense: the model has a collection or DenseFeatures, whose rows cannot be inputs; kvemb.torch.materialize copies it"
        )
    turn, memo = _Turn(), dict[int, Any]()
    leave_out(memo)
    for path, module in table_modules(model):
        memo[id(module)] = _StandIn(path, module, turn)
    part = copy.deepcopy(model, memo).eval()
    if not any(isinstance(module, _StandIn) for module in part.modules()):
        raise InvalidInputError("export_dense: the model has no module over a table; distribute it first, or use torch.export itself")
    return part, turn


def _exported(module: nn.Module, examples: dict[str, Tensor]) -> torch.export.ExportedProgram:
    if not hasattr(torch.export.Dim, "AUTO"):
        raise ConfigError(f"export_dense needs torch 2.6 or newer, this is {torch.__version__}")
    open_sizes = {
        name: {axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size > 1} for name, tensor in examples.items()
    }
    return torch.export.export(module.eval(), (examples,), dynamic_shapes=(open_sizes,), strict=False)


def _given_ids(computing: torch.export.ExportedProgram, names: list[str]) -> list[str]:
    """Of each look-up the input that its ids are, as they are; "" where they are computed."""
    inputs = dict(zip(computing.graph_signature.user_inputs, names, strict=True))
    return [inputs.get(node, "") for node in computing.graph_signature.user_outputs]


def _save_onnx(program: torch.export.ExportedProgram, about: dict[str, Any], names: list[str], file: str | os.PathLike[str]) -> None:
    computed = [name for name, one in about["rows"].items() if not one["ids"]]
    if computed:
        raise InvalidInputError(
            f"{file}: the model computes the ids of {computed[0]} from its inputs, which takes a program of its own: write a .pt2, or have "
            "the ids among the inputs as they are"
        )
    try:
        written = torch.onnx.export(program, dynamo=True, input_names=names, verbose=False)
    except ImportError as error:
        raise ConfigError(f"{file}: ONNX is written by further packages: pip install onnxscript ({error})") from error
    assert written is not None
    written.model.metadata_props["kvemb"] = json.dumps(about)
    written.save(file)


def _loaded(content: bytes, more: dict[str, Any]) -> Any:
    """Return the program in a file; `more` gets the contents that lie beside it under these names."""
    try:
        with _loading:
            return torch.export.load(io.BytesIO(content), extra_files=more).module()
    except Exception as error:  # torch's own are of many kinds
        raise ConfigError(f"the dense file is no program of torch.export that this torch reads: {error}") from error


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, Mapping):
        return {name: _as_arrays(one) for name, one in value.items()}
    return tuple(map(_as_arrays, value)) if isinstance(value, (tuple, list)) else value
