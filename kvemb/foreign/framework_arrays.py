"""The arrays of a torch state_dict, and the variables of a TensorFlow checkpoint.

Both are read by their framework, which is imported here when such a file is opened, and nowhere else outside of its bridge: a file is no
model, and kvemb imports no trainer. torch reads with weights_only=True: tensors and plain values, nothing that runs code.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import shown
from kvemb.errors import ForeignRowsError
from kvemb.foreign.foreign_file import ForeignFile, is_local, translated
from kvemb.process.extras import require_extra

_NUMPY_HAS = ("torch.float64", "torch.float32", "torch.float16")


def require_framework(name: str) -> Any:
    """Import torch or tensorflow."""
    return require_extra(name, what=f"files of {name}", extra=name)


class TorchArrays:
    """The tensors of a file that torch.save wrote, in dicts and lists of any depth: a tensor's name is its keys, joined by dots.

    Of a file on this machine only the ranges that are read take memory.
    """

    def __init__(self, url: str) -> None:
        self.where = shown(url)
        torch = require_framework("torch")
        with ForeignFile(url) as file, translated(self.where):
            try:
                held = _loaded(url, file, torch)
            except (RuntimeError, pickle.UnpicklingError) as error:
                if "weights_only" not in str(error):
                    raise
                named = re.search(r"GLOBAL (\S+)", str(error))
                if not (named or re.search("TorchScript|nsupported|unrecognized", str(error))):
                    raise ForeignRowsError(f"{self.where}: is damaged, or was not written by torch.save") from error
                raise ForeignRowsError(  # torch's own advice is to run what stands in the file
                    f"{self.where}: holds {named[1] if named else 'objects'} beside tensors and plain values, and no code of a "
                    "file is run here. Where it was made, save the tensors alone: torch.save(model.state_dict(), path)"
                ) from None
        self._tensors = dict(_tensors(held, "weights" if torch.is_tensor(held) else "", torch))
        self.shapes: Mapping[str, Sequence[int]] = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes: Mapping[str, str] = {
            name: str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        with translated(f"{self.where}: {name!r}"):
            some = self._tensors[name][start:stop].detach()
            if some.dtype.is_floating_point and str(some.dtype) not in _NUMPY_HAS:
                some = some.float()  # of 8 and 16 bits: exact
            return np.asarray(some.numpy())


def _loaded(url: str, file: ForeignFile, torch: Any) -> Any:
    try:
        return torch.load(url if is_local(url) else file.stream, map_location="cpu", weights_only=True, mmap=is_local(url) or None)
    except RuntimeError as error:
        if "mmap" not in str(error) or "weights_only" in str(error):
            raise
        return torch.load(url, map_location="cpu", weights_only=True)  # in the format of torch before 1.6


def _tensors(held: Any, name: str, torch: Any) -> Iterator[tuple[str, Any]]:
    if torch.is_tensor(held):
        yield name, held.dequantize() if held.is_quantized else held
        return
    items = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, f"{name}.{key}" if name else str(key), torch)


class CheckpointVariables:
    """The variables of a TensorFlow checkpoint, by the names that `tf.train.list_variables` shows; TensorFlow reads each as a whole."""

    def __init__(self, url: str) -> None:
        self.where, prefix = shown(url), url.removesuffix(".index")
        with translated(self.where):
            self._reader = require_framework("tensorflow").train.load_checkpoint(prefix)
            self.shapes: Mapping[str, Sequence[int]] = {name: tuple(s) for name, s in self._reader.get_variable_to_shape_map().items()}
            self.dtypes: Mapping[str, str] = {name: of.name for name, of in self._reader.get_variable_to_dtype_map().items()}
        self._kept: dict[str, NDArray[Any]] = {}

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        if start == 0 or name not in self._kept:
            with translated(f"{self.where}: {name!r}"):
                self._kept[name] = _plain(self._reader.get_tensor(name))
        return self._kept[name][start:stop]


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Text as str, and numbers that NumPy does not have as float32."""
    if array.dtype.kind == "O":
        return np.array([text.decode() for text in array.reshape(-1).tolist()], object).reshape(array.shape)
    if array.dtype.kind == "V":
        if "float" not in array.dtype.name:
            raise ForeignRowsError(f"holds {array.dtype.name}, expected numbers")
        return array.astype(np.float32)
    return array
