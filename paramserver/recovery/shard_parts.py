"""The parts of a shard that its verbs, its saves and its loads share; `start` makes them. And what its saved state says of them."""

from dataclasses import dataclass, replace

from kvemb.config import Config
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import StoreNodes

from ..engine.engine import Engine
from ..ingest.ingest import Ingest
from ..journal import Position
from ..journal.write_ahead_log import FencedLog
from ..model.row_ages import RowAges
from ..model.table_registry import Registry
from ..model.tables import Tables
from ..model.transition import Timeline
from ..repair.repairer import Repairer
from ..row_log import Runs
from ..row_log.state_file import SavedState, ShardState
from ..shard_process.data_dir import DataDir
from .claim_shard import Claim
from .replay import Recovered


class StartAgainError(Exception):
    """The start is to be made again, from the saved state that there is now. Internal: no caller outside sees it."""


@dataclass(frozen=True)
class StartingShard:
    """The parts of a shard that there are before its tables."""

    shard: int
    registry: Registry
    runs: Runs
    saved: SavedState
    fenced_log: FencedLog
    claim: Claim
    store: Store
    data: DataDir
    timeout_s: float


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
    store: Store
    maps: StoreNodes
    data: DataDir
    claim: Claim
    saved: SavedState
    ages: RowAges

    @property
    def timeout_s(self) -> float:
        """Of one exchange with storage."""
        return self.config.storage.timeout_s

    @property
    def sync(self) -> bool:
        """Whether this is a sync job."""
        return self.config.servers.mode == "sync"


def state_of(parts: ShardParts, position: Position) -> ShardState:
    """Return the state as of the last batch applied, with the row log as it is."""
    saved = parts.saved.now
    tables = [replace(saved.of(state.definition), step=state.step, n_rows=state.n_rows) for state in parts.tables.all()]
    sessions, members, complete = parts.ingest.attendance.to_save()
    return replace(
        saved,
        n_shards=parts.maps.cluster_map.n_shards,
        epoch=parts.engine.epoch,
        k=parts.engine.k,
        rows_applied=parts.engine.rows_applied,
        next_incarnation=parts.ingest.sessions.next_incarnation,
        tables=tuple(tables),
        sessions=tuple(sessions),
        members=members,
        complete=complete,
        journal=position,
        points=parts.ages.points,
        since=parts.ages.since,
    )
