"""What a shard writes on every node about itself: its note, and the report of its part in a phase of a plan. Pure.

Neither is a promise: the newest copy counts, and one that is lost, old or damaged only says less. The note says how far the shard has come,
of which cluster it is, where it runs, and when it last wrote the note. It has two uses. A start whose
journal has lost its end is refused (`paramserver.recovery.high_water_mark`), and errors name the cluster that a node belongs to.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import msgpack

from kvemb.coordination.markers import Marker
from kvemb.errors import WrongNodeError, n_of

_LIVES_S = 60  # a shard that runs renews its note several times as often
_TYPES = (int, int, bool, int, int, str)  # of a report's fields; a last one that is 0 is left out
MAX_TROUBLE = 500
T = TypeVar("T")


@dataclass(frozen=True)
class ShardNote:
    """One shard's note."""

    # epoch, k: of the last batch that it had applied
    epoch: int
    k: int
    cluster: str = ""  # the name in its kvemb.yaml; "" where an older release wrote the note
    place: str = ""  # host and data folder
    at_s: int = 0  # Unix time

    def encode(self) -> bytes:
        """The bytes stored under `note_name`."""
        packed: bytes = msgpack.packb([self.epoch, self.k, self.cluster, self.place, self.at_s])
        return packed


def note_name(shard: int) -> str:
    """The name of a shard's note, for `StoreValues.get`."""
    return f"kvemb:reached:{shard}"


def newest_note(copies: Iterable[bytes | None]) -> ShardNote | None:
    """The newest of the nodes' copies that can be read; None when there is none."""
    return max(_readable(copies, _note), key=lambda one: (one.epoch, one.k, one.at_s), default=None)


def whose(cluster_id: bytes, shard: int, note: ShardNote | None, now_s: float) -> str:
    """Return in words which cluster has nodes, and whether it lives."""
    if note is None or not note.cluster:
        return f"cluster {cluster_id.hex()}"
    lives = abs(now_s - note.at_s) < _LIVES_S
    when = f"{max(0.0, now_s - note.at_s):.0f} s ago" if lives else f"last at {datetime.fromtimestamp(note.at_s, UTC):%Y-%m-%d %H:%M} UTC"
    named = f"cluster {note.cluster!r} ({cluster_id.hex()}){', which lives' if lives else ''}"
    return f"{named}: shard {shard} of it was at work {when} on {note.place}"


def of_another(
    nodes: Sequence[str], cluster_id: bytes, note: ShardNote | None, name: str, now_s: float, served: Collection[bytes] = ()
) -> tuple[str, str] | None:
    """Say that nodes are another cluster's than kvemb.yaml means, and what to correct; None where no note tells."""
    fact = f"storage.nodes ({', '.join(nodes)}) hold the rows of {whose(cluster_id, 0, note, now_s)}"
    if served:
        theirs = ", ".join(sorted(one.hex() for one in served))
        mend = "Correct storage.nodes, or parameter_servers.shards, in kvemb.yaml: it mixes two clusters, or one was set up again."
        return None if cluster_id in served else (f"{fact}. The shards that answer are of cluster {theirs}. Nothing was changed.", mend)
    if note is None or note.cluster in ("", name):
        return None
    mend = "Correct storage.nodes in it: a cluster has nodes of its own. If it is meant to be that cluster, correct `cluster`."
    return f"{fact}. This kvemb.yaml is of cluster {name!r}. Nothing was changed.", mend


def whose_keys(node: str, n_keys: int, marker: bytes | None, note: bytes | None, now_s: float) -> str:
    """Return in words which cluster's keys a node holds that ought to be empty, and that nothing was changed."""
    said = newest_note([note])
    try:
        what = "" if marker is None else f"the rows of {whose(Marker.decode(marker, node).cluster_id, 0, said, now_s)}"
    except WrongNodeError as error:
        what = str(error)
    if not what and said is not None and said.cluster:
        what = f"once of cluster {said.cluster!r}, whose marker is gone: shard 0 of it ran on {said.place}"
    return f"node {node}: holds {n_of(n_keys, 'key')}, {what or 'and no marker of kvemb: they are of another program'}. Nothing was changed"


@dataclass(frozen=True)
class MoveReport:
    """One shard's report; it is good for one epoch of the shard, and one version of the map."""

    epoch: int  # of the shard's process
    version: int  # of the cluster map that it followed
    done: bool  # whether its part of the phase is done
    # rows, n_rows: how many rows it has gone through in this phase, and how many there are
    rows: int = 0
    n_rows: int = 0
    trouble: str = ""  # why its part does not go on; "" while it does
    step: int = 0  # of a sync job, while all hold: the last step that it has handed out

    def encode(self) -> bytes:
        """The bytes stored under `report_name`."""
        items = [self.epoch, self.version, self.done, self.rows, self.n_rows, self.trouble]
        packed: bytes = msgpack.packb([*items, self.step] if self.step else items)
        return packed


def report_name(shard: int) -> str:
    """The name of a shard's report, for `StoreValues.get`."""
    return f"kvemb:move:{shard}"


def newest_report(copies: Iterable[bytes | None]) -> MoveReport | None:
    """Return the newest of the nodes' copies that can be read; None for none."""
    return max(_readable(copies, _report), key=lambda one: (one.epoch, one.version, one.done, one.rows), default=None)


def _readable(copies: Iterable[bytes | None], decode: Callable[[bytes], T]) -> list[T]:
    found = []
    for copy in copies:
        with suppress(Exception):  # msgpack raises ValueError, UnpackException, TypeError: all mean bad bytes
            found += [] if copy is None else [decode(copy)]
    return found


def _note(copy: bytes) -> ShardNote:
    note = ShardNote(*msgpack.unpackb(copy, max_array_len=5, max_map_len=0, max_str_len=8192, max_bin_len=0))
    types = [type(value) for value in (note.epoch, note.k, note.cluster, note.place, note.at_s)]
    if types != [int, int, str, str, int] or not (0 <= note.k < 1 << 48 and 0 <= note.at_s < 1 << 36):
        raise ValueError("a field of another type, or out of range")
    return note


def _report(copy: bytes) -> MoveReport:
    items = msgpack.unpackb(copy, max_array_len=len(_TYPES) + 1, max_map_len=0, max_str_len=4 * MAX_TROUBLE, max_bin_len=0)
    if tuple(type(item) for item in items) not in (_TYPES, (*_TYPES, int)):
        raise ValueError("a field of another type")
    return MoveReport(*items)
