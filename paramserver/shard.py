"""One running shard: puts its parts together, owns their threads, and takes them down in order. No protocol and no maths here."""

import logging
from collections.abc import Callable
from pathlib import Path

from kvemb.config import Config
from kvemb.errors import ConfigError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.stores.base import Store
from kvemb.stores.registry import open_store
from paramserver.applier import Applier
from paramserver.barrier import Barrier
from paramserver.cache import CacheBudget
from paramserver.data_dir import DataDir
from paramserver.engine import Engine
from paramserver.intake import Intake
from paramserver.ownership import STATE, claim, confirm, join_cluster
from paramserver.registry import Registry
from paramserver.service import Server
from paramserver.sessions import Sessions
from paramserver.state_file import ShardState, TableImage, encode
from paramserver.tables import Tables, TableState
from paramserver.verbs import ShardParts, Verbs
from paramserver.watch import EvictionWatch

_JOIN_S = 5.0
_GRACE_S = 0.5  # for last replies on their way; trainers keep their push streams open and would never end them
log = logging.getLogger("paramserver")


class Shard:
    """A shard that serves; made by `start`.

    Args:
        parts: its parts.
        store, data: what it has open.
        listen: "host:port" to serve on.
    """

    def __init__(self, parts: ShardParts, store: Store, data: DataDir, listen: str) -> None:
        self._parts, self._store, self._data = parts, store, data
        sync = parts.config.servers.mode == "sync"
        self._server = Server(Verbs(parts), listen)
        self._applier = Applier(parts.intake, parts.engine, parts.tables, sync=sync, failed=self._not_serving)
        self._watch = (
            None if parts.config.storage.allow_row_loss else EvictionWatch(store, parts.config.storage.timeout_s, parts.intake.lose)
        )
        self.address = self._server.address

    def serve(self) -> None:
        """Start the threads; returns at once."""
        self._applier.start()
        self._server.start()
        if self._watch is not None:
            self._watch.start()

    def stop(self, drain_timeout_s: float) -> str:
        """Drain, save the state, end every thread; return "" or what could not be applied (the state is not saved then)."""
        self._server.set_serving(False)
        if self._watch is not None:
            self._watch.stop(_JOIN_S)
        drained = self._parts.intake.drain(Deadline.after(drain_timeout_s))
        ended = self._applier.stop(_JOIN_S + self._parts.config.storage.timeout_s)
        trouble = "" if drained and ended else self._trouble()
        if not trouble:
            trouble = self._save()
        self._server.stop(_GRACE_S)
        self._store.close()
        self._data.close()
        return trouble

    def _trouble(self) -> str:
        return self._parts.intake.failure or self._parts.intake.describe_pending()

    def _save(self) -> str:
        try:
            self._data.write(STATE, encode(self._image()))
        except OSError as error:
            return f"everything is applied, but the state could not be saved in {self._data.path}: {error.strerror}"
        log.info("drained; state saved in %s at k %d", self._data.path, self._parts.engine.k)
        return ""

    def _image(self) -> ShardState:
        parts = self._parts
        tables = [TableImage(state.definition, state.step, *state.arrays()) for state in parts.tables.all()]
        return ShardState(
            cluster_id=parts.cluster_id,
            shard=parts.shard,
            n_shards=len(parts.config.servers.shards),
            epoch=parts.engine.epoch,
            k=parts.engine.k,
            rows_applied=parts.engine.rows_applied,
            next_incarnation=parts.intake.sessions.next_incarnation,
            tables=tuple(tables),
            sessions=tuple(parts.intake.sessions.kept()),
        )

    def _not_serving(self) -> None:
        self._server.set_serving(False)


def start(config: Config, shard: int, *, listen: str, start_timeout_s: float, wait: Callable[[float], None]) -> Shard:
    """Take every step up to a shard that can serve; on an error everything is closed again.

    Args:
        config: of the cluster.
        shard: number.
        listen: "host:port" to serve on.
        start_timeout_s: how long to wait for storage nodes.
        wait: between tries; raises when the process is told to stop.

    Raises:
        ConfigError: no such shard, or a table of the file does not fit.
        KvembError: see `paramserver.ownership`.
    """
    if not 0 <= shard < len(config.servers.shards):
        raise ConfigError(f"--shard {shard}: parameter_servers.shards has {len(config.servers.shards)} entries, counted from 0")
    data = DataDir(Path(config.servers.data_dir), shard)
    store = None
    try:
        store = open_store(config.storage, role=f"shard:{shard}")
        parts, state = _parts(config, shard, store, data, start_timeout_s, wait)
        running = Shard(parts, store, data, listen)
        confirm(data)
    except BaseException:
        if store is not None:
            store.close()
        data.close()
        raise
    running.serve()
    log.info("serving on %s: %d shards, epoch %d, k %d", running.address, state.n_shards, state.epoch, state.k)
    return running


def _parts(
    config: Config, shard: int, store: Store, data: DataDir, start_timeout_s: float, wait: Callable[[float], None]
) -> tuple[ShardParts, ShardState]:
    timeout_s, servers = config.storage.timeout_s, config.servers
    cluster_id = join_cluster(store, data, shard, deadline=Deadline.after(start_timeout_s), timeout_s=timeout_s, wait=wait)
    registry = Registry(store, shard, timeout_s)
    registry.load()
    for table in config.tables if shard == 0 else ():
        registry.create(table, exist_ok=True)
    state = claim(store, data, shard, len(servers.shards), cluster_id, timeout_s)
    budget = CacheBudget(servers.cache_mb << 20)
    tables = Tables([_table(registry, image, budget) for image in state.tables], budget)
    engine = Engine(store, tables, epoch=state.epoch, k=state.k, timeout_s=timeout_s)
    engine.rows_applied = state.rows_applied
    sessions = Sessions(shard == 0, state.next_incarnation, list(state.sessions))
    barrier = Barrier(servers.trainers, servers.barrier_timeout_s) if servers.mode == "sync" else None
    return ShardParts(config, shard, cluster_id, registry, tables, engine, Intake(sessions, barrier)), state


def _table(registry: Registry, image: TableImage, budget: CacheBudget) -> TableState:
    registered = registry.find(image.definition.name)
    if registered != image.definition:
        raise ParameterServerError(f"table {image.definition.name!r}: the saved state knows {image.definition}, the registry {registered}")
    return TableState(registered, image.step, (image.ids, image.versions), budget)
