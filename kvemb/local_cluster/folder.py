"""The folder of a local cluster. A program that is killed leaves it behind; the next one that starts a cluster removes it.

Strategy: the owner, and children that it has forked, hold a lock on a file in it as long as they live. The kernel lets go of it, so no
process id can be mistaken for another's. A folder without that file, or of another user, is never touched. What must not live here: what is
in the folder.
"""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

_PREFIX, _LOCK = "kvemb-", "owner.lock"
log = logging.getLogger("kvemb")


class LocalFolder:
    """A new folder, after those were removed whose owners are dead."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # memcached gives up root for nobody, and must still be able to reach its folder.
        self.path.chmod(0o755)
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Delete it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _locked(folder: Path) -> IO[bytes]:
    """Make the lock file; it gets its name when it is locked, so that nobody finds it without its owner."""
    new = folder / f"{_LOCK}.new"
    file = new.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _LOCK)
    except OSError as error:  # a file system without locks
        log.info("%s cannot be locked (%s): if this program is killed, the folder stays", folder, error.strerror)
    return file


def _remove_if_left(lock: Path) -> None:
    """Remove a folder of this user's that nobody owns any more; of several who try at once one does."""
    try:
        folder = lock.parent.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid():
            return
        with os.fdopen(os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), lock.lstat()):
                shutil.rmtree(lock.parent, ignore_errors=True)
                log.info("removed %s, which a program that was killed had left behind", lock.parent)
    except OSError:  # owned, or gone meanwhile
        return
