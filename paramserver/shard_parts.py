"""The parts of a shard that its verbs, its saves and its loads share; `start` makes them."""

from dataclasses import dataclass

from kvemb.config import Config

from .engine import Engine
from .intake import Intake
from .ledger import Ledger
from .registry import Registry
from .repair import Repairer
from .replay import Recovered
from .snapshot import Runs
from .tables import Tables
from .timeline import Timeline


@dataclass(frozen=True)
class ShardParts:
    """What the verbs, saves and loads of a shard work on. Threads are not among them."""

    config: Config
    shard: int
    cluster_id: bytes
    registry: Registry
    tables: Tables
    engine: Engine
    intake: Intake
    ledger: Ledger
    recovered: Recovered
    timeline: Timeline
    runs: Runs | None = None
    repairer: Repairer | None = None
    snapshot_due: bool = False
