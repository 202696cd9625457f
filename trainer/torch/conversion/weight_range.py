"""Weights that no row can be, found before a table is made.

What must not live here: assigning them (`trainer.bridge.weight_transfer`).
"""

import torch

from kvemb.errors import InvalidInputError

from ...bridge.weight_transfer import chunk_rows
from .distribute_plan import Site

_NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def check_range(site: Site, dtype: str) -> None:
    """Refuse weights that no row can be, before a table is made.

    Raises:
        InvalidInputError: NaN, infinity, or a value beyond the dtype's range.
    """
    largest = torch.finfo(_NARROW.get(dtype, torch.float32)).max
    for at, part in enumerate(torch.split(site.weight.detach(), chunk_rows(site))):
        wrong = torch.nonzero(~(part.abs() <= largest).all(dim=1))
        if len(wrong):
            row = int(wrong[0]) + at * chunk_rows(site)
            raise InvalidInputError(
                f"{site}: row {row} of its weight holds NaN, infinity or a value beyond {dtype} (above {largest:.4g}), and cannot be "
                "carried; mend the weight, or carry nothing"
            )
