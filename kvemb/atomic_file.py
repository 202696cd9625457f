"""Files that are whole or not there: written beside their place, made durable, then renamed. Knows nothing of what they hold."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def replace_atomically(
    path: Path,
    chunks: Iterable[bytes | memoryview],
    *,
    temporary: str,
    check: Callable[[], None] = lambda: None,
    opener: Callable[[str, int], int] | None = None,
) -> None:
    """Put a new file in the place of an old one, if there is one. The folder is still to be synced.

    Args:
        path: of the file.
        chunks: its bytes.
        temporary: the file's name, in the same folder, until it is whole. What has it is deleted: one process at a time.
        check: called right before the new file takes the old one's place; may raise.
        opener: of the new file; see `open`.

    Raises:
        OSError: the old file is untouched.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> replace_atomically(folder / "epoch", [b"1", b"2"], temporary="epoch.tmp")
        >>> [(path.name, path.read_bytes()) for path in folder.iterdir()]
        [('epoch', b'12')]
    """
    beside = path.with_name(temporary)
    try:
        beside.unlink(missing_ok=True)  # and never opened: it may be a link that somebody has put there, to a file of ours
        with open(beside, "xb", opener=opener) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Return when the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
