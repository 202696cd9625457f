"""The parts of a shard that its verbs, its saves and its loads share; `start` makes them."""

from dataclasses import dataclass

from kvemb.config import Config
from kvemb.protocol.shard_routing import MapSource

from ..engine.engine import Engine
from ..ingest.ingest import Ingest
from ..journal.fenced_log import FencedLog
from ..model.table_registry import Registry
from ..model.tables import Tables
from ..model.timeline import Timeline
from ..repair.repairer import Repairer
from ..snapshot import Runs
from .claim_shard import Claim
from .replay import Recovered


@dataclass(frozen=True)
class ShardParts:
    """What the verbs, saves and loads of a shard work on. Threads are not among them."""

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
