"""The tables of a model's weights: made or opened, and filled.

What must not live here: any framework, optimizers. See `weight_transfer` for who fills a table. A table says by its initializer that its
rows are assigned: CARRIED, zeros under a name that nobody gives. So another trainer knows that it has to wait for them, as it need not for
rows that are drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

import numpy as np

from kvemb import init
from kvemb.errors import InvalidInputError, TableMismatchError, UnknownTableError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from .weight_transfer import Weights, assign_padding, assign_weights, wait_assigned

if TYPE_CHECKING:
    from kvemb.cluster import Cluster
    from kvemb.table import Table


Carry = bool | Literal["overwrite"] | None
CARRIED = init.constant(0.0)


class WeightOfTable(Weights, Protocol):
    """A weight of a model, and the name of the table that it becomes."""

    @property
    def table(self) -> str:
        """The table's name."""
        ...


SiteT = TypeVar("SiteT", bound=WeightOfTable)


@dataclass(frozen=True)
class First:
    """How the rows of a model's table begin.

    Args:
        carried: its rows are assigned: the module's weights.
        initializer: its own; None: the table exists, and has one.
        origin: who decided: the user gave the initializer, it was read off the weights, or none is needed.
    """

    carried: bool
    initializer: Initializer | None
    origin: Literal["given", "read off", ""]


@dataclass(frozen=True)
class TableOptions:
    """What is the same for all tables; see `kvemb.schema.table_def.TableDef`."""

    dtype: str
    seed: int
    reduce: str


@dataclass(frozen=True, eq=False)
class SiteTable(Generic[SiteT]):
    """The table that is made for one place in a model.

    Args:
        site, table: both.
        made: by this trainer.
        first: how its rows begin; of a table that exists, `carried` says whether whoever made it assigns them.
    """

    site: SiteT
    table: "Table"
    made: bool
    first: First


def open_table(cluster: "Cluster", site: SiteT) -> SiteTable[SiteT]:
    """Open a table that exists.

    Raises:
        UnknownTableError: there is none.
        TableMismatchError: its rows have another length, or it has ids for another number of rows.
    """
    table = cluster.table(site.table)
    n_ids = table.definition.num_ids
    if table.dim != site.dim or n_ids not in (None, site.n_rows):
        raise TableMismatchError(
            f"{site}: the table has dim {table.dim} and {n_ids or 'any'} ids, the module's weight is {site.n_rows} x {site.dim}; another "
            "model made it, or give names=… "
        )
    return SiteTable(site, table, made=False, first=First(False, None, ""))


def exists(cluster: "Cluster", site: WeightOfTable) -> bool:
    """Return whether a site's table does."""
    try:
        cluster.table(site.table)
    except UnknownTableError:
        return False
    return True


def make_table(cluster: "Cluster", site: SiteT, rule: OptimizerSpec, options: TableOptions, first: First, carry: Carry) -> SiteTable[SiteT]:
    """Make a site's table, or open it where it exists with the same identity; with its own initializer, unless the user gave one.

    Raises:
        InvalidInputError: a value is out of range.
        TableMismatchError: it exists with another identity.
    """

    def create(initializer: Initializer, exist_ok: bool) -> "Table":
        return cluster.create_table(
            site.table,
            dim=site.dim,
            optimizer=rule,
            initializer=initializer,
            dtype=options.dtype,
            seed=options.seed,
            reduce=options.reduce,
            num_ids=site.n_rows,
            exist_ok=exist_ok,
        )

    if first.initializer is not None:
        try:
            return SiteTable(site, create(first.initializer, exist_ok=False), made=True, first=first)
        except (InvalidInputError, TableMismatchError):  # it exists, or a value is wrong: then the same again
            if first.origin == "given" or not exists(cluster, site):
                return SiteTable(site, create(first.initializer, exist_ok=True), made=False, first=first)
    kept = cluster.table(site.table).definition.initializer
    carried = bool(carry) or (carry is None and kept == CARRIED)
    return SiteTable(site, create(kept, exist_ok=True), made=False, first=First(carried, kept, ""))


def fill(tables: Sequence[SiteTable[SiteT]], carry: Carry) -> None:
    """Assign the first rows of tables made here; then wait for those that other trainers made, who may wait for ours."""
    for one in tables:
        if not one.first.carried:
            assign_padding(one.table, one.site)
        elif one.made or carry == "overwrite":
            assign_weights(one.table, one.site, np.arange(one.site.n_rows))
    for one in tables:
        if one.first.carried:
            wait_assigned(one.table, one.site)


def trained_already(tables: Sequence[SiteTable[SiteT]]) -> Iterator[str]:
    """Say which tables were opened and had steps of training before: by this job, which goes on, or by another one."""
    for one in tables:
        table = one.table
        if one.made or table.cluster.read_only:
            continue
        if steps := table.steps():
            yield (
                f"note: table {one.site.table!r} has {len(table)} rows after {steps} steps of training, which goes on. A run that is to "
                "begin anew, as each trial of a study, needs tables of its own: names="
            )
