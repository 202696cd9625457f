"""Reads the rows of a view, or of the projection that is maintained, from its target; needs nothing else.

With each batch the list of views is read after the rows, in the same round trip: if the view is still there then, the rows were whole. A
batch reads the keys of one view alone, so it cannot mix two. Of the maintained projection its records are read before the rows and after
them: they tell whether the tables are the ones that were opened, and which of them are being filled. Thread- and fork-safe.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import NodeLostError, UnknownTableError, UnknownViewError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.pool import LinkPool
from kvemb.projection.projected_rows import ProjectedTable
from kvemb.projection.projection_target import PREFIX
from kvemb.projection.views import COMPLETE, LIVE, VIEWS_KEY, View, ViewList, dense_bytes
from kvemb.schema.table_def import TableDef
from kvemb.stores.node_batch import NodeSteps, group_by_node, raise_row_errors, unexpected_value
from kvemb.stores.redis_server.redis_commands import ask_all
from kvemb.stores.redis_server.redis_login import RedisAccess, log_in
from kvemb.wire.replies import RepliesInOrder, Step, UnexpectedValueError
from kvemb.wire.resp.resp_codec import RespCodec, command
from kvemb.wire.resp.resp_value import Value, ValueReply

Ids = NDArray[np.uint64]
_MADE_HERE = ("row_bytes", "keys", "definition")  # of a description, what is no field of `ProjectedTable`


class ProjectionReader:
    """Opens views of one target."""

    def __init__(self, address: str, access: RedisAccess) -> None:
        self.address, self.pool = address, LinkPool(lambda address, deadline: log_in(address, access, deadline))

    def open(self, name: str, deadline: Deadline) -> "ProjectedRows":
        """Return the rows of a view."""
        (raw,) = self.values([VIEWS_KEY], deadline)
        return self.open_view(ViewList.decode(raw).named(name), deadline)

    def open_view(self, view: View | None, deadline: Deadline) -> "ProjectedRows":
        """Return the rows of a view, of the maintained projection for None; raises as `open`."""
        (about,) = self.values([f"{view.prefix if view else PREFIX}projection"], deadline)
        if about is None and view is None:
            raise UnknownViewError(f"target {self.address} holds no projection that `kvemb publish` maintains, and no view is in use")
        if about is None:
            raise NodeLostError(f"target {self.address}: view {view.name if view else LIVE!r} is lost; make it again")
        return ProjectedRows(self, view, json.loads(about))

    def look(self, rows: "ProjectedRows", deadline: Deadline) -> tuple[ViewList, bytes | None]:
        """Return the views that there are, and the record of the projection that has rows, see `ProjectedRows.same_tables`."""
        raw, record = self.values([VIEWS_KEY, rows.record_key], deadline)
        return ViewList.decode(raw), record

    def values(self, keys: Sequence[str], deadline: Deadline) -> list[bytes | None]:
        """Return small values."""
        with self.pool.lease([self.address], deadline) as links:
            found = ask_all(links[self.address], [("GET", key) for key in keys], deadline)
        return [value if isinstance(value, bytes) else None for value in found]

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self.pool.close()


class ProjectedRows:
    """The rows of one view, or of the maintained projection as long as its tables stay the same."""

    def __init__(self, reader: ProjectionReader, view: View | None, about: dict[str, Any]) -> None:
        self._reader, self.view = reader, view
        fields = {name: {key: value for key, value in one.items() if key not in _MADE_HERE} for name, one in about["tables"].items()}
        self._tables = {name: ProjectedTable(**some) for name, some in fields.items()}
        self._described = {name: asdict(table) for name, table in self._tables.items()}
        self.definitions = {name: TableDef.from_dict(one["definition"]) for name, one in about["tables"].items()}  # of its tables, by name
        self._record_keys = [f"{view.prefix if view else PREFIX}projection:{part + 1}/{about['parts']}" for part in range(about["parts"])]
        self._codec = RespCodec()

    @property
    def record_key(self) -> str:
        """Of the projection, or of the first publisher's share of it."""
        return self._record_keys[0]

    @property
    def name(self) -> str:
        """The view's; "live" for the maintained projection."""
        return self.view.name if self.view else LIVE

    def definition(self, name: str) -> TableDef:
        """Return a table's. Raises UnknownTableError."""
        if name not in self.definitions:
            there = ", ".join(map(repr, sorted(self.definitions))) or "none"
            raise UnknownTableError(f"view {self.name!r} of target {self._reader.address} has no table {name!r}; it has: {there}")
        return self.definitions[name]

    def dense(self, deadline: Deadline) -> bytes:
        """Return the content of the view's dense file; the view must have one."""
        assert self.view is not None
        with self._reader.pool.lease([self._reader.address], deadline) as links:
            return dense_bytes(links[self._reader.address], self.view, deadline)

    def pull(self, wanted: Sequence[tuple[TableDef, Ids]], timeout_s: float) -> list[tuple[NDArray[Any], Ids]]:
        """Read rows of unique ids, uint64 [n], of several tables: of each rows [n, dim], the initializer's for none; uint64 [n], 1 or 0."""
        deadline, address = Deadline.after(timeout_s), self._reader.address
        parts: list[NodeSteps] = []
        read: list[_Read] = []
        for definition, ids in wanted:
            table = self._tables[definition.name]
            grouped = group_by_node(table.keys(ids), None)
            values, found = np.empty((len(ids), table.row_bytes), np.uint8), np.zeros(len(ids), np.bool_)
            parts.append(NodeSteps(address, grouped.keys, self._codec.read_steps(grouped.keys, table.row_bytes, values, found, None)))
            read.append((table, grouped.order, values, found))
        behind, rows = _ValuesStep([VIEWS_KEY] if self.view else self._record_keys), [step for part in parts for step in part.steps]
        ahead = _ValuesStep([] if self.view else self._record_keys)  # a row that is not there may have come when the records are read
        with self._reader.pool.lease([address], deadline) as links:
            try:
                run([Conversation(links[address], [*ahead.steps, *rows, *behind.steps])], deadline)
            except UnexpectedValueError as error:
                raise unexpected_value(parts, error) from error
        raise_row_errors(parts)
        self._require_whole([*behind.values, *ahead.values], {one[0].name for one in read if not one[3].all()})
        return [_in_order(definition, ids, one) for (definition, ids), one in zip(wanted, read, strict=True)]

    def same_tables(self, record: Value) -> bool:
        """Whether a record of the maintained projection is of these tables."""
        return bool(self._read_record(record)["tables"] == self._described)

    def _read_record(self, record: Value) -> dict[str, Any]:
        if not isinstance(record, bytes):
            raise NodeLostError(f"target {self._reader.address}: holds no projection any more; rows come back when its publisher fills it")
        found: dict[str, Any] = json.loads(record)
        return found

    def _require_whole(self, found: Sequence[Value], lacking: set[str]) -> None:
        """Refuse what is not of this view, or may be without a row that comes yet; `lacking`: the tables of which a row was not there."""
        if self.view is None:
            if not self.same_tables(found[0]):
                raise UnknownViewError(f"target {self._reader.address}: the tables of its projection have changed; open it again")
            for fields in map(self._read_record, found) if lacking else ():
                others = {name for name in lacking if fields["tables"].get(name) != self._described[name]}  # another publisher's
                if filling := others | lacking & {*fields.get("filling", ())}:
                    raise NodeLostError(f"target {self._reader.address}: table {min(filling)!r} is not filled by all its publishers yet")
            return
        if found[0] is None:
            raise NodeLostError(f"target {self._reader.address}: holds no views any more; make view {self.view.name!r} again")
        there = ViewList.decode(found[0] if isinstance(found[0], bytes) else None).views.get(self.view.name)
        if there != self.view or there.state != COMPLETE:
            raise UnknownViewError(f"target {self._reader.address}: view {self.view.name!r} was dropped")


class _ValuesStep:
    """Reads small values in the midst of a batch; no step where there are none."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._replies = [ValueReply() for _ in keys]
        words = b"".join(command(b"GET", key.encode()) for key in keys)
        self.steps = [Step(memoryview(words), RepliesInOrder(self._replies))] if keys else []

    @property
    def values(self) -> list[Value]:
        return [reply.value for reply in self._replies]


_Read = tuple[ProjectedTable, NDArray[np.intp] | None, NDArray[np.uint8], NDArray[np.bool_]]
"""A table, the order in which its keys were asked for, and in that order the values and which of them are there."""


def _in_order(definition: TableDef, ids: Ids, read: _Read) -> tuple[NDArray[Any], Ids]:
    """Return rows and versions in the order of ids."""
    table, order, values, found = read
    if order is not None:
        at = np.empty_like(order)
        at[order] = np.arange(len(order))
        values, found = values[at], found[at]
    missing = np.flatnonzero(~found)
    values[missing] = 0  # no bytes of before
    rows = table.rows(values)
    if len(missing):
        rows = rows if rows.flags.writeable else rows.copy()
        rows[missing] = definition.initial_rows(ids[missing])
    return rows, found.astype(np.uint64)
