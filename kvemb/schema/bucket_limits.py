"""The limits up to which a server keeps a hash as one compact string, and those that the tables in its buckets need. Pure.

Redis and Valkey: hash-max-listpack-value, the longest value, and hash-max-listpack-entries, the most fields. A compact table's records must
be within both. Hashes of hundreds of fields must not be, in any table: they are searched from their beginning. So the limit of entries
is above the number that a compact bucket may hold by chance, and below the number that is searched slower than a hash table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvemb.schema.buckets import FILLER, needs_filler
from kvemb.schema.table_def import TableDef

ENTRIES = 128  # of a compact bucket: 48 rows on average, and twice as many rows as were expected
_MOST_ENTRIES = 256


@dataclass(frozen=True)
class BucketLimits:
    """A server's limits."""

    entries: int  # hash-max-listpack-entries
    value_bytes: int  # hash-max-listpack-value


def limits_for(tables: Sequence[TableDef], limits: BucketLimits) -> BucketLimits:
    """Return the limits that a server should have for these tables: unchanged if none is compact."""
    sizes = [table.record.size_bytes for table in tables if table.layout == "compact"]
    if not sizes:
        return limits
    entries = limits.entries if ENTRIES <= limits.entries <= _MOST_ENTRIES else ENTRIES
    return BucketLimits(entries, max(limits.value_bytes, *sizes))


def misfits(tables: Sequence[TableDef], limits: BucketLimits) -> Iterator[str]:
    """Yield a line for each limit of a server that does not fit a table: the limit, its value, the one needed, the commands to type."""
    for table in tables:
        if table.num_ids is not None:
            continue
        wanted = limits_for([table], limits)
        size, compact = table.record.size_bytes, table.layout == "compact"
        longest = len(FILLER) if needs_filler(size, compact=compact) else size
        if not compact and longest <= limits.value_bytes and limits.entries > _MOST_ENTRIES:
            wanted = BucketLimits(_MOST_ENTRIES, limits.value_bytes)
            why = f"buckets of up to {limits.entries} rows would be searched from their beginning, and be slow"
        else:
            why = "its buckets would be hash tables, and take a third more memory"
        if wanted != limits:
            yield f"table {table.name!r} (layout {table.layout}, records of {size} bytes): {_change(limits, wanted)}; {why}"


def _change(limits: BucketLimits, wanted: BucketLimits) -> str:
    pairs = (
        ("hash-max-listpack-entries", limits.entries, wanted.entries),
        ("hash-max-listpack-value", limits.value_bytes, wanted.value_bytes),
    )
    return ", ".join(f"{name} is {have}, {need} is needed (CONFIG SET {name} {need})" for name, have, need in pairs if have != need)
