"""A shard's folder on disk: one owner at a time, and files that are whole or not there. Knows nothing of what the files mean."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from kvemb.errors import ParameterServerError


class DataDir:
    """The folder of one shard.

    Args:
        root: the cluster's data_dir.
        shard: number.

    Raises:
        ParameterServerError: it cannot be made or written, or another process of this host holds it.
    """

    def __init__(self, root: Path, shard: int) -> None:
        self.path = root / f"shard-{shard}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open(self.path / "lock", "a")  # noqa: SIM115 (held as long as the process lives)
        except OSError as error:
            raise ParameterServerError(f"{self.path}: {error.strerror}; set parameter_servers.data_dir to a writable folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ParameterServerError(f"{self.path}: another process runs shard {shard} from this folder; stop it first") from error

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None when there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file durably: after a crash it is either the old one or the new one, whole.

        Raises:
            OSError: the old file is untouched.
        """
        temporary = self.path / f"{name}.tmp"
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)
        self._sync()

    def rename(self, old: str, new: str) -> None:
        """Rename a file durably, replacing what is there."""
        os.replace(self.path / old, self.path / new)
        self._sync()

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
