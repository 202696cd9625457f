"""`distribute`, for every framework: a model's large embeddings become tables.

Strategy: everything is checked before anything changes. Then tables are made and filled. The model is changed last. A bridge brings its
`Conversion`: where the weights of a model are, and how the places that hold one are replaced.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar
from weakref import WeakSet

import numpy as np

from kvemb.errors import InvalidInputError, n_of
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec
from kvemb.schema.table_def import check_table_name

from .filled_tables import CARRIED, Carry, First, Site, SiteTable, TableOptions, WeightPlace, chunk_rows, exists, make_and_fill, open_table

if TYPE_CHECKING:
    from kvemb.api import Cluster
    from kvemb.api.table import Table

Names = Mapping[str, str] | Callable[[str], str]
"""Table names by path in the model, or a function from path to name."""
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
_SHOWN = 8
_in_models: "WeakSet[Any]" = WeakSet()  # tables that a model of this process was distributed over


class DistributeOptions(TypedDict, total=False):
    """The options of every bridge's `distribute`.

    Args:
        min_rows: embeddings of fewer rows stay, and so do those that are not trained; 10,000 unless given.
        names: of the tables, by path in the model, or a function from it; the path unless given. In Keras a layer's name is its path.
        prefix: stands before the name of each table, as "ranker/": a model that is not to share rows with another one needs its own.
        leave: paths of embeddings that stay.
        initializer: draws the rows, in place of the weights.
        dtype, seed, reduce: of the tables; see `kvemb.schema.table_def.TableDef`.
        quiet: do not write the report to stderr.
    """

    min_rows: int
    names: Names | None
    prefix: str
    leave: Collection[str]
    initializer: Initializer | None
    dtype: str
    seed: int
    reduce: str
    quiet: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Distributed:
    """The result of `distribute`; its text is the report.

    Args:
        tables: made or opened, in the model's order.
        lines: of the text.
    """

    tables: tuple["Table", ...]
    lines: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(self.lines)


DoneT = TypeVar("DoneT", bound=Distributed)


class Conversion(ABC, Generic[DoneT]):
    """A model whose embeddings are to become tables."""

    kind = "embedding"
    """The framework's word for a place."""
    sought = "embedding"
    """The places that can become tables."""
    none_there: str | None = "the model has none"
    """The reason to refuse a model of which nothing is replaced; None: it is not refused."""

    @abstractmethod
    def places(self) -> Sequence[WeightPlace]:
        """Find the places that hold weights."""

    @abstractmethod
    def problems(self, holders: Sequence[WeightPlace]) -> Iterator[str]:
        """Yield the reasons why the places that hold one weight cannot be replaced."""

    @abstractmethod
    def rules(self, sites: Sequence[Site], options: TableOptions) -> Mapping[str, OptimizerSpec] | None:
        """Return the tables' update rules by name, or None to open those that exist. The last check before tables are made."""

    def first_rows(self, sites: Sequence[Site], given: Initializer | None, exists: Callable[[Site], bool]) -> Mapping[str, First]:
        """Decide how each table begins, by its name."""
        return dict.fromkeys((site.table for site in sites), First(given is None, given or CARRIED, given is not None))

    @abstractmethod
    def convert(self, tables: Sequence[SiteTable], cluster: "Cluster", options: TableOptions) -> Callable[..., DoneT]:
        """Replace the places; return the function that makes the result of the report's lines."""

    def notes(self, tables: Sequence[SiteTable]) -> Iterable[str]:
        """Return more lines for the report."""
        return ()


def convert_model(
    model: Conversion[DoneT],
    cluster: "Cluster",
    *,
    min_rows: int = 10_000,
    names: Names | None = None,
    prefix: str = "",
    leave: Collection[str] = (),
    initializer: Initializer | None = None,
    dtype: str = "float32",
    seed: int = 0,
    reduce: str = "sum",
    quiet: bool = False,
    carry: Carry = None,
) -> DoneT:
    """Distribute a model; raises InvalidInputError before anything was changed, other errors with the model as it was."""
    if not hasattr(cluster, "create_table"):
        raise InvalidInputError(f"cluster is a {type(cluster).__name__}; give a connection, of kvemb.connect")
    sites, left = make_plan(model, min_rows, names, leave, prefix)
    for site in sites if initializer is not None else ():
        _check_dim(site, initializer)
    shown = [", ".join(f"{one.paths[0]!r} ({type(one.holder).__name__})" for one in site.places) for site in sites]
    options = TableOptions(dtype, seed, reduce, initializer)
    rules = model.rules(sites, options)
    if rules is None:
        tables = [open_table(cluster, site) for site in sites]
    else:
        first = model.first_rows(sites, initializer, lambda site: exists(cluster, site))
        for site in sites:
            if first[site.table].carried:
                _check_range(site, dtype)
        tables = make_and_fill(cluster, sites, rules, options, first, carry)
    made = model.convert(tables, cluster, options)
    of_tables = [f"  {of}, {_fate(one, carry, model.kind)}" for of, one in zip(shown, tables, strict=True)]
    stay = [f"  {path!r} stays: {why}" for path, why in left]
    notes = [f"  {line}" for line in (*_shared_already(tables), *_common_notes(tables, carry), *model.notes(tables))]
    done = made(lines=(*_headline(tables), *of_tables, *stay, *notes))
    if not quiet:
        print(done, file=sys.stderr)
    return done


def make_plan(
    model: Conversion[Any], min_rows: int, names: Names | None = None, leave: Collection[str] = (), prefix: str = ""
) -> tuple[list[Site], list[tuple[str, str]]]:
    """Return the weights that become tables, and (path, why) of the places that stay; refuse others, with all reasons at once."""
    places = model.places()
    known = [path for one in places for path in one.paths]
    for argument, given in (("leave", leave), ("names", names if isinstance(names, Mapping) else ())):
        if isinstance(given, str):
            raise InvalidInputError(f"{argument} is {given!r}; give a list of paths")
        if unknown := sorted(set(given) - set(known)):
            there = f"there are: {', '.join(known) or 'none'}"
            raise InvalidInputError(f"{argument}: no {model.sought} is at {', '.join(map(repr, unknown))}; {there}")
    left, groups = [], dict[int, list[WeightPlace]]()
    for one in places:
        if why := _reason_to_stay(one, min_rows, leave):
            left.append((one.paths[0], why))
        else:
            groups.setdefault(id(one.weight), []).append(one)
    if problems := [problem for holders in groups.values() for problem in model.problems(holders)]:
        raise InvalidInputError(
            "nothing was changed: " + "; ".join(problems) + ". Change the model, or keep these local with leave=[their paths]"
        )
    if not groups and model.none_there is not None:
        stay = "; ".join(f"{path!r} stays ({why})" for path, why in left) or model.none_there
        small = "; min_rows=1 replaces small ones, too, as a first try may want" if "min_rows" in stay else ""
        raise InvalidInputError(f"there is no {model.sought} to replace: {stay}{small}")
    return _named(model.kind, list(groups.values()), names, prefix), left


def _reason_to_stay(one: WeightPlace, min_rows: int, leave: Collection[str]) -> str:
    if not set(leave).isdisjoint(one.paths):
        return "leave=[…] names it"
    return one.stays or (f"{one.n_rows} rows, fewer than min_rows={min_rows}" if one.n_rows < min_rows else "")


def _named(kind: str, groups: Sequence[Sequence[WeightPlace]], names: Names | None, prefix: str) -> list[Site]:
    sites: dict[str, Site] = {}
    for holders in groups:
        path, *more = (path for one in holders for path in one.paths)
        of = (path, *more)
        given = names(path) if callable(names) else next((names[one] for one in of if one in names), path) if names else path
        try:
            name = check_table_name(prefix + given)
        except InvalidInputError as error:
            raise InvalidInputError(f"{kind} {path!r}: {error}; give names={{{path!r}: …}}") from error
        if name in sites:
            raise InvalidInputError(
                f"names: {sites[name].path!r} and {path!r} would both be table {name!r}; rows are shared by sharing a weight"
            )
        sites[name] = Site(name, kind, tuple(holders))
    return list(sites.values())


def _check_dim(site: Site, initializer: Any) -> None:
    try:
        initializer.check_dim(site.dim)
    except InvalidInputError as error:
        raise InvalidInputError(f"nothing was changed: {site}: {error}") from error


def _check_range(site: Site, dtype: str) -> None:
    """Refuse weights that a row cannot hold, before a table is made."""
    largest, n_chunk = _LARGEST.get(dtype, float(np.finfo(np.float32).max)), chunk_rows(site)
    for low in range(0, site.n_rows, n_chunk):
        ids = np.arange(low, min(low + n_chunk, site.n_rows))
        wrong = np.flatnonzero(~(np.abs(site.rows_of(ids)) <= largest).all(axis=1))
        if len(wrong):
            raise InvalidInputError(
                f"{site}: row {ids[wrong[0]]} of its weight holds NaN, infinity or a value beyond {dtype} (above {largest:.4g}), and "
                "cannot be carried; mend the weight, or carry nothing"
            )


def _headline(tables: Sequence[SiteTable]) -> Iterator[str]:
    if n := sum(len(one.site.places) for one in tables):
        yield f"distribute: {n_of(n, 'embedding')} {'is' if n == 1 else 'are'} replaced by {n_of(len(tables), 'table')}"


def _fate(one: SiteTable, carry: Carry, kind: str) -> str:
    rule = one.table.definition.optimizer
    values = ", ".join(f"{name}={value:g}" for name, value in one.table.hyper.items())
    return f"{one.site.n_rows} x {one.site.dim} -> table {one.site.table!r}: {_origin(one, carry, kind)}; {rule.kind}({values})"


def _origin(one: SiteTable, carry: Carry, kind: str) -> str:
    definition, first = one.table.definition, one.first
    weights = f"the {kind}'s weights" + ("" if definition.dtype == "float32" else f", rounded to {definition.dtype}")
    if carry == "overwrite":
        return f"all rows are {weights}"
    if one.made and first.carried:
        return f"made; its rows are {weights}"
    begun = f"rows begin as {_called(definition.initializer)}"
    if one.made:
        return f"made; {begun}"
    assigned = first.carried or definition.initializer == CARRIED
    kept = f"it existed and keeps its rows; the {kind}'s weights are not used"
    if not one.table.cluster.read_only and not one.table.steps():
        kept = "it exists, made by another rank just now, perhaps: it is not trained yet, and rows that it has stay"
    return kept + ("" if assigned else f"; new {begun}")


def _called(initializer: Initializer) -> str:
    values = [f"{name}={value:g}" for name, value in dict(initializer.params).items()]
    parts = [f"{width}: {_called(part)}" for width, part in initializer.parts]
    return f"{initializer.kind}({', '.join(values + parts)})"


def _shared_already(tables: Sequence[SiteTable]) -> Iterator[str]:
    """Say once which tables were opened and have rows of training, by this job, which goes on, or by another one; or another model here."""
    opened = {one.site.table: one.table for one in tables if not one.made and not one.table.cluster.read_only}
    steps = {name: table.steps() for name, table in opened.items()}
    shared = [name for name, table in opened.items() if steps[name] or table in _in_models]
    _in_models.update(one.table for one in tables)
    if shared:
        shown = ", ".join(f"{name!r} ({n_of(steps[name], 'step')} of training)" for name in shared[:_SHOWN])
        more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        yield (
            f"note: the rows of {shown}{more} are those of the model that made the table, and their training goes on, as a resumed job "
            'wants it. Another model, or a run from the start, as each trial of a study, needs tables of its own: prefix="NAME/"'
        )


def _common_notes(tables: Sequence[SiteTable], carry: Carry) -> Iterator[str]:
    if existed := [one.site.table for one in tables if carry is True and not one.made]:
        yield (
            f"note: carry_weights=True did nothing where the table existed ({', '.join(existed)}): its rows are those of the cluster, "
            "not the module's"
        )
    if forgetful := [one.site.table for one in tables if one.first.carried and one.table.definition.optimizer.kind == "ftrl"]:
        yield (
            "note: ftrl computes rows from its sums alone, so the model's weights are given up at a row's first push; "
            f"initializer=kvemb.init.zeros() is its beginning ({', '.join(forgetful)})"
        )
