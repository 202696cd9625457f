"""Weights in fewer bits for files: float16, or int8 with a scale per row, with a stated error. Pure.

int8 takes a quarter of the bytes: a row is its integers times `scale`, which is its largest magnitude divided by 127. So a value is off by
at most scale / 2, and by the rounding of float32.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import LARGEST, NARROW, round_nearest, to_int8
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.schema.table_def import TableDef

HOLD_SCALES = ("safetensors", "torch", "tensorflow")
"""Formats whose files have room for the scales, and for integers of 8 bits."""


def check_narrow(dtype: str, kind: str) -> None:
    """Refuse a dtype that is not known, or that a format does not hold."""
    if dtype and dtype not in NARROW:
        raise InvalidInputError(f"dtype is {dtype!r}; rows are written as {', '.join(NARROW)}, or without a dtype in the table's own")
    if dtype and kind == "raw":
        raise InvalidInputError("a raw file says nothing of its dtype, and is read in the table's own: write npy")
    if dtype == "int8" and kind not in HOLD_SCALES:
        raise InvalidInputError(f"{kind} has no room for the scales of int8 rows: write {', '.join(HOLD_SCALES)}")


def narrowed(blocks: Iterable[NDArray[np.float32]], dtype: str, scales: list[NDArray[np.float32]]) -> Iterator[NDArray[Any]]:
    """Yield weights, float32 [m, dim], in fewer bits, block by block; for int8 `scales` gets those of each block, float32 [m]."""
    for block in blocks:
        if dtype == "int8":
            values, scale = to_int8(block)
            scales.append(scale)
            yield values
        elif block.size and not float(np.abs(block).max()) <= LARGEST["float16"]:
            raise ForeignRowsError(f"a weight of {float(np.abs(block).max()):.4g} is beyond float16's {LARGEST['float16']:g}: write int8")
        else:
            yield round_nearest(block, "float16")


def scale_of(dtype: str, beside: Mapping[str, str], definition: TableDef, where: str) -> str | None:
    """Return the name of the array that int8 weights are to be multiplied by, None where numbers are the weights themselves."""
    numbers = [name for name, of in beside.items() if not of.startswith(("str", "large_str", "<U", "object"))]
    if not numbers or definition.row_dtype != np.float32 or not dtype.startswith(("int", "uint")):
        return None
    if numbers == ["scale"] and dtype == "int8" and "float" in beside["scale"]:
        return "scale"
    shown = ", ".join([*map(repr, numbers[:5]), *(["…"] if len(numbers) > 5 else [])])
    raise ForeignRowsError(
        f"{where} holds {dtype} beside {shown}, by which the integers may have to be multiplied. Known is one float32 'scale' of a number "
        "for each row, beside int8. Write the product as float16 or float32; or the integers without those, if they are the weights"
    )
