"""The tables of a model's weights: made or opened, filled, and read whole.

The trainer that makes a table assigns its first rows, in ascending order, in chunks; its initializer, CARRIED, says so: zeros under a name
that users do not give. Another trainer waits until the last chunk is there, which is created last, though not in all shards at once. So no
trainer trains before, and rows that were trained are not overwritten by one that joins or starts again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvemb import init
from kvemb.errors import DeadlineExceededError, InvalidInputError, TableMismatchError, UnknownTableError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

if TYPE_CHECKING:
    from kvemb.api import Cluster
    from kvemb.api.table import Table


CHUNK_BYTES, CHUNK_ROWS = 4 << 20, 1 << 16
READ_BYTES = 16 << 20
STALL_S = 120.0
"""How long a trainer waits for another one that assigns and does not get on; generous, a chunk takes far less than a second."""
_POLL_S = 0.2
AGAIN = 'call distribute again, in one trainer: in torch with carry_weights="overwrite", else after cluster.drop_table(name)'


@dataclass(frozen=True, eq=False)
class WeightPlace:
    """One module, layer or variable that holds a weight [n_rows, dim], by its own path first; places of one weight are one table."""

    paths: tuple[str, ...]
    holder: Any
    weight: Any
    n_rows: int
    dim: int
    rows_of: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    stays: str = ""
    padding: int | None = None


@dataclass(frozen=True, eq=False)
class Site:
    """One weight of a model that becomes a table, with every place that holds it; its text says which."""

    table: str
    kind: str
    places: tuple[WeightPlace, ...]

    @property
    def path(self) -> str:
        """Of the first place."""
        return self.places[0].paths[0]

    @property
    def weight(self) -> Any:
        """The framework's own."""
        return self.places[0].weight

    @property
    def n_rows(self) -> int:
        """Rows: ids are 0 to n_rows - 1."""
        return self.places[0].n_rows

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self.places[0].dim

    @property
    def padding(self) -> list[int]:
        """Ids whose rows pad, ascending."""
        return sorted({one.padding for one in self.places if one.padding is not None})

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows [n, dim] as the model has them."""
        return self.places[0].rows_of(ids)

    def __str__(self) -> str:
        return f"table {self.table!r} ({self.kind} {self.path!r})"


def assign_padding(table: "Table", site: Site) -> None:
    """Set padding rows that do not exist to the module's own: zeros, which no initializer gives. Every trainer does, all to the same."""
    ids = np.array(site.padding, np.int64)
    if len(ids):
        versions = table.pull(ids, return_versions=True)[1]
        assign_weights(table, site, ids[versions == 0])


def assign_weights(table: "Table", site: Site, ids: NDArray[np.int64]) -> None:
    """Set the rows of these ids to the model's."""
    n_chunk = chunk_rows(site)
    for low in range(0, len(ids), n_chunk):
        chunk = ids[low : low + n_chunk]
        table.assign(chunk, site.rows_of(chunk))


def wait_assigned(table: "Table", site: Site) -> None:
    """Return when all rows are there, assigned by any trainer."""
    n_rows, since = -1, time.monotonic()
    last = np.arange((site.n_rows - 1) // chunk_rows(site) * chunk_rows(site), site.n_rows)
    while not (_exist(table, last[-1:]) and _exist(table, last)):  # the whole chunk only when it has begun to come
        n_now, now = len(table), time.monotonic()
        if n_now != n_rows:
            n_rows, since = n_now, now
        if now - since > STALL_S:
            raise DeadlineExceededError(
                f"{site}: it exists, rows of the ids up to {last[-1]} do not, and for {STALL_S:g} s no row was added to its {n_now}. The "
                "trainer that made the table assigns the first rows and may have ended before it was done, or the table was made without "
                f"weights: {AGAIN}; or erase the rows that are not wanted"
            )
        time.sleep(_POLL_S)


def chunk_rows(site: Site) -> int:
    """Return how many rows are assigned at a time."""
    return min(max(1, CHUNK_BYTES // (4 * site.dim)), CHUNK_ROWS)


def _exist(table: "Table", ids: NDArray[np.int64]) -> bool:
    return bool(table.pull(ids, return_versions=True)[1].all())


Carry = bool | Literal["overwrite"] | None
CARRIED = init.constant(0.0)


@dataclass(frozen=True)
class First:
    """How a table's rows begin: assigned (carried), or by an initializer, of the user's or not; None: the table exists, and has one."""

    carried: bool
    initializer: Initializer | None
    given: bool = False


@dataclass(frozen=True)
class TableOptions:
    """The options shared by all tables; see `kvemb.schema.table_def.TableDef`. Without an initializer each has its own."""

    dtype: str
    seed: int
    reduce: str
    initializer: Initializer | None


@dataclass(frozen=True, eq=False)
class SiteTable:
    """The table of a site, and whether this trainer made it; if not, `first.carried` says whether the one that made it assigns rows."""

    site: Site
    table: "Table"
    made: bool
    first: First


_OWN = 'If another model made it, give this one tables of its own: prefix="NAME/"'


def open_table(cluster: "Cluster", site: Site) -> SiteTable:
    """Open a table that exists."""
    try:
        table = cluster.table(site.table)
    except UnknownTableError as error:
        raise UnknownTableError(f"{site}: {error} Without optimizer=, tables that exist are opened, and none is made") from error
    n_ids = table.definition.num_ids
    if table.dim != site.dim or n_ids not in (None, site.n_rows):
        raise TableMismatchError(
            f"{site}: the table has dim {table.dim} and {n_ids or 'any'} ids, the module's weight is {site.n_rows} x {site.dim}. {_OWN}"
        )
    return SiteTable(site, table, made=False, first=First(False, None))


def exists(cluster: "Cluster", site: Site) -> bool:
    """Return whether a site's table does."""
    try:
        cluster.table(site.table)
    except UnknownTableError:
        return False
    return True


def make_table(cluster: "Cluster", site: Site, rule: OptimizerSpec, options: TableOptions, first: First, carry: Carry) -> SiteTable:
    """Make a site's table, or open it where it exists with the same identity; with its own initializer, unless the user gave one."""

    def create(initializer: Initializer, exist_ok: bool) -> "Table":
        try:
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
        except TableMismatchError as error:
            raise TableMismatchError(f"{site}: {error} {_OWN}") from error

    if first.initializer is not None:
        try:
            return SiteTable(site, create(first.initializer, exist_ok=False), made=True, first=first)
        except (InvalidInputError, TableMismatchError):  # it exists, or a value is wrong: then the same again
            if first.given or not exists(cluster, site):
                return SiteTable(site, create(first.initializer, exist_ok=True), made=False, first=first)
    kept = cluster.table(site.table).definition.initializer
    carried = bool(carry) or (carry is None and kept == CARRIED)
    return SiteTable(site, create(kept, exist_ok=True), made=False, first=First(carried, kept))


def fill(tables: Sequence[SiteTable], carry: Carry) -> None:
    """Assign the first rows of tables made here; then wait for those of other trainers, which may be waiting for ours."""
    for one in tables:
        if not one.first.carried:
            assign_padding(one.table, one.site)
        elif one.made or carry == "overwrite":
            assign_weights(one.table, one.site, np.arange(one.site.n_rows))
    for one in tables:
        if one.first.carried:
            wait_assigned(one.table, one.site)


def make_and_fill(
    cluster: "Cluster",
    sites: Sequence[Site],
    rules: Mapping[str, OptimizerSpec],
    options: TableOptions,
    first: Mapping[str, First],
    carry: Carry,
) -> list[SiteTable]:
    """Make or open the tables, and assign their first rows; where that fails, tables may have been made, which the error's note says."""
    tables: list[SiteTable] = []
    try:
        for site in sites:
            tables.append(make_table(cluster, site, rules[site.table], options, first[site.table], carry))
        fill(tables, carry)
    except BaseException as error:
        begun = [one.site.table for one in tables if one.first.carried and (one.made or carry == "overwrite")]
        if begun:
            error.add_note(f"The table(s) {', '.join(begun)} exist now, perhaps without all of their first rows; {AGAIN}")
        raise
    return tables


def rows_of_table(table: Any, ids: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
    """Read the rows of these ids [n], or of a table with num_ids all of them, chunk by chunk: float32 [n, dim]."""
    n_rows = table.definition.num_ids if ids is None else len(ids)
    rows = np.empty((n_rows, table.dim), np.float32)
    n_chunk = max(1, READ_BYTES // (4 * table.dim))
    for low in range(0, n_rows, n_chunk):
        high = min(low + n_chunk, n_rows)
        rows[low:high] = table.pull(np.arange(low, high) if ids is None else ids[low:high])
    return rows


def check_bytes(tables: Iterable[Any], max_bytes: int) -> None:
    """Refuse to copy more than that, of tables with num_ids."""
    sizes = {table.name: 4 * table.definition.num_ids * table.dim for table in tables}
    if sum(sizes.values()) > max_bytes:
        raise InvalidInputError(f"all rows of {', '.join(sizes)} are {sum(sizes.values())} bytes, above max_bytes={max_bytes}; raise it")
