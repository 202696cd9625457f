"""Writing one run to its file. Nothing of it counts before `run_set` names it in a manifest."""

import os
from contextlib import suppress
from pathlib import Path

from kvemb.errors import JournalFullError
from kvemb.schema.table_def import TableDef

from ..journal import segment_files
from ..shard_process.data_dir import mend
from .run_manifest import RunEntry
from .sorted_run import Bytes, Ids, SortedRunEncoder


class RunWriter:
    """Writes one sorted run, rows in ascending order of ids; made by `Runs.begin`.

    Args:
        path: of the file, which is not there yet.
        number: of the run.
        definition: the table.
    """

    def __init__(self, path: Path, number: int, definition: TableDef) -> None:
        self.definition = definition
        self._path, self._number = path, number
        self._encoder = SortedRunEncoder(definition.record.size_bytes)
        self._descriptor: int | None = None
        self._finished: RunEntry | None = None
        self.size_bytes = 0

    def add(self, kind: int, ids: Ids, rest: Bytes) -> None:
        """Add rows or erased ids; see `SortedRunEncoder.add`.

        Raises:
            JournalFullError: they cannot be written; drop the run.
        """
        if len(ids):
            self._write(list(self._encoder.add(kind, ids, rest)))

    def finish(self) -> RunEntry | None:
        """Make the file durable; None when nothing was added. Called again it does nothing.

        Raises:
            JournalFullError: drop the run.
        """
        if self._finished is not None or not any(self._encoder.n_rows):
            return self._finished
        self._write([self._encoder.footer()])
        self.sync()
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor, self._finished = None, RunEntry(self._number, self.size_bytes)
        return self._finished

    def sync(self) -> None:
        """Make the rows added so far durable: with a call now and then, `finish` takes less time.

        Raises:
            JournalFullError: drop the run.
        """
        try:
            if self._descriptor is not None:
                segment_files.sync(self._descriptor)
        except OSError as error:
            raise full(self._path, error) from error

    def drop(self) -> None:
        """Give the run up. A finished one stays: a manifest may name it, and if none does, `Runs` deletes it later."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            with suppress(OSError):
                self._path.unlink()

    def _write(self, pieces: list[bytes | memoryview]) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = segment_files.create(self._path)
                pieces = [self._encoder.header(), *pieces]
            segment_files.write_all(self._descriptor, pieces, self.size_bytes)
        except OSError as error:
            raise full(self._path, error) from error
        self.size_bytes += sum(len(piece) for piece in pieces)


def full(path: Path, error: OSError) -> JournalFullError:
    """Return the error for a file of the snapshot that could not be written."""
    return JournalFullError(f"{path}: {error.strerror}; the local snapshot is the old one: {mend(error)}.")
