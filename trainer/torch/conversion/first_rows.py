"""Where the first rows of a table come from: the module's weights, or an initializer. Decided before anything changes.

Strategy: unless the user says otherwise, a table begins with the module's own weights. They are assigned, if all of a model's can be
assigned in a minute or so. If they are too many, the user is asked. A table that exists needs no decision: it keeps its rows. Weights
that a row cannot hold are refused before a table is made.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer

from ...bridge.filled_tables import CARRIED, Carry, First, chunk_rows
from .distribute_plan import Site

CARRY_ROWS, CARRY_BYTES = 10_000_000, 1 << 30
"""How much of a model is assigned without a request: about a minute's work for two shards on a machine of 2 cores."""


def first_rows(sites: Sequence[Site], carry: Carry, given: Initializer | None, exists: Callable[[Site], bool]) -> dict[str, First]:
    """Decide how each table begins, by its name."""
    _check_dims(sites, given)
    if given is not None and not carry:
        return {site.table: First(False, given, "given") for site in sites}
    carried = _assignable(sites) if carry is None else {site.table for site in sites if carry}
    first, unknown = {}, []
    for site in sites:
        if site.table in carried:
            first[site.table] = First(True, CARRIED if given is None else given, "" if given is None else "given")
        elif exists(site):
            first[site.table] = First(False, None, "")
        else:
            unknown.append(f"{site}, {site.n_rows} x {site.dim}: {_why_unknown(site, carry)}")
    if unknown:
        raise InvalidInputError(
            "nothing was changed: the first rows are not known of "
            + "; ".join(unknown)
            + ". Give initializer=, as kvemb.init.normal(std=1.0), which is nn.Embedding's own, to draw them"
            + _carry_hint(sites, unknown, carry)
            + ", or keep these local with leave=[their paths]"
        )
    return first


def _check_dims(sites: Sequence[Site], given: Initializer | None) -> None:
    if not isinstance(given, Initializer):
        return
    for site in sites:
        try:
            given.check_dim(site.dim)
        except InvalidInputError as error:
            raise InvalidInputError(f"nothing was changed: {site}: {error}") from error


def _assignable(sites: Iterable[Site]) -> set[str]:
    """The tables whose weights are assigned unasked: the smallest first, while all together are not too many."""
    n_rows, n_bytes, names = 0, 0, set()
    for site in sorted((site for site in sites if not _is_meta(site)), key=lambda site: (site.n_rows * site.dim, site.table)):
        n_rows, n_bytes = n_rows + site.n_rows, n_bytes + 4 * site.n_rows * site.dim
        if n_rows <= CARRY_ROWS and n_bytes <= CARRY_BYTES:
            names.add(site.table)
    return names


def _why_unknown(site: Site, carry: Carry) -> str:
    if _is_meta(site):
        return "its weight is on the meta device and holds nothing"
    if carry is False:
        return "carry_weights is False"
    return f"too large to be assigned unasked (beyond {CARRY_ROWS} rows or {CARRY_BYTES >> 20} MiB of the model)"


def _carry_hint(sites: Iterable[Site], unknown: Sequence[str], carry: Carry) -> str:
    if carry is False or all(_is_meta(site) for site in sites):
        return ""
    return ", carry_weights=True to assign the module's weights however long it takes"


def _is_meta(site: Site) -> bool:
    return bool(site.weight.device.type == "meta")


_NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def check_range(site: Site, dtype: str) -> None:
    """Refuse weights that a row cannot hold, before a table is made."""
    largest = torch.finfo(_NARROW.get(dtype, torch.float32)).max
    for at, part in enumerate(torch.split(site.weight.detach(), chunk_rows(site))):
        wrong = torch.nonzero(~(part.abs() <= largest).all(dim=1))
        if len(wrong):
            row = int(wrong[0]) + at * chunk_rows(site)
            raise InvalidInputError(
                f"{site}: row {row} of its weight holds NaN, infinity or a value beyond {dtype} (above {largest:.4g}), and cannot be "
                "carried; mend the weight, or carry nothing"
            )
