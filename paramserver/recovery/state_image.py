"""The image of a running shard: what its saved state holds, taken between two batches. Pure, apart from the locks it takes."""

from collections.abc import Callable

from ..journal import Position
from ..model.tables import Ids, TableState
from .shard_parts import ShardParts
from .state_file import ShardState, TableImage


def image(parts: ShardParts, position: Position, rows: Callable[[TableState], tuple[Ids, Ids]] = TableState.arrays) -> ShardState:
    """Take the state as of the last batch applied.

    Args:
        parts: of the shard. Nothing may be applied meanwhile: call this on the apply thread, or when that has ended.
        position: behind the journal entry of that batch. Sessions may be ahead of it: a hello or a push that is told twice changes
            nothing.
        rows: ids and versions of a table: all of them, or those that came with what is noted (`state_changes`).
    """
    tables = [TableImage(state.definition, state.step, *rows(state)) for state in parts.tables.all()]
    sessions, members, complete = parts.ingest.attendance.to_save()
    return ShardState(
        cluster_id=parts.cluster_id,
        shard=parts.shard,
        n_shards=parts.maps.cluster_map.n_shards,
        epoch=parts.engine.epoch,
        k=parts.engine.k,
        rows_applied=parts.engine.rows_applied,
        next_incarnation=parts.ingest.sessions.next_incarnation,
        tables=tuple(tables),
        sessions=tuple(sessions),
        members=members,
        complete=complete,
        journal=(position.segment, position.offset),
    )
