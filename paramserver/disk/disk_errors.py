"""What the system has against a file of the shard's, in the words of whoever is to mend it. No I/O here."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvemb.errors import KvembError, ParameterServerError

_MENDS = {
    errno.ENOSPC: "free some space on that disk",
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
    """Return what to do about an error of the file system.

    Example:
        >>> mend(OSError(errno.ENOSPC, "No space left on device"))
        'free some space on that disk'
    """
    return _MENDS.get(error.errno or 0, "see whether that disk and folder can be read and written")


@contextmanager
def named(what: str, folder: Path) -> Iterator[None]:
    """Translate what the file system says while a shard's folder is used.

    Args:
        what: is being done, for the message.
        folder: of the shard.

    Raises:
        ParameterServerError: a file or the folder cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, KvembError):  # of a node or a shard, and translated already
            raise
        at = folder if error.filename is None else error.filename
        raise ParameterServerError(
            f"{what}: {at}: {error.strerror or error}; {mend(error)}. Pushes acknowledged before are as safe as they were."
        ) from error
