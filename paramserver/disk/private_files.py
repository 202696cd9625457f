"""Files and folders that only the shard's own user may read, whatever the umask: they hold the rows and gradients of whoever trains.

A process that was shut out may still be writing. So every new file has a name of its own, which no other process opens; and a process
that has made itself the owner sweeps those names: an older one that was asked "still ours?" before that finds nothing to rename any more.
"""

import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kvemb.atomic_file import replace_atomically

_SUFFIX = ".tmp"
FILE_MODE, _FOLDER_MODE = 0o600, 0o700


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there; one that an earlier release made is closed to others, too.

    Args:
        path: of the folder. Its parent is made like it, where it is not there; those above as the umask says.
    """
    if not path.parent.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(_FOLDER_MODE, exist_ok=True)
    path.mkdir(_FOLDER_MODE, exist_ok=True)
    with suppress(PermissionError):  # it is somebody else's, who lets us write there
        path.chmod(_FOLDER_MODE)


def opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`; one that is made is private."""
    return os.open(path, flags, FILE_MODE)


def replace_privately(path: Path, chunks: Iterable[bytes | memoryview], check: Callable[[], None] = lambda: None) -> None:
    """Put a new private file in the place of an old one; see `replace_atomically`."""
    replace_atomically(path, chunks, temporary=f"{path.name}.{secrets.token_hex(8)}{_SUFFIX}", check=check, opener=opener)


def sweep(folder: Path) -> None:
    """Delete what other processes have begun to write in a folder; what cannot be deleted is left for the next time.

    Args:
        folder: this process owns it, and writes nothing in it at this moment.
    """
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            path.unlink()
