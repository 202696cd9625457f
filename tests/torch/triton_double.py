"""A double of `triton_python_backend_utils`, which Triton alone has: what its documentation says of it, and of what it refuses.

Source: https://github.com/triton-inference-server/python_backend (README; signatures from src/pb_stub.cc).
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np


class TritonError:
    """An error of one request."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        assert isinstance(message, str)
        assert code in range(8)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(name, str)
        assert name
        assert isinstance(array, np.ndarray)
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceRequest:
    """What a client asks."""

    def __init__(self, *, inputs: Sequence[Tensor], requested_output_names: Sequence[str] = (), model_name: str = "") -> None:
        self._inputs = list(inputs)

    def inputs(self) -> list[Tensor]:
        return self._inputs


class InferenceResponse:
    """What it is answered."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        assert all(isinstance(one, Tensor) for one in output_tensors)
        assert error is None or isinstance(error, TritonError)
        self._output_tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((one for one in request.inputs() if one.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((one for one in response.output_tensors() if one.name() == name), None)


def execute(execute: Callable[[list[Any]], list[Any]], inputs: Sequence[dict[str, np.ndarray]]) -> list[InferenceResponse]:
    """Have a model answer requests as Triton does: one response for each, which may not use the requests' tensors any more."""
    requests = [InferenceRequest(inputs=[Tensor(name, array.copy()) for name, array in one.items()]) for one in inputs]
    responses = execute(requests)
    for request in requests:
        for one in request.inputs():
            one.as_numpy().fill(-1)
    assert len(responses) == len(requests)
    assert all(isinstance(one, InferenceResponse) for one in responses)
    assert len(set(map(id, responses))) == len(responses), "a response must not be used twice"
    return responses


def module() -> ModuleType:
    """Return it as the module that a model imports."""
    made: Any = ModuleType("triton_python_backend_utils")
    for one in (TritonError, Tensor, InferenceRequest, InferenceResponse, get_input_tensor_by_name, get_output_tensor_by_name):
        setattr(made, one.__name__, one)
    return made
