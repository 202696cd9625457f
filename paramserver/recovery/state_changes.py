"""Notes beside the saved state: rows that came to a shard's index, or went, otherwise than by batches since its state was saved.

Slots that change their shard change many rows at once while trainers wait. A note holds only the rows that move; an image would hold all
others, too. A note is a state itself, as of a later position in the journal: with the rows that came, and the slots whose rows are gone.
Batches in between are in the journal, and in storage: a start brings the saved state to the note's position by the journal alone.

Each note is named after the checksum at the end of the file that it follows, and holds that checksum. So after a new whole state is saved
no older note follows it, even if a crash leaves some. docs/adr/0084 says how much notes save.
"""

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.row_index import RowIndex
from kvemb.errors import JournalDamagedError, ParameterServerError
from kvemb.schema.record import split_version
from kvemb.schema.slots import from_runs, runs_of

from ..journal import BatchEntry, Journal, Position, decode_entry
from ..journal.entry import Find
from ..model.batch import ERASE
from ..shard_process.data_dir import DataDir
from .state_file import ShardState, TableImage, decode_state

PREFIX = "state-after-"
_CHECKSUM = struct.Struct("<Q")
MOST = 16
"""Notes that may follow each other; then it is time for an image."""


def slots_gone(slots: NDArray[np.bool_]) -> bytes:
    """Return `ShardState.gone` for these slots: bool [16384]."""
    return runs_of(slots.astype(np.uint16))


def changes(data: DataDir, state: str) -> list[str]:
    """Return the names of the notes that follow a saved state, the oldest first.

    Args:
        data: the shard's folder.
        state: name of the state's file.
    """
    names: list[str] = []
    while (data.path / (name := name_behind(checksum_of(data, names[-1] if names else state)))).exists():
        names.append(name)
    return names


def name_behind(checksum: int) -> str:
    """Return the name of the note that follows a file of this checksum."""
    return f"{PREFIX}{checksum:016x}"


def checksum_of(data: DataDir, name: str) -> int:
    """Return the checksum at the end of a file."""
    with (data.path / name).open("rb") as file:
        file.seek(-_CHECKSUM.size, os.SEEK_END)
        return int(_CHECKSUM.unpack(file.read())[0])


def clear_changes(data: DataDir) -> None:
    """Remove all notes; one that cannot be removed follows no file any more."""
    for path in _notes(data):
        with suppress(OSError):
            path.unlink()


def with_changes(data: DataDir, state: ShardState, name: str, journal: Journal, find: Find) -> ShardState:
    """Return the state as of the last note that follows it, under the state's epoch; the state itself where there is none.

    Args:
        data: the shard's folder.
        state: as saved, in our epoch.
        name: of its file.
        journal: open.
        find: the registry's look-up.

    Raises:
        ParameterServerError: a note is damaged, or one is missing before it.
        JournalDamagedError: the journal does not reach from the state to the last note.
    """
    names = changes(data, name)
    _require_all(data, state, names)
    if not names:
        return state
    assert state.journal is not None
    indexes, at, k, last = {one.definition.key: _index(one) for one in state.tables}, Position(*state.journal), state.k, state
    for one in names:
        last = _read(data, one)
        assert last.journal is not None
        end = Position(*last.journal)
        k = _forward(indexes, journal, (at, end), k, find)
        if k != last.k:
            raise JournalDamagedError(
                f"{data.path / one}: slots came or went after batch {last.k}, the journal has batch {k} there: entries are missing. Put "
                "the data folder of the shard's last owner back."
            )
        _change(indexes, last)
        at = end
    tables = [TableImage(one.definition, one.step, *indexes[one.definition.key].arrays()) for one in last.tables]
    return replace(last, tables=tuple(tables), epoch=state.epoch, gone=b"")


def _forward(indexes: dict[str, RowIndex], journal: Journal, between: tuple[Position, Position], k: int, find: Find) -> int:
    """Bring the index forward by batches that storage already has; return the last one's number."""
    start, end = between
    for after, payload in journal.read(start) if start < end else ():
        if after > end:
            break
        entry = decode_entry(payload, find)
        if not isinstance(entry, BatchEntry) or (number := split_version(entry.version)[1]) <= k:
            continue
        if number != k + 1:
            raise JournalDamagedError(f"the journal goes from batch {k} to batch {number}: entries between them are missing")
        k = number
        for rows in entry.batch.tables:
            index = indexes.setdefault(rows.definition.key, RowIndex())
            if entry.batch.kind == ERASE:
                index.erase(rows.ids)
            else:
                index.put(rows.ids, np.full(len(rows.ids), entry.version, np.uint64))
    return k


def _change(indexes: dict[str, RowIndex], change: ShardState) -> None:
    gone = from_runs(change.gone, 2) == 1 if change.gone else None
    for one in change.tables:
        index = indexes.setdefault(one.definition.key, RowIndex())
        if gone is not None:
            ids, _ = index.arrays()
            index.erase(ids[gone[one.definition.placement.slots(ids)]])
        index.put(one.ids, one.versions)


def _index(image: TableImage) -> RowIndex:
    index = RowIndex()
    index.put(image.ids, image.versions)
    return index


def _require_all(data: DataDir, state: ShardState, names: Sequence[str]) -> None:
    """A note that follows nothing is of before the state was saved; a later one shows that a file before it is missing."""
    for path in _notes(data):
        if path.name not in names and _read(data, path.name).k > state.k:
            raise ParameterServerError(
                f"{path}: the file that this one follows is missing, or another one: the shard cannot tell which rows are its own. Put the "
                "data folder of the shard's last owner back, whole."
            )


def _read(data: DataDir, name: str) -> ShardState:
    raw = data.read(name)
    assert raw is not None
    return decode_state(raw, str(data.path / name))


def _notes(data: DataDir) -> list[Path]:
    return [path for path in data.path.glob(f"{PREFIX}*") if not path.suffix]
