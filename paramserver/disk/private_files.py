"""Files and folders that only the shard's own user may read, whatever the umask: they hold the rows and gradients of whoever trains."""

import os
from contextlib import suppress
from pathlib import Path

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
