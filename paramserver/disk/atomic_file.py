"""Files that are whole or not there: written beside their place, made durable, then renamed. Knows nothing of what they hold.

A process that was shut out may still be writing. So every new file has a name of its own, which no other process opens; and a process
that has made itself the owner sweeps those names: an older one that was asked "still ours?" before that finds nothing to rename any more.
"""

import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from .private_files import opener

_SUFFIX = ".tmp"


def replace_atomically(path: Path, chunks: Iterable[bytes | memoryview], check: Callable[[], None] = lambda: None) -> None:
    """Put a new file in the place of an old one, if there is one. The folder is still to be synced.

    Args:
        path: of the file.
        chunks: its bytes.
        check: called right before the new file takes the old one's place; may raise.

    Raises:
        OSError: the old file is untouched.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> replace_atomically(folder / "epoch", [b"1", b"2"])
        >>> [(path.name, path.read_bytes()) for path in folder.iterdir()]
        [('epoch', b'12')]
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    try:
        with open(temporary, "xb", opener=opener) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def sweep(folder: Path) -> None:
    """Delete what other processes have begun to write in a folder; what cannot be deleted is left for the next time.

    Args:
        folder: this process owns it, and writes nothing in it at this moment.
    """
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            path.unlink()
