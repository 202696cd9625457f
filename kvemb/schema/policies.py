"""The policies of a table: which ids get rows, and which rows are erased. No I/O, and no part of the table's identity.

A definition is fixed for a table's life and its digest stands in every record; policies may change while training goes on. The registry of
tables has the last few of each table, with its own serial as of each change. A push says by which serial its trainer knows the tables. A
shard of a sync job decides a step by the newest policies that one of the step's trainers can have known. All shards get a part of every
trainer, so they change at the same step. Shards of an async job decide by the newest that they have heard of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvemb.admit import Admission
from kvemb.errors import InvalidInputError
from kvemb.evict import Eviction

KEPT_CHANGES = 8
_FIELDS = {"admission", "eviction"}


@dataclass(frozen=True)
class Policies:
    """What one table does with new ids and old rows."""

    admission: Admission = field(default_factory=Admission)  # which new ids get a row
    eviction: Eviction = field(default_factory=Eviction)  # which rows are erased

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"admission": self.admission.to_dict(), "eviction": self.eviction.to_dict()}

    def updated(self, fields: object) -> "Policies":
        """Return the same with those of a mapping, which may lack either, in their place."""
        if not isinstance(fields, Mapping) or not set(fields) <= _FIELDS:
            raise InvalidInputError(f"policies are a mapping of {' and '.join(sorted(_FIELDS))}, got {fields!r}")
        new = self
        if "admission" in fields:
            new = replace(new, admission=Admission.from_dict(fields["admission"]))
        return replace(new, eviction=Eviction.from_dict(fields["eviction"])) if "eviction" in fields else new


@dataclass(frozen=True)
class PolicyChange:
    """Policies that a caller gives; None: as it is."""

    # admission, eviction: as in `Policies`
    admission: Admission | None = None
    eviction: Eviction | None = None

    def __post_init__(self) -> None:
        for given, kind, at in ((self.admission, Admission, "kvemb.admit"), (self.eviction, Eviction, "kvemb.evict")):
            if given is not None and not isinstance(given, kind):
                raise InvalidInputError(f"got {given!r} where one of {at}'s functions is expected to be called")

    def to_dict(self) -> dict[str, Any]:
        """Plain values of those that are given."""
        given = {"admission": self.admission, "eviction": self.eviction}
        return {name: policy.to_dict() for name, policy in given.items() if policy is not None}


NO_POLICIES = Policies()
Changes = tuple[tuple[int, Policies], ...]
"""The last changes of one table's policies, each with the serial of the registry as of it, ascending."""


def as_of(changes: Changes, serial: int) -> Policies:
    """Return the policies that hold for a push made by this serial of the registry; 0: the newest."""
    if not changes:
        return NO_POLICIES
    known = [policies for at, policies in changes if at <= serial]
    return changes[-1][1] if not serial else known[-1] if known else changes[0][1]
