"""The capabilities of a shard. One leaves with its folder and its lines here; the kernel names none."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from kvemb.protocol.messages import PUSH
from kvemb.protocol.verb import Verb

from .alter.alterations import Alterations
from .capability import Capability
from .checkpoint.checkpoint_handlers import ShardCheckpoints
from .feed.subscriptions import FeedStreams
from .life.life_of_ids import LifeOfIds
from .operate.inspection import Inspection
from .rpc.handlers import Handlers
from .rpc.table_drops import TableDrops
from .sample.id_samples import IdSamples
from .scaling.shard_moves import Scaling

CAPABILITIES: tuple[type[Capability], ...] = (
    Scaling,
    ShardCheckpoints,
    LifeOfIds,
    Alterations,
    FeedStreams,
    Inspection,
    IdSamples,
)

VERBS: Mapping[str, Verb[Any, Any]] = {
    verb.name: verb for verb in chain([PUSH], Handlers.verbs, TableDrops.verbs, *((*one.verbs, *one.streams) for one in CAPABILITIES))
}
"""Every verb, by its name."""
