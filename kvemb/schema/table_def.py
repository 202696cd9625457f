"""The definition of a table: its identity, which can never change, and the defaults of its run-time values.

Two processes that disagree on a definition must not share rows. So 8 bits of its digest travel in every record, and the whole digest in
every creation. No I/O here; the registry of tables is shard 0's, and storage holds a copy.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import MOST_GROUPED_IDS, SLOT_SHIFT, KeyOrder, digest64
from kvemb.arrays.ids import are_among
from kvemb.arrays.rounding import opaque_bytes, storage_dtype
from kvemb.errors import FrozenTableError, InvalidInputError, TableMismatchError
from kvemb.init import ALGORITHM_VERSION, Initializer, zeros
from kvemb.init.first_draws import ALGORITHMS
from kvemb.optim import FROZEN, OptimizerSpec
from kvemb.process.cached_property import cached_property
from kvemb.schema.buckets import LAYOUTS, MAX_BUCKETS, BucketKeys, WholeBuckets, buckets_for, needs_filler
from kvemb.schema.keys import RowKeys, table_tag
from kvemb.schema.pages import LAYOUT_VERSION, PageLayout, WholePages, page_layout, paged_keys
from kvemb.schema.record import RecordFormat
from kvemb.schema.slots import N_SLOTS, Placement

MAX_DIM = 65536
_AT_ONCE = 1 << 16  # buckets or pages in one batch, or rows of pages
_MOST_WHOLE = 1 << 20  # buckets or pages that are deleted while a client waits for an answer
MAX_NAME_BYTES = 255
_ID_DTYPES = ("int64", "uint64")
_REDUCES = ("sum", "mean")
_UNNAMED_ALGORITHM = 1
"""Of definitions that name no algorithm of first values: when they were made, this was the only one."""
KEYS = {"name", "dim", "dtype", "id_dtype", "optimizer", "initializer", "seed", "reduce"}
KEYS |= {"tag_attempt", "num_ids", "life", "init_algorithm", "n_buckets", "layout"}


@dataclass(frozen=True)
class TableDef:
    """The definition of one table, fixed for its life; a value out of range is refused.

    One class, because its methods only read these fields: keys, digests and records follow from them.
    """

    name: str  # 1 to 255 bytes of printable text, in UTF-8; see `check_table_name`
    dim: int  # weights per row; any integer, NumPy's too
    optimizer: OptimizerSpec  # the update method; its kind and static options are identity, its hyper-parameters defaults
    initializer: Initializer  # the first value of a row; the parts of `kvemb.init.columns` have dim columns together
    # how weights are stored: "float32", "float16" or "bfloat16". Or "bytes:N" (N is dim, too): a row is N bytes, which only its users
    # understand; such a table is frozen, and rows that do not exist are zeros.
    dtype: str = "float32"
    id_dtype: str = "int64"  # the ids' domain: "int64" or "uint64". One table has one domain, so -1 and 2**64-1 can never be the same row.
    seed: int = 0  # of the initializer and of stochastic rounding
    reduce: str = "sum"  # how the gradients of different trainers combine in one step: "sum" or "mean"
    tag_attempt: int = 0  # which candidate for the key tag the registry took (0 unless another table has that tag)
    # of a dense table: its ids are 0 to num_ids - 1. Where storage can (Redis, Valkey), its records lie side by side in pages
    # (`kvemb.schema.pages`). None: ids of the whole domain.
    num_ids: int | None = None
    # how many tables of this name were dropped before; the registry sets it. No identity, but rows, journals and pushes of one life are
    # never taken for another's.
    life: int = 0
    # which version of the algorithm draws the first values. A table keeps the one that it was made with.
    init_algorithm: int = ALGORITHM_VERSION
    # of a table without num_ids: where storage can, its rows are fields of so many hashes (`kvemb.schema.buckets`), a power of two; None:
    # as many as without an expected number of rows. No identity, but fixed for the table's life.
    n_buckets: int | None = None
    # of such a table: "fast", or "compact" for buckets of some dozens of rows, which take less memory. As n_buckets, no identity.
    layout: str = "fast"

    def __post_init__(self) -> None:
        check_table_name(self.name)
        self._settle_integer("dim", 1, MAX_DIM + 1, f"[1, {MAX_DIM}]")
        self._settle_integer("seed", 0, 1 << 63, "[0, 2**63)")
        self._settle_integer("life", 0, 1 << 32, "[0, 2**32)")
        if self.id_dtype not in _ID_DTYPES:
            raise InvalidInputError(f"table {self.name!r}: id_dtype is {self.id_dtype!r}; give one of {', '.join(_ID_DTYPES)}")
        if self.num_ids is not None:
            most, shown = (1 << 63, "2**63") if self.id_dtype == "int64" else ((1 << 64) - 1, "2**64 - 1")  # what msgpack can carry
            self._settle_integer("num_ids", 1, most + 1, f"[1, {shown}], or None")
        self._settle_integer("init_algorithm", 1, 1 << 32, "[1, 2**32)")
        if self.init_algorithm not in ALGORITHMS:
            raise InvalidInputError(
                f"table {self.name!r}: its first values are drawn by algorithm {self.init_algorithm!r}, this kvemb knows "
                f"{' and '.join(map(str, ALGORITHMS))}; it was made by a newer kvemb: install that one here, too"
            )
        self._settle_buckets()
        if self.reduce not in _REDUCES:
            raise InvalidInputError(f"table {self.name!r}: reduce is {self.reduce!r}; give one of {', '.join(_REDUCES)}")
        try:
            storage_dtype(self.dtype)
            self.initializer.check_dim(self.dim)
            self._check_opaque()
        except InvalidInputError as error:
            raise InvalidInputError(f"table {self.name!r}: {error}") from error

    def _check_opaque(self) -> None:
        if (n_bytes := opaque_bytes(self.dtype)) is not None and (self.dim, self.optimizer, self.initializer) != (n_bytes, FROZEN, zeros()):
            raise InvalidInputError(
                f"rows of dtype {self.dtype} have dim {n_bytes}, no optimizer, and begin as zeros; got dim {self.dim}, "
                f"{self.optimizer.kind}, {self.initializer.kind}"
            )

    def _settle_buckets(self) -> None:
        """Keep a power of two, of a table whose rows lie in buckets."""
        if self.layout not in LAYOUTS:
            raise InvalidInputError(f"table {self.name!r}: layout is {self.layout!r}; give one of {', '.join(LAYOUTS)}")
        if self.num_ids is not None:
            if self.n_buckets is not None or self.layout != "fast":
                raise InvalidInputError(f"table {self.name!r}: give n_buckets, expected_rows or layout to a table without num_ids")
            return
        if self.n_buckets is None:
            object.__setattr__(self, "n_buckets", buckets_for(None, 1))
        self._settle_integer("n_buckets", 1, MAX_BUCKETS + 1, f"[1, {MAX_BUCKETS}]")
        if self.n_buckets is not None and self.n_buckets & (self.n_buckets - 1):
            raise InvalidInputError(f"table {self.name!r}: n_buckets is {self.n_buckets}; give a power of two")

    def _settle_integer(self, field: str, low: int, end: int, expected: str) -> None:
        """Keep the field as a Python int in [low, end), which messages and digests need, or refuse it."""
        given = getattr(self, field)
        value = whole_number(given)
        if value is None or not low <= value < end:
            raise InvalidInputError(f"table {self.name!r}: {field} is {given!r}; give an integer in {expected}")
        object.__setattr__(self, field, value)

    def identity(self) -> dict[str, Any]:
        """Everything that may never change, as plain values."""
        return {
            "name": self.name,
            "dim": self.dim,
            "dtype": self.dtype,
            "id_dtype": self.id_dtype,
            "optimizer": self.optimizer.identity(),
            "initializer": self.initializer.to_dict() | {"algorithm": self.init_algorithm},
            "seed": self.seed,
            "reduce": self.reduce,
        } | ({} if self.num_ids is None else {"num_ids": self.num_ids, "page_layout": LAYOUT_VERSION})

    @cached_property
    def schema(self) -> int:
        """8-bit digest of everything that is fixed for the table's life, carried in every record and every push."""
        more = {name: value for name, value in (("life", self.life), ("n_buckets", self.n_buckets)) if value}
        return digest64("schema", msgpack.packb(self.identity() | more)) & 0xFF

    @cached_property
    def key(self) -> str:
        """A text that tells this table from every other that the cluster ever had; no name has a line end."""
        return f"{self.name}\n{self.life}" if self.life else self.name

    @cached_property
    def tag(self) -> bytes:
        """The 3 characters that this table's keys begin with."""
        return table_tag(self.name, self.tag_attempt)

    @cached_property
    def record(self) -> RecordFormat:
        """How this table's records are laid out."""
        return RecordFormat(self.name, self.dim, self.dtype, self.optimizer.state_size(self.dim), self.schema)

    @cached_property
    def row_dtype(self) -> "np.dtype[Any]":
        """The NumPy dtype of rows as they are pulled and assigned: float32, or uint8 of opaque bytes."""
        return np.dtype(np.float32) if opaque_bytes(self.dtype) is None else np.dtype(np.uint8)

    @cached_property
    def pages(self) -> PageLayout | None:
        """Where rows lie on storage that has pages; None for a table without num_ids."""
        return None if self.num_ids is None else page_layout(self.record.size_bytes)

    @cached_property
    def placement(self) -> Placement:
        """How ids fall into slots, on every kind of storage: by buckets, or page by page."""
        if self.pages is not None:
            return Placement(N_SLOTS, self.pages.rows_per_page)
        assert self.n_buckets is not None
        return Placement(self.n_buckets)

    @cached_property
    def order(self) -> KeyOrder:
        """The order in which a shard lists the table's rows: slot after slot, and page after page."""
        return KeyOrder(self.placement.ids_per_group if (self.num_ids or 0) <= MOST_GROUPED_IDS else 1)

    def key_ranges(self, slots: NDArray[np.bool_]) -> list[tuple[int, int]]:
        """Return the ranges of keys (of `order`), first and one after the last, with all rows of some slots, bool [16384].

        Rows of other slots lie there only where a table has more than 2**50 ids: then it is the whole range.
        """
        if (self.num_ids or 0) > MOST_GROUPED_IDS:
            return [(0, 1 << 64)] if slots.any() else []
        n_each = max(1, N_SLOTS // self.placement.n_groups)  # slots from one that may have rows to the next
        edges = np.flatnonzero(np.diff(np.repeat(slots[::n_each], n_each), prepend=False, append=False))  # where a run begins, and ends
        return [(first << SLOT_SHIFT, end << SLOT_SHIFT) for first, end in edges.reshape(-1, 2).tolist()]

    def shown_id(self, row_id: int) -> int:
        """Return an id as its caller wrote it: negative where the table's ids are signed."""
        return row_id - (1 << 64) if self.id_dtype == "int64" and row_id >> 63 else row_id

    def keys(self, ids: NDArray[np.uint64], *, pages: bool, new: NDArray[np.bool_] | None = None) -> RowKeys:
        """Return the keys of unique ids, uint64 [n]; `new`, bool [n], says which rows may not exist yet, None: any."""
        if not pages:
            return RowKeys(self.tag, ids, name=self.name, placement=self.placement)
        if self.pages is None:
            assert self.n_buckets is not None
            keys = BucketKeys(self.tag, ids, self.n_buckets, name=self.name, compact=self.layout == "compact")
            return BucketKeys.with_buckets(keys, self.placement.groups(ids))
        return paged_keys(self.tag, ids, self.pages, new, name=self.name)

    @property
    def n_containers(self) -> int:
        """How many buckets or pages the table may have."""
        return self.n_buckets or -(-(self.num_ids or 0) // (self.pages.rows_per_page if self.pages else 1))

    def containers(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the number of each row's bucket or page: uint64 [n]."""
        return self.placement.groups(ids).astype(np.uint64) if self.pages is None else self.pages.pages(ids)

    def whole(self, numbers: NDArray[np.uint64]) -> RowKeys:
        """Return the keys of buckets or pages themselves, by their numbers, to delete them with all their rows."""
        if self.n_buckets is None:
            return WholePages(self.tag, numbers, name=self.name)
        return WholeBuckets(self.tag, numbers, self.n_buckets, name=self.name)

    def goes_whole(self, *, pages: bool) -> bool:
        """Whether a dropped table's buckets or pages are deleted whole, instead of its rows one by one."""
        return pages and self.n_containers <= _MOST_WHOLE

    def leftovers(self, *, pages: bool) -> Iterator[RowKeys]:
        """Yield the keys of a dropped table that remain in storage once no shard knows of a row: buckets with rows or a filler, pages."""
        filled = self.n_buckets is not None and needs_filler(self.record.size_bytes, compact=self.layout == "compact")
        if not pages or not (filled or self.goes_whole(pages=pages)):
            return
        for start in range(0, self.n_containers, _AT_ONCE):
            yield self.whole(np.arange(start, min(start + _AT_ONCE, self.n_containers), dtype=np.uint64))

    def emptied(self, ids: NDArray[np.uint64], exist: Callable[[NDArray[np.uint64]], NDArray[np.bool_]]) -> NDArray[np.uint64]:
        """Return the pages without a row once these ids are erased, uint64 [k], none of a table in buckets; `exist` says which ids are."""
        if self.pages is None or self.num_ids is None:
            return ids[:0]
        erased, layout = np.sort(ids), self.pages
        pages = np.unique(layout.pages(ids))
        n_at_once, empty = max(1, _AT_ONCE // layout.rows_per_page), [pages[:0]]
        for some in (pages[at : at + n_at_once] for at in range(0, len(pages), n_at_once)):
            rows = self.rows_under(self.whole(some), pages=True).ids
            rows = rows[exist(rows)]
            empty.append(some[~are_among(some, np.unique(layout.pages(rows[~are_among(rows, erased)])))])
        return np.concatenate(empty)

    def rows_under(self, found: RowKeys, *, pages: bool) -> RowKeys:
        """Return the keys of every row that may lie under keys of this table that were found on a node (`StoreRepair.keys_on`).

        Where rows lie in pages, the keys found are the pages', and each stands for all rows of its page, whether they exist or not.
        """
        if self.pages is None or self.num_ids is None or not pages:
            return self.keys(found.ids, pages=pages)
        n = self.pages.rows_per_page
        firsts = found.ids[found.ids <= np.uint64((self.num_ids - 1) // n)] * np.uint64(n)
        rows: NDArray[np.uint64] = np.add.outer(firsts, np.arange(n, dtype=np.uint64)).reshape(-1)
        inside = (rows < np.uint64(self.num_ids)) & (rows >= np.repeat(firsts, n))  # the last page may end after 64 bits
        return self.keys(rows[inside], pages=True)

    def initial_rows(self, ids: NDArray[np.uint64]) -> NDArray[Any]:
        """Return the first values of rows by their ids, uint64 [n]: `row_dtype` [n, dim], a new array."""
        if self.row_dtype == np.uint8:
            return np.zeros((len(ids), self.dim), np.uint8)
        return self.initializer.rows(ids, self.dim, table=self.name, seed=self.seed, dtype=self.dtype, algorithm=self.init_algorithm)

    def require_trained(self) -> None:
        """Refuse gradients for a table that takes none."""
        if self.optimizer.kind == FROZEN.kind:
            raise FrozenTableError(
                f"table {self.name!r} ({self.dtype}) is frozen: it takes no gradients. Set its rows by assign or import_rows; a table that "
                "is trained is created with an optimizer"
            )

    def require_same(self, other: "TableDef", advice: str = "Open it with its own definition, or choose another name.") -> None:
        """Refuse a definition with another identity than this existing one."""
        mine, theirs = self.identity(), other.identity()
        different = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        if different:
            lines = [f"  {key}: exists with {mine.get(key)!r}, asked for {theirs.get(key)!r}" for key in different]
            if self.identity() == other.opened_as(self).identity():  # a user never asks for an algorithm, but a checkpoint does
                advice = "Rows that were never pushed would change. To load them, drop the table first; the load makes it as it was."
            raise TableMismatchError(f"table {self.name!r} exists with another identity:\n" + "\n".join(lines) + f"\n{advice}")

    def opened_as(self, existing: "TableDef") -> "TableDef":
        """Return the same definition with the existing table's algorithm of first values, which no user chooses."""
        return replace(self, init_algorithm=existing.init_algorithm)

    def laid_out(self, expected_rows: object, layout: str | None = None) -> "TableDef":
        """Return the same definition with as many buckets as about so many rows need in this layout; None: not known."""
        if expected_rows is None and layout is None:
            return self
        if self.num_ids is not None:
            raise InvalidInputError(
                f"table {self.name!r}: give num_ids, which says how many rows there may be and lays them side by side, or expected_rows "
                "and layout; not both"
            )
        n_rows = whole_number(expected_rows)
        if n_rows is None and expected_rows is not None:
            raise InvalidInputError(f"table {self.name!r}: expected_rows is {expected_rows!r}; give a number of rows, or None")
        chosen = replace(self, layout="fast" if layout is None else layout)
        try:
            return replace(chosen, n_buckets=buckets_for(n_rows, self.record.size_bytes, chosen.layout))
        except InvalidInputError as error:
            raise InvalidInputError(f"table {self.name!r}: {error}") from error

    def with_tag_attempt(self, attempt: int) -> "TableDef":
        """Return the same definition with the given candidate for the key tag."""
        return replace(self, tag_attempt=attempt)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for messages, files and YAML."""
        return {
            "name": self.name,
            "dim": self.dim,
            "dtype": self.dtype,
            "id_dtype": self.id_dtype,
            "optimizer": self.optimizer.to_dict(),
            "initializer": self.initializer.to_dict(),
            "seed": self.seed,
            "reduce": self.reduce,
            "tag_attempt": self.tag_attempt,
        } | {name: value for name, value in self._rarer().items() if value is not None}

    def _rarer(self) -> dict[str, int | str | None]:
        """Return the fields that are written only if they differ from their default: earlier definitions keep their bytes."""
        algorithm = None if self.init_algorithm == _UNNAMED_ALGORITHM else self.init_algorithm
        return {"num_ids": self.num_ids, "life": self.life or None, "init_algorithm": algorithm, "n_buckets": self.n_buckets} | (
            {"layout": self.layout} if self.layout != "fast" else {}
        )

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> "TableDef":
        """Rebuild a definition; unknown or missing keys are refused by name. Without init_algorithm the first algorithm is meant."""
        unknown = sorted(set(fields) - KEYS)
        missing = sorted({"name", "dim", "optimizer", "initializer"} - set(fields))
        if unknown or missing:
            wrong = {"unknown": unknown, "missing": missing}
            raise InvalidInputError("table definition: " + "; ".join(f"{what}: {', '.join(keys)}" for what, keys in wrong.items() if keys))
        rest = {"init_algorithm": _UNNAMED_ALGORITHM} | {key: fields[key] for key in fields if key not in ("optimizer", "initializer")}
        return TableDef(
            optimizer=OptimizerSpec.from_dict(fields["optimizer"]),
            initializer=Initializer.from_dict(fields["initializer"]),
            **rest,
        )


def frozen_or_trained(name: object, dim: Any, dtype: object, optimizer: Any, initializer: Any, *, frozen: object) -> tuple[Any, bool]:
    """Return the dim of a table that a person defines, and whether it is frozen."""
    at, n_bytes = f"table {name!r}", opaque_bytes(dtype)
    if str(dtype).startswith("bytes") and n_bytes is None:
        raise InvalidInputError(f"{at}: dtype is {dtype!r}; give bytes:N for rows of N bytes, N from 1 to {MAX_DIM}")
    if not isinstance(frozen, bool):
        raise InvalidInputError(f"{at}: frozen is {frozen!r}; give true or false")
    if n_bytes is not None and initializer is not None:
        raise InvalidInputError(f"{at}: rows of dtype {dtype} begin as zeros; leave the initializer out")
    if n_bytes is not None and dim not in (None, n_bytes):
        raise InvalidInputError(f"{at}: dim is {dim!r} and dtype {dtype}, whose rows are {n_bytes} bytes; leave dim out")
    frozen = frozen or n_bytes is not None
    if frozen and optimizer is not None:
        reason = f"rows of dtype {dtype} are not trained" if n_bytes is not None else "a frozen table is not trained"
        raise InvalidInputError(f"{at}: {reason}; leave the optimizer out")
    if not frozen and optimizer is None:
        raise InvalidInputError(f"{at}: give an optimizer, or frozen=True for a table that is not trained")
    if dim is None and n_bytes is None:
        raise InvalidInputError(f"{at}: give dim, how many weights a row has")
    return n_bytes or dim, frozen


def whole_number(given: object) -> int | None:
    """Return an integer of any kind, NumPy's too, as Python's; None where it is none."""
    try:
        return None if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]  # it raises TypeError
    except TypeError:
        return None


def check_table_name(name: object) -> str:
    """Return the name, or refuse it.

    Any printable text: module paths, blanks and "/" included. It is never part of a key, and escaped where it becomes part of a path.
    """
    if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
        raise InvalidInputError(
            f"table name {_shown(name)}: use printable text without control characters and line ends, and without blanks around it"
        )
    if (size_bytes := len(name.encode())) > MAX_NAME_BYTES:
        raise InvalidInputError(f"table name {_shown(name)}: {size_bytes} bytes in UTF-8; use at most {MAX_NAME_BYTES}")
    return name


def _shown(name: object) -> str:
    return repr(name) if not isinstance(name, str) or len(name) <= MAX_NAME_BYTES else f"{name[:40]!r}…"
