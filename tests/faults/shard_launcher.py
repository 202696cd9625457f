"""A shard that kills itself (SIGKILL) at a chosen point of its work: `python shard_launcher.py FOLDER --config … --shard …`.

The point is chosen while it runs, by a file of its name in FOLDER, which is taken away before the end, so that the next process lives.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.writer import ShardWriter
from kvemb.net.link import Link
from kvemb.schema.table_def import TableDef
from paramserver.__main__ import main
from paramserver.checkpoint.loader import Loader
from paramserver.checkpoint.save_job import SaveJob
from paramserver.checkpoint.saver import Saver
from paramserver.checkpoint.unconditional_writer import Portion, UnconditionalWriter
from paramserver.engine.piece_writer import PieceWriter
from paramserver.ingest.sync_steps import SyncSteps
from paramserver.journal import segment_files
from paramserver.journal.write_ahead_log import FencedLog
from paramserver.lifecycle import shard as shard_module
from paramserver.row_log import Runs
from paramserver.row_log.run_writer import RunWriter
from paramserver.row_log.sorted_run import ERASED, ROWS
from paramserver.row_log.state_file import SavedState
from paramserver.scaling import move_phases
from paramserver.scaling.handover_work import HandoverWork
from paramserver.scaling.move_carrier import MoveCarrier
from paramserver.scaling.slot_giver import SlotGiver
from paramserver.scaling.slot_taker import SlotTaker

POINTS = (
    "before fetch",
    "after optimize",
    "in the middle of a write",
    "after a write",
    "in the middle of a journal entry",
    "before a commit",
    "after a commit",
)
SAVE_POINTS = (
    "before the cut of a save",
    "after reading rows of a save",
    "before writing a file of a save",
    "before the end of a save",
    "after the end of a save",
)
LOAD_POINTS = (
    "before writing rows of a load to disk",
    "before a load notes what is gone",
    "before the switch of a load",
    "in the middle of the switch of a load",
    "after the switch of a load",
    "before writing rows of a load to storage",
    "before the erases of a load",
)
FLUSH_POINTS = ("in a flush", "before a flush counts", "after a flush counts")
MERGE_POINTS = ("in a merge", "before a merge counts", "before what was merged is deleted")
HANDOVER_POINTS = (
    "before slots are taken over",
    "after slots are taken over",
    "before slots are dropped",
    "after slots are dropped",
    "before a phase is kept",
    "before a phase is on the nodes",
    "after steps are held",
    "before all come to one step",
    "before the last step is told",
    "before a flip",
)
_folder = Path(sys.argv[1]) if __name__ == "__main__" else Path()


def _told(point: str, shard: str) -> bool:
    """Whether this is where to end; only once."""
    try:
        (_folder / f"{point} {shard}").unlink()
    except FileNotFoundError:
        return False
    return True


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _patch(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def install(shard: str) -> None:
    """Put the ends in."""

    def before(point: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if _told(point, shard):
                    _die()
                return original(*args, **kwargs)

            return call

        return wrap

    def after(point: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if _told(point, shard):
                    _die()
                return result

            return call

        return wrap

    def half_entry(original: Callable[..., None]) -> Callable[..., None]:
        def write_all(descriptor: int, pieces: Sequence[Any], offset: int) -> None:
            if len(pieces) > 1 and _told("in the middle of a journal entry", shard):
                data = b"".join(bytes(piece) for piece in pieces)
                original(descriptor, [data[: len(data) // 2]], offset)
                _die()
            original(descriptor, pieces, offset)

        return write_all

    def half_write(original: Callable[..., int]) -> Callable[..., int]:
        def send(self: Link, data: memoryview) -> int:
            # Requests of thousands of bytes are rows on their way into storage; reads of so few rows are smaller.
            if len(data) > 4000 and _told("in the middle of a write", shard):
                original(self, data[: len(data) // 2])
                _die()
            return original(self, data)

        return send

    merging = [False]  # whether the call under way is a step of a merge

    def in_merge(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def merge(*args: Any) -> Iterator[None]:
            steps = original(*args)
            while True:
                merging[0] = True
                try:
                    next(steps)
                except StopIteration:
                    return
                finally:
                    merging[0] = False
                if _told("in a merge", shard):  # a block has been written
                    _die()
                yield

        return merge

    def few_runs(original: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: original(*args, **{"limit": 2, **kwargs})  # merges come often

    def in_replace(original: Callable[..., None]) -> Callable[..., None]:
        def replace(*args: Any) -> None:
            if merging[0] and _told("before a merge counts", shard):
                _die()
            original(*args)
            if merging[0] and _told("before what was merged is deleted", shard):
                _die()

        return replace

    def of_runs(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Pass over the calls that replace the state alone."""

        def patched(original: Callable[..., None]) -> Callable[..., None]:
            wrapped = wrap(original)
            return lambda runs, writers, *args, **kwargs: (wrapped if writers else original)(runs, writers, *args, **kwargs)

        return patched

    def of_portion(kind: int, point: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
        def patched(original: Callable[..., int]) -> Callable[..., int]:
            def store(self: UnconditionalWriter, definition: TableDef, portion: Portion) -> int:
                if portion[0] == kind and _told(point, shard):
                    _die()
                return original(self, definition, portion)

            return store

        return patched

    _patch(PieceWriter, "_fetch", before("before fetch"))
    _patch(PieceWriter, "_prepare", after("after optimize"))
    _patch(PieceWriter, "_settle", before("after a write"))
    _patch(Link, "send", half_write)
    _patch(segment_files, "write_all", half_entry)
    _patch(FencedLog, "commit", before("before a commit"))
    _patch(FencedLog, "commit", after("after a commit"))

    _patch(Saver, "_cut", before("before the cut of a save"))
    _patch(SaveJob, "_block", after("after reading rows of a save"))
    _patch(CheckpointStorage, "write", before("before writing a file of a save"))
    _patch(ShardWriter, "finish", before("before the end of a save"))
    _patch(ShardWriter, "finish", after("after the end of a save"))

    _patch(RunWriter, "add", before("before writing rows of a load to disk"))
    _patch(Loader, "_gone", before("before a load notes what is gone"))
    _patch(Runs, "publish", of_runs(before("before the switch of a load")))
    _patch(SavedState, "replace", before("in the middle of the switch of a load"))
    _patch(Runs, "publish", of_runs(after("after the switch of a load")))
    _patch(UnconditionalWriter, "store", of_portion(ROWS, "before writing rows of a load to storage"))
    _patch(UnconditionalWriter, "store", of_portion(ERASED, "before the erases of a load"))

    _patch(RunWriter, "add", before("in a flush"))
    _patch(Runs, "publish", of_runs(before("before a flush counts")))
    _patch(Runs, "publish", of_runs(after("after a flush counts")))

    _patch(Runs, "merge", in_merge)
    _patch(SavedState, "replace", in_replace)
    _patch(Runs, "__init__", few_runs)
    assert shard_module._LONG_START_BYTES > 1 << 20
    shard_module._LONG_START_BYTES = 0

    _patch(SlotTaker, "take", before("before slots are taken over"))
    _patch(SlotTaker, "take", after("after slots are taken over"))
    _patch(SlotGiver, "drop", before("before slots are dropped"))
    _patch(SlotGiver, "drop", after("after slots are dropped"))
    _patch(SyncSteps, "hold_behind", after("after steps are held"))
    _patch(HandoverWork, "_come_to_last_step", before("before all come to one step"))
    _patch(move_phases, "_let_drain", before("before the last step is told"))
    _patch(move_phases, "_flipped", before("before a flip"))
    _patch(MoveCarrier, "_follow", before("before a phase is kept"))
    _patch(MoveCarrier, "_publish", before("before a phase is on the nodes"))


if __name__ == "__main__":
    options = sys.argv[2:]
    install(options[options.index("--shard") + 1])
    sys.exit(main(options))
