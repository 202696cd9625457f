"""The storage servers' limits: of records, for which a table or a node is refused, and of buckets.

Those of buckets are set as the tables need them where that is allowed; limits that do not fit are reported. A limit lasts until its server
is started again. So limits are checked when a table is made, when shard 0 starts, and when a node that lost its rows is filled again. Rows
are right with any limits: buckets beyond them take more memory, or are slower.
"""

import logging
from collections.abc import Sequence

from kvemb.errors import ConfigError, InvalidInputError, KvembError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.bucket_limits import limits_for, misfits
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

log = logging.getLogger("paramserver")
_REFUSED = (ConfigError, ProtocolError)  # no permission, or a server without the command: another try would not help


def require_records_fit(store: Store, addresses: Sequence[str], tables: Sequence[TableDef], timeout_s: float) -> None:
    """Refuse tables, or a node that is to join, where a node does not take the tables' records."""
    for address in addresses:
        limit = store.nodes.max_record_bytes(address, Deadline.after(timeout_s))
        for table in tables:
            if limit is not None and table.record.size_bytes > limit:
                raise InvalidInputError(
                    f"node {address}: takes records of at most {limit} bytes, those of table {table.name!r} have "
                    f"{table.record.size_bytes}. Nothing was changed. Start the node with a larger item limit (memcached: -I), or make the "
                    "table with a smaller dim, a 16-bit dtype or an optimizer with less state."
                )


def require_limits(store: Store, table: TableDef, timeout_s: float) -> None:
    """Have every node keep a new table's buckets as its layout says; for a table that is not compact, log limits that do not fit.

    Raises:
        InvalidInputError: the table is compact, and a node's limits do not fit and may not be changed. It names both; no table was made.
    """
    if table.layout != "compact":
        settle_limits(store, store.nodes.addresses, [table], timeout_s)
        return
    for address in store.nodes.addresses:
        _settle(store, address, [table], Deadline.after(timeout_s))


def settle_limits(store: Store, addresses: Sequence[str], tables: Sequence[TableDef], timeout_s: float) -> None:
    """Do the same for tables that are in use already: limits that cannot be set are logged."""
    for address in addresses:
        try:
            _settle(store, address, tables, Deadline.after(timeout_s))
        except KvembError as error:
            log.log(logging.WARNING if any(table.layout == "compact" for table in tables) else logging.DEBUG, "%s", error)


def _settle(store: Store, address: str, tables: Sequence[TableDef], deadline: Deadline) -> None:
    names = ", ".join(repr(table.name) for table in tables if table.layout == "compact")
    try:
        limits = store.rows.bucket_limits(address, deadline)
    except _REFUSED as error:
        raise InvalidInputError(f"tables {names} (layout compact): the limits of node {address} cannot be read: {error}") from error
    if limits is None:
        return
    wanted = limits_for(tables, limits)
    if wanted != limits:
        try:
            store.rows.set_bucket_limits(address, wanted, deadline)
        except _REFUSED as error:
            why = "; ".join(misfits(tables, limits))
            raise InvalidInputError(f"node {address}: {why}. Type that on the node, where kvemb may not ({error})") from error
        log.info(
            "node %s: set hash-max-listpack-entries %d (was %d), hash-max-listpack-value %d (was %d) for %s. Put both into the node's "
            "configuration: they hold until it is started again",
            *(address, wanted.entries, limits.entries, wanted.value_bytes, limits.value_bytes, names),
        )
    for text in misfits(tables, wanted):
        log.warning("node %s: %s", address, text)
