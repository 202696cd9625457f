"""How far a shard had come, kept on the storage nodes: a journal that ends before it has lost batches.

About once a second the shard notes the last batch that it has applied (`kvemb:reached:<shard>`, a few bytes on every node). A batch is
applied only once it is in the journal. So where the journal ends before the note, its end is gone, or the folder is an older copy. A start
finds that before it changes anything: before the owner's epoch is raised, and before the journal gets another segment.

The note is no promise: the nodes' newest copy counts, and one that is lost, old or damaged only proves less. Then rows tell
(`paramserver.model.transition`).
"""

import platform
import time
from dataclasses import replace
from pathlib import Path

from kvemb.coordination.shard_notes import ShardNote, newest_note, note_name
from kvemb.errors import JournalBehindError
from kvemb.net.deadline import Deadline
from kvemb.stores.store import Store

from ..journal import last_batch
from ..model.transition import ORDERS
from ..row_log.state_file import ShardState
from .shard_parts import ShardParts

_AGAIN_S = 10.0  # a shard without work says that it lives


def require_reached(state: ShardState, store: Store, journal: Path, timeout_s: float) -> None:
    """Compare the saved state and its journal with the note on the nodes; nothing is changed."""
    told = newest_note(store.values.get(note_name(state.shard), Deadline.after(timeout_s)))
    k = max(state.k, last_batch(journal, state.journal))
    if told is not None and told.k > k:
        raise JournalBehindError(
            f"shard {state.shard}: the journal in {journal} ends with batch {k}, but the shard had told the storage nodes that it has "
            f"applied batch {told.k} (of epoch {told.epoch}{', on ' + told.place if told.place else ''}): {told.k - k} acknowledged "
            f"batches or more are missing. {ORDERS}"
        )


class HighWaterMarkReporter:
    """Tells the nodes how far a shard has come, when that has changed, and now and then that it is there. One thread."""

    def __init__(self, parts: ShardParts) -> None:
        self._parts, place = parts, f"{platform.node()}:{parts.data.path.resolve()}"
        self._told: ShardNote | None = None
        self._about = ShardNote(parts.engine.epoch, 0, parts.config.cluster, place)

    def tell(self) -> None:
        """Write the note if there is something new, or it is of some time ago."""
        now, told = replace(self._about, k=self._parts.engine.k, at_s=int(time.time())), self._told
        if told is None or told.k != now.k or abs(now.at_s - told.at_s) >= _AGAIN_S:
            self._parts.store.values.put(note_name(self._parts.shard), now.encode(), Deadline.after(self._parts.timeout_s))
            self._told = now
