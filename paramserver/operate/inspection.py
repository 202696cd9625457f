"""Inspection: reports of one row, and of the shard's process and host. Changes nothing, apart from a small file on the journal's disk."""

import os
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvemb.errors import InvalidInputError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.operate.inspection_messages import (
    EXAMINE,
    SHOW_ROW,
    ExamineReply,
    ShowRowReply,
    ShowRowRequest,
)
from kvemb.process.extras import missing_for_checkpoints
from kvemb.protocol.message_format import installed_version
from kvemb.protocol.messages import Empty
from kvemb.protocol.verb import Handled

from ..capability import Capability
from ..journal.batch_search import trainers_of

_SEARCH_S = 2.0
_TRIES, _TRY_BYTES = 5, 4096
_TRY_NAME = "doctor.tmp"


class Inspection(Capability):
    """The verbs of one shard that only look. Thread-safe."""

    def show_row(self, request: ShowRowRequest, deadline: Deadline) -> ShowRowReply:
        """Return a row's state in index and cache, between two batches; and the trainers whose batch wrote it last, if the journal has
        it.
        """
        if not 0 <= request.id < 1 << 64:
            raise InvalidInputError(f"the id is {request.id}; give it as uint64")
        state, engine = self._parts.tables.state(self._parts.registry.find(request.table)), self._parts.engine
        ids = np.array([request.id], np.uint64)
        with engine.batch_boundary.between(deadline):
            at = int(state.cache.peek(ids)[0])
            record = state.cache.records[at].tobytes() if at >= 0 else b""
            reply = ShowRowReply(int(state.versions(ids)[0]), record, engine.k)
        return replace(reply, trainers=self._trainers_of(reply.version, deadline))

    def _trainers_of(self, version: int, deadline: Deadline) -> list[str]:
        try:
            return trainers_of(self._parts.fenced_log.journal, version, deadline.within(_SEARCH_S)) if version else []
        except ParameterServerError:  # a segment that was just let go
            return []

    def examine(self, request: Empty, deadline: Deadline) -> ExamineReply:
        """Return facts of the process and its disk, for operators."""
        servers, folder = self._parts.config.servers, Path(self._parts.config.servers.data_dir)
        disk = os.statvfs(folder)
        return ExamineReply(
            version=installed_version(),
            now_s=time.time(),
            shards=list(servers.shards),
            nodes=list(self._parts.config.storage.nodes),
            durability=servers.durability,
            sync_s=_sync_s(folder / f"shard-{self._parts.shard}"),
            disk_free=disk.f_bavail * disk.f_frsize,
            disk_bytes=disk.f_blocks * disk.f_frsize,
            open_files=len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
            most_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            journal_max_bytes=servers.journal_max_mb << 20,
            lacks=missing_for_checkpoints(),
        )

    verbs: ClassVar[Handled] = {SHOW_ROW: show_row, EXAMINE: examine}


def _sync_s(folder: Path) -> float:
    """How long a small write takes until it is durable; -1.0 where it cannot be made."""
    path, took_s = folder / _TRY_NAME, []
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(_TRIES):
                started_s = time.perf_counter()
                file.write(bytes(_TRY_BYTES))
                os.fsync(file.fileno())
                took_s.append(time.perf_counter() - started_s)
        path.unlink()
    except OSError:
        return -1.0
    return statistics.median(took_s)
