"""A log of checkpoints in one folder: saved again and again, each one built on an earlier one, for a cluster to go back to any of them.

Checkpoints are numbered from 1. The first one is full. The one that is n behind it is built on the one that is n behind with the lowest
bit of n cleared: 6 on 4, 7 on 6, 8 on the full one. So a load reads at most 1 + log2(n) of them, rows that changed again and again are
written anew in few of them, and those in between may be deleted. When increments have come to the size of the full one, the next one is
full again.

The manifest commits, as of every checkpoint. A number whose save was broken off is taken again by the next one, whoever writes it.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvemb.checkpoint.chain import Checkpoint, open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST
from kvemb.checkpoint.listing import Known, prune
from kvemb.checkpoint.save import SaveProgress, SaveResult
from kvemb.errors import BaseOutdatedError, CheckpointError

_NUMBER = re.compile(r"\d{9}")
log = logging.getLogger("kvemb")


class CheckpointLog:
    """The writer of a log; one at a time, by one thread. Another one may go on with it later."""

    def __init__(self, save: Callable[..., SaveResult], url: str, *, weights_only: bool = False, keep: int | None = None) -> None:
        self._save, self._storage, self._weights_only, self._keep = save, CheckpointStorage(url), weights_only, keep
        self._known: Known = {}

    def save(self, *, extra: Mapping[str, Any] | None = None, progress: SaveProgress | None = None) -> SaveResult:
        """Save the cluster as it is now, as the next one of the log; see `Cluster.save`.

        Raises:
            CheckpointError, InvalidInputError: as `Cluster.save`. The log is as it was, and the next call takes the same number.
        """
        number, base = self._next()
        url = f"{self._storage.url}/{number:09d}"
        try:
            done = self._save(url, base=base, weights_only=self._weights_only, extra=extra, progress=progress)
        except BaseOutdatedError as error:
            log.info("checkpoint %d of the log is full: %s", number, error)
            done = self._save(url, weights_only=self._weights_only, extra=extra, progress=progress)
        if self._keep is not None:
            prune(self._storage.url, keep=self._keep, like=done.manifest, known=self._known)
        return done

    def _next(self) -> tuple[int, str | None]:
        """The number of the next checkpoint, and the URL of its base, if it is no full one."""
        numbers = sorted((int(name) for name in self._storage.folders() if _NUMBER.fullmatch(name)), reverse=True)
        last = next((number for number in numbers if self._storage.size(f"{number:09d}/{MANIFEST}") is not None), 0)
        if not last:
            return 1, None
        try:
            levels = open_chain(f"{self._storage.url}/{last:09d}").levels
        except CheckpointError as error:
            log.warning("nothing is built on checkpoint %d of the log, and the next one is full: %s", last, error)
            return last + 1, None
        return last + 1, _base(levels, last + 1)


def _base(levels: Sequence[Checkpoint], number: int) -> str | None:
    """Return the URL of the one among these, newest first, that checkpoint `number` is built on; None: it is full."""
    *increments, full = levels
    names = [one.storage.url.rpartition("/")[2] for one in levels]
    if sum(one.manifest.size_bytes for one in increments) >= full.manifest.size_bytes or not all(map(_NUMBER.fullmatch, names)):
        return None
    numbers = [int(name) for name in names]
    behind = number - numbers[-1]
    at_most = numbers[-1] + (behind & (behind - 1))
    return next(level.storage.url for level, its in zip(levels, numbers, strict=True) if its <= at_most)
