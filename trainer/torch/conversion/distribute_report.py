"""The report of `distribute`. No decisions here."""

from collections.abc import Iterator, Mapping, Sequence

from kvemb.errors import n_of
from kvemb.init import Initializer

from ...bridge.filled_tables import CARRIED, Carry, SiteTable, shared_already
from ..lookup.parameter_walks import n_ranks
from ..lookup.table_weight import WEIGHT_BYTES, is_readable
from ..optimizer.joined_step import Follows
from .distribute_plan import DistributePlan, Site

_SHOWN = 8


def lines(
    plan: DistributePlan, tables: Sequence[SiteTable[Site]], carry: Carry, follows: Mapping[str, Follows], trained: Sequence[Site]
) -> Iterator[str]:
    """Return lines on each embedding's fate, and on the differences from now on."""
    yield f"distribute: {_embeddings(sum(len(site.modules) for site in plan.sites))} replaced by {n_of(len(tables), 'table')}"
    for one in tables:
        holders = ", ".join(f"{path!r} ({type(module).__name__})" for path, module in one.site.modules)
        rule = one.table.definition.optimizer
        values = ", ".join(f"{name}={value:g}" for name, value in one.table.hyper.items())
        yield (f"  {holders}, {one.site.n_rows} x {one.site.dim} -> table {one.site.table!r}: {_origin(one, carry)}; {rule.kind}({values})")
    for path, why in plan.left:
        yield f"  {path!r} stays: {why}"
    yield from _who_else(plan.sites)
    yield from (f"  {line}" for line in shared_already(tables))
    existed = [one.site.table for one in tables if carry is True and not one.made]
    if existed:
        yield (
            f"  note: carry_weights=True did nothing where the table existed ({', '.join(existed)}): its rows are those of the cluster, "
            "not the module's"
        )
    forgetful = [one.site.table for one in tables if one.first.carried and one.table.definition.optimizer.kind == "ftrl"]
    if forgetful:
        yield (
            "  note: ftrl computes rows from its sums alone, so the module's weights are given up at a row's first push; "
            f"initializer=kvemb.init.zeros() is its beginning ({', '.join(forgetful)})"
        )
    lazy = sorted(name for name, one in follows.items() if one.mapped.lazy)
    if lazy:
        yield (
            "  note: as with torch.optim.SparseAdam, rows move only in steps whose batches hold them; with dense gradients torch would "
            f"also move the others, by momentum or decay ({', '.join(lazy)})"
        )
    ranks = n_ranks()
    summed = [one.site.table for one in tables if one.table.definition.reduce == "sum" and one.table.cluster.mode == "sync"]
    if ranks > 1 and summed:
        yield (
            f"  note: gradients of rows are summed over the trainers; if those of dense weights are averaged over these {ranks} ranks, as "
            f'DistributedDataParallel does, give reduce="mean" ({", ".join(summed)})'
        )
    if ranks > 1 and follows:
        yield "  note: clip gradients with kvemb.torch.clip_grad_norm_(model, …) on every rank; torch's own leaves rows out in such a job"
    if trained:
        names = ", ".join(site.table for site in trained)
        yield f"  note: the optimizer's state of these weights (moments, sums) is not carried, and begins again ({names})"


def _who_else(sites: Sequence[Site]) -> Iterator[str]:
    """Name the attributes and modules that hold a replaced weight, or are tied to it: they now lead to the tables."""
    for readable in (True, False):
        held = [path for site in sites if is_readable(site.n_rows, site.dim) is readable for path in _holders(site)]
        if not held:
            continue
        shown = ", ".join(held[:_SHOWN]) + (f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else "")
        whole = "a read of a weight pulls all rows, and a step pushes all their gradients"
        if not readable:
            whole = f"a read of a weight raises an error, for these tables are beyond {WEIGHT_BYTES >> 20} MiB"
        yield f"  note: the replaced module is also held at {shown}; calls there look the table up, and {whole}"


def _holders(site: Site) -> list[str]:
    return [*(path for path, _, _ in site.tied), *site.held]


def _embeddings(n: int) -> str:
    return f"{n_of(n, 'embedding')} {'is' if n == 1 else 'are'}"


def _origin(one: SiteTable[Site], carry: Carry) -> str:
    definition, first = one.table.definition, one.first
    weights = "the module's weights" + ("" if definition.dtype == "float32" else f", rounded to {definition.dtype}")
    if carry == "overwrite":
        return f"all rows are {weights}"
    if one.made and first.carried:
        return f"made; its rows are {weights}"
    begun = f"rows begin as {_called(definition.initializer)}"
    if one.made:
        return f"made; {begun}" + (", read off the module's weights" if first.origin == "read off" else "")
    assigned = first.carried or definition.initializer == CARRIED
    return "it existed and keeps its rows; the module's weights are not used" + ("" if assigned else f"; new {begun}")


def _called(initializer: Initializer) -> str:
    values = [f"{name}={value:g}" for name, value in dict(initializer.params).items()]
    parts = [f"{width}: {_called(part)}" for width, part in initializer.parts]
    return f"{initializer.kind}({', '.join(values + parts)})"
