"""Ids as torch has them: read out of tensors, and a padding id as a module is given it.

What must not live here: which ids a table takes (`kvemb.arrays.ids`).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvemb.arrays.ids import normalize
from kvemb.errors import InvalidInputError

from ...bridge.cluster_ports import TablePort

_PLAIN = "to trace, export or transform a model, take its copy of plain modules, kvemb.torch.materialize(model)"


def values_of(input: Tensor, table: str) -> NDArray[Any]:
    """Read ids out of a tensor.

    Raises:
        InvalidInputError: it is no integer tensor; reading would make its ids constants of a trace; or it has no values.
    """
    if not isinstance(input, Tensor) or input.is_floating_point() or input.is_complex():
        got = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise InvalidInputError(f"table {table!r}: input must be a tensor of integer ids, got {got}")
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise InvalidInputError(f"table {table!r}: torch.jit.trace would write down the rows of this one batch; {_PLAIN}")
    try:
        array: NDArray[Any] = input.detach().cpu().numpy()
    except RuntimeError as error:
        if input.device.type not in ("cpu", "meta"):
            raise  # the device's own
        raise InvalidInputError(f"table {table!r}: ids must be a plain tensor with values ({error}); {_PLAIN}") from error
    return array


def checked_padding(table: TablePort, padding_idx: object) -> np.uint64:
    """Return a module's padding id as the table has it.

    Raises:
        InvalidInputError: it is no integer, or outside of the table's domain.
    """
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise InvalidInputError(f"padding_idx is {padding_idx!r}; give an id (an integer) or None")
    definition = table.definition
    ids, _ = normalize([padding_idx], definition.id_dtype, definition.name, definition.num_ids)
    if ids.view(np.int64)[0] == -1:  # then it is no padding that was left in: this module asks the table for its row
        table.allow_minus_one()
    return np.uint64(ids[0])
