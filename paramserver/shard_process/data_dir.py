"""A shard's folder on disk: one owner at a time, and files that are whole or not there. The files' meaning is not known here.

Only the shard's own user may read them, with any umask: they hold the rows and gradients of users. A process that was shut out
may still be writing. So every new file has a name of its own, which no other process opens; and a process that has made itself the owner
sweeps those names: an older one that was asked "still ours?" before that finds nothing to rename any more.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvemb.errors import FolderUnavailableError, KvembError, ParameterServerError
from kvemb.process import replace_atomically, sync_folder

_MENDS = {
    errno.ENOENT: "put the folder, or its volume's mount, back as it was (docs/operations.md, \"A shard's volume\", says what else helps)",
    errno.ENOSPC: "free some space on that disk, or some files where df -i says that it has no inodes left",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EROFS: "mount that disk writable, or set parameter_servers.data_dir to a folder that is",
    errno.EACCES: "let this user read and write there, or set parameter_servers.data_dir to a folder where it may",
    errno.EPERM: "let this user read and write there, or set parameter_servers.data_dir to a folder where it may",
    errno.ENOTDIR: "a file stands where a folder should: set parameter_servers.data_dir to another place, or move the file away",
    errno.EEXIST: "a file stands where a folder should: set parameter_servers.data_dir to another place, or move the file away",
    errno.EISDIR: "a folder stands where a file should: move it away",
    errno.EMFILE: "raise the number of files that a process may have open (ulimit -n)",
    errno.ENFILE: "raise the number of files that this host may have open (fs.file-max)",
    errno.EIO: "look after the disk: the system's log says more",
}


def mend(error: OSError) -> str:
    """Return the advice for an error of the file system."""
    return _MENDS.get(error.errno or 0, "see whether that disk and folder can be read and written")


@contextmanager
def named(what: str, folder: Path) -> Iterator[None]:
    """Translate errors of the file system while a shard's folder is used."""
    try:
        yield
    except OSError as error:
        if isinstance(error, KvembError):  # of a node or a shard, and translated already
            raise
        at = folder if error.filename is None else error.filename
        raise ParameterServerError(
            f"{what}: {at}: {error.strerror or error}; {mend(error)}. Pushes acknowledged before are as safe as they were."
        ) from error


def for_writes(still_ours: Callable[[], None]) -> Callable[[], None]:
    """Return a check of a shard's owner for what writes rows: while the folder cannot be read, that waits, as for a node that is away."""

    def require() -> None:
        try:
            still_ours()
        except OSError as error:
            raise FolderUnavailableError(
                f"the shard's own folder: {error.filename}: {error.strerror}. No row is written before it is back: {mend(error)}."
            ) from error

    return require


_SUFFIX = ".tmp"
FILE_MODE, _FOLDER_MODE = 0o600, 0o700


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there; one that an earlier release made is closed to others, too."""
    if not path.parent.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(_FOLDER_MODE, exist_ok=True)
    path.mkdir(_FOLDER_MODE, exist_ok=True)
    with suppress(PermissionError):  # another user owns it, and lets us write there
        path.chmod(_FOLDER_MODE)


def opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`; one that is made is private."""
    return os.open(path, flags, FILE_MODE)


def replace_privately(path: Path, chunks: Iterable[bytes | memoryview], check: Callable[[], None] = lambda: None) -> None:
    """Put a new private file in the place of an old one; see `replace_atomically`."""
    replace_atomically(path, chunks, temporary=f"{path.name}.{secrets.token_hex(8)}{_SUFFIX}", check=check, opener=opener)


def sweep(folder: Path) -> None:
    """Delete files that other processes have begun to write in a folder; the next call tries again what cannot be deleted."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            path.unlink()


def folder_of(root: Path, shard: int) -> Path:
    """Return where a shard's folder is in the cluster's data_dir."""
    return root / f"shard-{shard}"


class DataDir:
    """The folder of one shard, locked as long as this process owns it."""

    def __init__(self, root: Path, shard: int, *, take_over: bool = False) -> None:
        self.path = folder_of(root, shard)
        lock = self.path / "lock"
        self._signed, self.signed_by = False, ""
        try:
            make_folder(self.path)
            self.signed_by = _signature(lock)
            if take_over:
                lock.unlink(missing_ok=True)
            self._lock: IO[str] = open(lock, "a", opener=opener)  # noqa: SIM115 (held as long as the process lives)
        except OSError as error:
            raise ParameterServerError(f"shard {shard}: its data folder {self.path}: {error.strerror}; {mend(error)}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock.fileno()).st_ino != os.stat(lock).st_ino:
                raise BlockingIOError("the lock file was replaced")
        except BlockingIOError as error:
            self._lock.close()
            by = f" ({self.signed_by})" if self.signed_by else ""
            raise ParameterServerError(
                f"{self.path}: another process runs shard {shard} from this folder{by}. If it is another cluster's, correct "
                "parameter_servers.data_dir; else stop that process first (kill -9 ends one that hangs)"
            ) from error
        except OSError as error:  # a network's file system without locks
            self._lock.close()
            raise ParameterServerError(
                f"{lock}: cannot be locked: {error.strerror}; keep the shard's folder on a disk of its own"
            ) from error
        if take_over and self.signed_by:  # that one has the port still
            self._write_signature(f"{self.signed_by}\n")

    def sign(self) -> None:
        """Say in the folder which process has the shard's port: a person may have to end one that hangs."""
        self._signed = True
        self._write_signature(f"process {os.getpid()} on {os.uname().nodename}\n")

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None when there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, chunks: Iterable[bytes | memoryview], check: Callable[[], None] = lambda: None) -> None:
        """Write a file durably: after a crash it is either the old one or the new one, whole."""
        replace_privately(self.path / name, chunks, check)
        sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Remove a file durably; fine when there is none."""
        (self.path / name).unlink(missing_ok=True)
        sync_folder(self.path)

    def leave_words(self, words: str) -> None:
        """Leave last words beside the folder for trainers of this machine, which get no answer any more; none while the shard runs."""
        path = self.path.with_name(f"{self.path.name}.last-words")
        with suppress(OSError):  # the same is on standard error
            path.unlink(missing_ok=True)
            if words:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                    file.write("; ".join(line.strip() for line in words.splitlines() if line.strip()))

    def close(self) -> None:
        """Let another process have the folder."""
        if self._signed and not self._lock.closed:
            self._write_signature("")
        self._lock.close()

    def _write_signature(self, text: str) -> None:
        with suppress(OSError):  # it only spares a person a search
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), text.encode())


def _signature(lock: Path) -> str:
    with suppress(OSError):
        return lock.read_text(encoding="utf-8", errors="replace").strip()
    return ""
