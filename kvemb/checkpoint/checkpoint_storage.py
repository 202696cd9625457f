"""The shell around fsspec: whole objects in and out of one folder of any file system, with retries. Nothing here knows their content.

Object stores put an object whole or not at all. Everywhere else an object is written under a temporary name, synced where that is possible
(local files) and renamed. Foreign exceptions become CheckpointError here. Credentials come from where the file system's own library takes
them (environment, its config files), never from this project's files. They are cut out of URLs in messages. A library reads them once, and
fsspec keeps what it made: so each try after a failed one begins with a new file system, which finds those that were replaced meanwhile.

A file system's library may hang, and most of them take no deadline. So each call runs on a thread of its own, which is abandoned when it
does not come back in time. A call without an answer is reported every half minute.

Thread-safe as far as the fsspec file system is; not to be carried over a fork.
"""

import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from kvemb.errors import CheckpointError, ConfigError
from kvemb.net.deadline import pauses
from kvemb.process import replace_atomically, sync_folder
from kvemb.process.extras import require_extra

_PUTS_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "cos", "memory", "r2"}
_PAUSES_S = tuple(islice(pauses(0.2, 1.6), 4))
_GIVE_UP_S, _SAY_EVERY_S = 300.0, 30.0
# A retry cannot help with these.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError, ImportError, TypeError)
_CREDENTIALS = (
    ". That is also what a store answers to credentials that have expired or were replaced. They were read again just now, from where the "
    "store's library looks (for S3 ~/.aws/credentials, a role's service); variables of the environment are those of this process's start."
)
T = TypeVar("T")
log = logging.getLogger("kvemb")


class CheckpointStorage:
    """One folder: everything is named by a path below it."""

    def __init__(
        self,
        url: str,
        pause: Callable[[float], None] = time.sleep,
        *,
        give_up_s: float = _GIVE_UP_S,
        say_every_s: float = _SAY_EVERY_S,
    ) -> None:
        self.url = absolute_url(url)
        self._pause, self._give_up_s, self._say_every_s = pause, give_up_s, say_every_s
        if "://" in self.url and "?" in self.url:
            raise CheckpointError(f"{shown(self.url)}: a query string ('?') is no part of a folder's name. Give the URL without it")
        try:
            self._open()
        except ImportError as error:
            raise ConfigError(f"{shown(self.url)}: {error}") from error
        except ConfigError:
            raise
        except Exception as error:
            raise CheckpointError(f"{shown(self.url)}: no usable URL: {error}") from error
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._is_local = "file" in protocols
        self._puts_whole = bool(_PUTS_WHOLE & set(protocols))

    def _open(self) -> None:
        if "://" in self.url:
            self._fs, self._root = require_extra("fsspec.core").url_to_fs(self.url)
        else:  # nothing of a path is read as a URL
            self._fs, self._root = require_extra("fsspec").filesystem("file"), self.url

    def __repr__(self) -> str:
        return shown(self.url)  # messages name it so

    def where(self, path: str) -> str:
        """Return an object's URL, for messages."""
        return f"{shown(self.url)}/{path}"

    def read(self, path: str, max_bytes: int) -> bytes:
        """Return an object's bytes."""
        size_bytes = self.size(path)
        if size_bytes is None:
            raise CheckpointError(f"{self.where(path)}: not there")
        if size_bytes > max_bytes:
            raise CheckpointError(f"{self.where(path)}: {size_bytes} bytes, expected at most {max_bytes}")
        data: bytes = self._try("read", path, lambda: self._read(self._full(path), size_bytes, max_bytes))
        if len(data) > max_bytes:
            raise CheckpointError(f"{self.where(path)}: grew while it was read, expected at most {max_bytes} bytes")
        return data

    def size(self, path: str) -> int | None:
        """Return an object's size in bytes, or None when it does not exist."""

        def ask() -> int | None:
            self._fs.invalidate_cache()
            try:
                if self._is_local:
                    return _file_size(self._full(path), os.stat(self._full(path)))
                return int(self._fs.size(self._full(path)))
            except FileNotFoundError:
                return None

        return self._try("look at", path, ask)

    def write(self, path: str, *pieces: bytes | memoryview) -> None:
        """Write an object of these bytes, replacing an old one: afterwards it is whole and, on local disks, durable."""
        self._try("write", path, lambda: self._write(self._full(path), pieces))

    def names(self, folder: str = "") -> list[str]:
        """Return the paths of all objects below a folder, sorted; none when there is no such folder."""

        def ask() -> list[str]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._full(folder) if folder else self._root)
            except FileNotFoundError:
                return []
            prefix = len(self._root.rstrip("/")) + 1
            return sorted(name[prefix:] for name in found)

        return self._try("list", folder, ask)

    def exists(self, path: str) -> bool:
        """Whether there is an object or a folder of this path."""

        def ask() -> bool:
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._full(path)))

        return self._try("look at", path, ask)

    def folders(self) -> list[str]:
        """Return the names of the folders right below, sorted; none when there is no such folder."""

        def ask() -> list[str]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            return sorted(item["name"].rstrip("/").rpartition("/")[2] for item in found if item["type"] == "directory")

        return self._try("list", "", ask)

    def delete(self, path: str) -> None:
        """Delete an object; it may be gone already."""

        def remove() -> None:
            try:
                self._fs.rm_file(self._full(path))
            except FileNotFoundError:
                return

        self._try("delete", path, remove)

    def delete_empty_folders(self) -> None:
        """Remove empty folders, this one included, where the file system has folders."""
        if self._puts_whole:
            return

        def remove() -> None:
            for folder, _, _ in sorted(self._fs.walk(self._root), key=lambda item: -len(item[0])):
                with suppress(Exception):  # not empty, or the kind of file system that keeps none: they do no harm
                    self._fs.rmdir(folder)
                    if self._fs.isdir(folder):  # WebHDFS: fsspec's rmdir does nothing
                        self._fs.rm(folder)

        self._try("clear", "", remove)

    def _read(self, full: str, size_bytes: int, max_bytes: int) -> bytes:
        if self._is_local:
            return _read_local(full, max_bytes + 1)
        data: bytes = self._fs.cat_file(full)
        if len(data) != size_bytes:  # WebHDFS: fsspec takes a data node's error for the file
            raise OSError(f"{len(data)} bytes came, expected {size_bytes}")
        return data

    def _write(self, full: str, pieces: Sequence[bytes | memoryview]) -> None:
        if self._is_local:
            _write_local(Path(full), pieces)
            return
        whole = b"".join(pieces)
        if self._puts_whole:
            self._fs.pipe_file(full, whole)
            return
        folder, _, name = full.rpartition("/")
        temporary = f"{folder}/_tmp.{name}"
        self._fs.makedirs(folder, exist_ok=True)
        self._fs.pipe_file(temporary, whole)
        if self._fs.exists(full):  # HDFS does not rename over a file
            self._fs.rm_file(full)
        self._fs.mv(temporary, full)
        if not self._fs.exists(full):  # WebHDFS: a rename that is refused is answered by `false`, which fsspec does not look at
            raise OSError(f"{temporary} was not renamed")

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _try(self, what: str, path: str, call: Callable[[], T]) -> T:
        until, renewed = time.monotonic() + self._give_up_s, False
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._in_time(what, path, call, until)
            except Exception as error:  # a file system's library may raise any
                if isinstance(error, CheckpointError):
                    raise
                refused = not self._is_local and isinstance(error, PermissionError)
                final = isinstance(error, _FINAL) and not (refused and not renewed)
                if pause_s is None or final or time.monotonic() > until:
                    why = f"{type(error).__name__}: {error}{'' if self._is_local or not _of_credentials(error) else _CREDENTIALS}"
                    raise CheckpointError(f"{self.where(path)}: cannot {what} it: {why}") from error
            renewed = self._renew()
            self._pause(pause_s)
        raise AssertionError("unreachable")

    def _renew(self) -> bool:
        """Make the file system anew, with the credentials that there are now; a local one has none."""
        if not self._is_local:
            with suppress(Exception):  # the next try says what is wrong
                type(self._fs).clear_instance_cache()
                self._open()
        return True

    def _in_time(self, what: str, path: str, call: Callable[[], T], until: float) -> T:
        """Make a call on a thread that is not waited for after `until`; return or raise its result."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="kvemb-checkpoint-storage", daemon=True).start()
        begun = time.monotonic()
        while (left_s := until - time.monotonic()) > 0:
            if wait([outcome], timeout=min(left_s, self._say_every_s)).done:
                return outcome.result()
            waited_s = time.monotonic() - begun
            if left_s <= self._say_every_s:
                break
            log.warning(
                "%s: cannot %s it yet: no answer for %.0f s; given up after %.0f s", self.where(path), what, waited_s, self._give_up_s
            )
        raise CheckpointError(
            f"{self.where(path)}: cannot {what} it: no answer in {self._give_up_s:.0f} s. Is its server reachable from this machine, "
            "or its mount alive?"
        )


def absolute_url(url: str) -> str:
    """Return a URL that means the same in every process: a path, or a file:// URL, becomes an absolute path."""
    url = os.fspath(url)
    if not isinstance(url, str) or not url:
        raise CheckpointError(f"URL is {url!r}: give a path or a URL such as s3://bucket/run/step-1000")
    scheme, found, rest = url.partition("://")
    if not found:
        return str(Path(url).absolute())
    if scheme == "file":
        host, _, path = rest.partition("/")
        if not rest or host not in ("", "localhost"):
            raise CheckpointError(f"{url}: a file:// URL names a file of this machine, from its root on: file:///data/step-1000")
        return str(Path("/" + unquote(path)).absolute())
    if "::" in url:  # fsspec would take what stands before it, and leave out the rest
        raise CheckpointError(f"{shown(url)}: '::' chains file systems in fsspec, and no part of a name. Give the URL of one file system")
    return f"{scheme}://{rest.rstrip('/') or '/'}"


def _of_credentials(error: Exception) -> bool:
    """Whether a store may have refused the caller; to a HEAD request S3 says no more than "Bad Request" or "Forbidden"."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, PermissionError) or re.search(r"(?i)bad request|forbidden|denied|token|credential|unauthori", text) is not None


def shown(url: str) -> str:
    """Return a URL without its credentials."""
    return re.sub(r"(?<=://)[^/@]+@", "***@", re.sub(r"(?<=\?).+", "***", url) if "://" in url else url)


def _file_size(path: str, found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: is no regular file ({stat.filemode(found.st_mode)}); a checkpoint holds files only. Remove it.")
    return found.st_size


def _read_local(path: str, n_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a file that has become a pipe meanwhile is opened, and refused below
    with open(descriptor, "rb") as file:
        _file_size(path, os.fstat(descriptor))
        return file.read(n_bytes)


def _write_local(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, pieces, temporary=f"_tmp.{path.name}")
    sync_folder(path.parent)
