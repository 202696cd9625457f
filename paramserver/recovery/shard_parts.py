"""The parts of a shard that its verbs, its saves and its loads share; `start` makes them. And their image, for the saved state."""

from collections.abc import Callable
from dataclasses import dataclass

from kvemb.config import Config
from kvemb.protocol.shard_routing import MapSource

from ..engine.engine import Engine
from ..ingest.ingest import Ingest
from ..journal import Position
from ..journal.write_ahead_log import FencedLog
from ..model.table_registry import Registry
from ..model.tables import Ids, Tables, TableState
from ..model.transition import Timeline
from ..repair.repairer import Repairer
from ..snapshot import Runs
from .claim_shard import Claim
from .replay import Recovered
from .state_file import ShardState, TableImage


@dataclass(frozen=True)
class ShardParts:
    """The parts that the verbs, saves and loads of a shard share. Threads are not among them."""

    config: Config
    shard: int
    cluster_id: bytes
    registry: Registry
    tables: Tables
    engine: Engine
    ingest: Ingest
    fenced_log: FencedLog
    recovered: Recovered
    timeline: Timeline
    runs: Runs
    repairer: Repairer
    maps: MapSource
    claim: Claim
    snapshot_due: bool = False


def image(parts: ShardParts, position: Position, rows: Callable[[TableState], tuple[Ids, Ids]] = TableState.arrays) -> ShardState:
    """Take the state as of the last batch applied.

    Args:
        parts: of the shard. Nothing may be applied meanwhile: call this on the apply thread, or when that has ended.
        position: behind the journal entry of that batch. Sessions may be ahead of it: a hello or a push that is told twice changes
            nothing.
        rows: ids and versions of a table: all of them, or only those to be noted (`state_changes`).
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
