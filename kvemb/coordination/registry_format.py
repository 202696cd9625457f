"""The registry of tables as bytes: shard 0 writes them into storage, read-only clients read them there. Pure.

Every node holds a copy. Each write has a serial, and the highest that any node holds is the truth. A write that reached some nodes only is
completed by the next one.

Tables that were dropped stay in it for good, beside those that exist. Shards' journals and snapshots may still name them, and no later
table may get their keys. So do the last policies of each table that has had any. A registry without either has the form that older
releases read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from kvemb.coordination.replicated_values import DamagedCopyError, intact_copies
from kvemb.errors import InvalidInputError, ProtocolError, other_format
from kvemb.schema.policies import NO_POLICIES, Changes
from kvemb.schema.table_def import TableDef

META_NAME = "kvemb:tables"
_MAGIC = "kvemb-tables"
_VERSION, _WITH_DROPPED, _WITH_POLICIES = 1, 2, 3
_VERSIONS = (_VERSION, _WITH_DROPPED, _WITH_POLICIES)


STAGED, REPLACED = "staged", "replaced"


class Dropped(NamedTuple):
    """A table without a name: it was dropped, or takes part in an alteration (docs/adr/0102)."""

    definition: TableDef  # the table
    gone: bool  # whether no shard has a row of it any more, so that its name is free
    # STAGED: it is being filled, to take the place of the table of its name. REPLACED: another one has its name, or the alteration was
    # given up. "": it was dropped.
    altered: str = ""


class Registered(NamedTuple):
    """A registry's content: the tables that exist, by name, those that were or are being dropped, by key, and the policies of tables.

    Of a table, by its key, `policies` has the last changes; it lacks tables that never had any.
    """

    serial: int
    tables: dict[str, TableDef]
    dropped: dict[str, Dropped]
    policies: Mapping[str, Changes] = {}


def encode_registry(
    serial: int, tables: Iterable[TableDef], dropped: Iterable[Dropped] = (), policies: Mapping[str, Changes] | None = None
) -> bytes:
    """Return the bytes of a registry."""
    # The third field is there after an alteration only: earlier registries keep their bytes.
    old = [[one.definition.to_dict(), one.gone, *([one.altered] if one.altered else [])] for one in dropped]
    of_tables = [[key, [[at, of.to_dict()] for at, of in changes]] for key, changes in sorted((policies or {}).items())]
    version = _WITH_POLICIES if of_tables else _WITH_DROPPED if old else _VERSION
    fields = [_MAGIC, version, serial, [table.to_dict() for table in tables], old, of_tables]
    packed: bytes = msgpack.packb(fields[: 3 + version])
    return packed


def decode_registry(data: bytes) -> Registered:
    """Read a registry's bytes."""
    try:
        fields = msgpack.unpackb(data, max_array_len=4096, max_map_len=256, max_ext_len=0)
        if not isinstance(fields, list) or fields[:1] != [_MAGIC]:
            raise ValueError("no list of ours")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DamagedCopyError(f"expected a table registry, got {data[:40]!r}") from error
    try:
        _, version, serial, items, *old = fields
        if version not in _VERSIONS:
            raise ProtocolError(other_format("the registry of tables", version, _VERSIONS))
        if len(old) != version - _VERSION:
            raise ValueError(f"{len(old)} lists behind that of the tables")
        tables = [TableDef.from_dict(item) for item in items]
        dropped = [_dropped(*item) for item in (old[0] if old else ())]
        policies = dict(_changes(item) for item in (old[1] if len(old) > 1 else ()))
        return Registered(int(serial), {table.name: table for table in tables}, {one.definition.key: one for one in dropped}, policies)
    except (InvalidInputError, ValueError, TypeError) as error:
        raise ProtocolError(
            f"the value under {META_NAME} is not a table registry of this release: {error}; a later release has made such a table: install "
            "it for trainers, shards and commands (docs/upgrade.md)"
        ) from error


def _dropped(definition: Any, gone: Any, altered: str = "") -> Dropped:
    if altered not in ("", STAGED, REPLACED):
        raise ValueError(f"a table that is {altered!r}")
    return Dropped(TableDef.from_dict(definition), bool(gone), altered)


def _changes(item: Any) -> tuple[str, Changes]:
    key, changes = item
    return str(key), tuple((int(at), NO_POLICIES.updated(of)) for at, of in changes)


def newest_registry(copies: Iterable[bytes | None], where: Sequence[str] = ()) -> Registered:
    """Return the registry of the highest serial among the nodes' copies; an empty one of serial 0 when there is none."""
    found = intact_copies(copies, decode_registry, META_NAME, where)
    return max(found, key=lambda registry: registry.serial, default=Registered(0, {}, {}))
