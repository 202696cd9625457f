"""The shell around files of other programs: a path, or any fsspec URL, read range by range. Knows nothing of their content.

Foreign exceptions become ForeignRowsError here. Credentials come from where a file system's library takes them, as for checkpoints, and are
cut out of URLs in messages. A file of this machine needs no library. Not thread-safe; not to be carried over a fork.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import absolute_url, shown
from kvemb.errors import CheckpointError, ConfigError, ForeignRowsError
from kvemb.process.extras import require_extra


class ForeignFile:
    """An open file; close it."""

    def __init__(self, url: str) -> None:
        url = foreign_url(url)
        self.where = shown(url)
        with translated(self.where):
            self._file = _open_local(url) if is_local(url) else _open_remote(url)
            self.size_bytes = int(self._file.seek(0, os.SEEK_END))

    def read(self, start: int, n_bytes: int) -> NDArray[np.uint8]:
        """Return bytes as uint8 [n_bytes], a new array."""
        if start + n_bytes > self.size_bytes:
            raise ForeignRowsError(f"{self.where}: ends at byte {self.size_bytes}, expected {start + n_bytes} at least: it is cut off")
        data = np.empty(n_bytes, np.uint8)
        at = 0
        with translated(self.where):
            self._file.seek(start)
            while at < n_bytes:
                n = self._file.readinto(data[at:].data)
                if not n:
                    raise ForeignRowsError(f"{self.where}: ended at byte {start + at} while it was read, expected {self.size_bytes}")
                at += n
        return data

    @property
    def stream(self) -> Any:
        """The file object, for a library that reads it by itself, under `translated`."""
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "ForeignFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def foreign_url(url: str) -> str:
    """Return the absolute path, or the URL, that a path or URL means."""
    try:
        return absolute_url(url)
    except CheckpointError as error:
        raise ForeignRowsError(str(error)) from None


def is_local(url: str) -> bool:
    """Whether a URL is a path of this machine."""
    return "://" not in url


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn what a file system's library, or the reader of a format, raises into ForeignRowsError that names the file."""
    try:
        yield
    except (ForeignRowsError, ConfigError):
        raise
    except ImportError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # a file system's library may raise any
        raise ForeignRowsError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error


def _open_remote(url: str) -> Any:
    fsspec = require_extra("fsspec")
    try:
        return fsspec.open(url, "rb").open()
    except FileNotFoundError:
        raise
    except Exception:  # perhaps of credentials that were read when a file was opened before: see kvemb.checkpoint.checkpoint_storage
        require_extra("fsspec.core").url_to_fs(url)[0].clear_instance_cache()
        return fsspec.open(url, "rb").open()


def _open_local(path: str) -> Any:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for without end
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ForeignRowsError(f"{path}: is no regular file")
    return open(descriptor, "rb", buffering=0)
