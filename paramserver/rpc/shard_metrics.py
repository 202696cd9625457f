"""One shard's figures, for prometheus-client's registries. Reads the counts of other parts; sends no request, changes nothing.

Every figure carries the labels `cluster` and `shard`. Names follow Prometheus's conventions: base units, `_total` for counters.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from kvemb.coordination.markers import Why
from kvemb.errors import NodeRefusesError
from kvemb.net.tls_probe import look_at_own
from kvemb.process.metrics import MetricFamilies
from kvemb.stores.store_nodes import NodeStats

from ..apply.applier import ApplyFigures
from ..capability import Capability
from ..recovery.shard_parts import ShardParts
from ..recovery.start_report import PHASES, StartReport
from ..repair.node_watch import NodesSeen, NodeWatch

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MARKER_STATES = ("whole", *get_args(Why), "unknown")


def add_nodes(to: MetricFamilies, seen: NodesSeen) -> None:
    """Add the figures of the nodes; of one that does not answer only that."""
    nodes = [({"node": node.address}, node) for node in seen.stats]
    answered = [(labels, node) for labels, node in nodes if not node.error]
    limited = [(labels, node) for labels, node in answered if node.limit_bytes]
    up = [(labels, not node.error and node.address not in seen.away) for labels, node in nodes]
    to.gauge("kvemb_node_up", "Whether the node answered this shard.", up)
    to.gauge("kvemb_node_keys", "Keys that the node holds.", [(labels, node.n_keys) for labels, node in answered])
    to.gauge("kvemb_node_used_bytes", "Memory that the node says it uses.", [(labels, node.used_bytes) for labels, node in answered])
    to.gauge("kvemb_node_limit_bytes", "Memory that it may use.", [(labels, node.limit_bytes) for labels, node in limited])
    free = [(labels, max(0, node.limit_bytes - node.used_bytes)) for labels, node in limited]
    to.gauge("kvemb_node_headroom_bytes", "Memory of it that is free.", free)
    to.counter("kvemb_node_evicted_total", "Keys that the node has thrown away.", [(labels, node.evicted) for labels, node in answered])
    to.counter("kvemb_node_moved_total", "Those that went with slab pages.", [(labels, node.moved) for labels, node in answered])
    text = "Whether the node is set to throw rows away, which is not allowed."
    to.gauge("kvemb_node_unsafe", text, [(labels, bool(node.unsafe)) for labels, node in answered])
    text = "How long the node took, with the connection, to say all this."
    to.gauge("kvemb_node_answer_seconds", text, [(labels, node.answer_s) for labels, node in answered])
    to.gauge("kvemb_nodes_open_slots", "Slots of a Redis Cluster that stand open between two nodes, at two looks.", seen.open_slots)
    states = [({**labels, "state": state}, state == _marker(node, seen)) for labels, node in nodes for state in MARKER_STATES]
    to.gauge("kvemb_node_marker_state", "1 for the state that the node's marker is in.", states)


def _marker(node: NodeStats, seen: NodesSeen) -> str:
    return seen.lost.get(node.address, "unknown" if node.error or not seen.known else "whole")


_READY = "Whether the shard takes pushes."
_FAILED = "Whether the shard has stopped applying until it is restarted."
_RETRYING = "Whether storage or the journal's disk makes the shard wait."


@dataclass(frozen=True, eq=False)
class StartMetrics:
    """The collector of a shard that starts. Any thread."""

    cluster: str
    shard: int
    report: StartReport

    def collect(self) -> "Iterable[Metric]":
        """Return every family as it is now."""
        families = MetricFamilies({"cluster": self.cluster, "shard": str(self.shard)})
        families.gauge("kvemb_shard_ready", _READY, False)
        families.gauge("kvemb_shard_failed", _FAILED, False)
        families.gauge("kvemb_shard_retrying", _RETRYING, bool(self.report.waits_for))
        _add_start(families, self.report.phase)
        share = self.report.share
        text = "How much of that phase of the start is done, 0 to 1; missing where that is not known."
        families.gauge("kvemb_shard_start_progress", text, [] if share is None else [({}, share)])
        return families


@dataclass(frozen=True, eq=False)
class ShardMetrics:
    """The collector of one shard. Any thread.

    Args:
        parts: of the shard.
        applies: counted by its apply thread.
        watch, capabilities: of the shard.
    """

    parts: ShardParts
    applies: ApplyFigures
    watch: NodeWatch
    capabilities: Sequence[Capability]

    def collect(self) -> "Iterable[Metric]":
        """Return every family as it is now."""
        families = MetricFamilies({"cluster": self.parts.config.cluster, "shard": str(self.parts.shard)})
        self._add_state(families)
        self._add_work(families)
        self._add_memory(families)
        self._add_journal(families)
        self._add_history(families)
        self._add_time(families)
        add_nodes(families, self.watch.seen)
        for one in self.capabilities:
            one.add_metrics(families)
        return families

    def _add_state(self, to: MetricFamilies) -> None:
        ingest = self.parts.ingest
        to.gauge("kvemb_shard_ready", _READY, ingest.state.takes_pushes)
        to.gauge("kvemb_shard_failed", _FAILED, bool(ingest.state.why_failed))
        waits = bool(str(ingest.state.trouble)) and not ingest.state.why_failed
        to.gauge("kvemb_shard_retrying", _RETRYING, waits)
        _add_start(to, "")
        refused = ingest.state.trouble.storage.startswith(NodeRefusesError.__name__)
        to.gauge("kvemb_shard_refused", "Whether it waits because a node does not take its user, password or command.", waits and refused)
        to.gauge("kvemb_shard_step_wait_seconds", "How long a sync step has waited for trainers.", ingest.state.step_wait_s)
        to.gauge("kvemb_shard_epoch", "Epoch of the versions that the shard writes.", self.parts.engine.epoch)
        here = [({"trainer": name}, 1.0) for name in ingest.attendance.trainers]
        to.gauge("kvemb_shard_trainer_connected", "1 for every trainer that has said hello and not yet goodbye.", here)

    def _add_work(self, to: MetricFamilies) -> None:
        parts = self.parts
        pending, lag_s = parts.ingest.backlog.n_and_age_s()
        to.gauge("kvemb_shard_batch", "Number of the last batch applied in this epoch.", parts.engine.k)
        to.counter("kvemb_shard_rows_applied_total", "Rows applied, by all processes of this shard together.", parts.engine.rows_applied)
        to.gauge("kvemb_shard_pending_parts", "Pushes and row changes that are taken and not applied.", pending)
        to.gauge("kvemb_shard_lag_seconds", "Age of the oldest push that is not applied.", lag_s)
        text = "Time from a batch's turn until it was stored, waits for storage included."
        to.histogram("kvemb_shard_apply_seconds", text, [({}, self.applies.seconds)])
        text = "Batches of the shard between the pull that a push was computed from and its apply."
        to.histogram("kvemb_push_staleness_batches", text, [({}, self.applies.staleness)])

    def _add_memory(self, to: MetricFamilies) -> None:
        tables, cache = self.parts.tables.all(), self.parts.tables.cache_budget
        by_table = [({"table": state.definition.name}, state) for state in tables]
        to.gauge("kvemb_shard_rows", "Rows that exist.", [(labels, state.n_rows) for labels, state in by_table])
        to.gauge("kvemb_shard_steps", "Applies of the table's optimizer.", [(labels, state.step) for labels, state in by_table])
        text = "Rows of the table applied, since the shard's process was started."
        to.counter("kvemb_shard_table_rows_applied_total", text, [(labels, state.n_applied) for labels, state in by_table])
        to.counter("kvemb_shard_cache_lookups_total", "Rows that were looked for in the shard's cache.", cache.n_lookups)
        to.counter("kvemb_shard_cache_hits_total", "Rows that were found there.", cache.n_hits)
        to.gauge("kvemb_shard_cache_bytes", "Memory that the cache uses.", cache.used_bytes)
        to.gauge("kvemb_shard_cache_limit_bytes", "Memory that it may use.", cache.limit_bytes)

    def _add_journal(self, to: MetricFamilies) -> None:
        limit_bytes = self.parts.config.servers.journal_max_mb << 20
        to.gauge("kvemb_shard_journal_bytes", "Size of the journal.", self.parts.fenced_log.journal.size_bytes)
        to.gauge("kvemb_shard_journal_limit_bytes", "Size at which the shard flushes to its row log.", limit_bytes)
        disk = os.statvfs(self.parts.config.servers.data_dir)
        to.gauge("kvemb_shard_disk_free_bytes", "Room on the journal's disk for the shard.", disk.f_bavail * disk.f_frsize)
        to.gauge("kvemb_shard_disk_bytes", "Size of the journal's disk.", disk.f_blocks * disk.f_frsize)

    def _add_time(self, to: MetricFamilies) -> None:
        config = self.parts.config
        to.gauge("kvemb_shard_clock_seconds", "The time of day on the shard's host.", time.time())
        sections = (("parameter_servers", config.servers.tls, True), ("storage", config.storage.tls, False))
        ends = [({"of": name}, look_at_own(tls, server=server).ends_s) for name, tls, server in sections if tls is not None and tls.own]
        to.gauge("kvemb_shard_certificate_end_timestamp_seconds", "When its certificate ends; 0 for one that is not good now.", ends)

    def _add_history(self, to: MetricFamilies) -> None:
        repairs, recovered = self.parts.repairer.figures, self.parts.recovered
        to.counter("kvemb_shard_repaired_nodes_total", "Repairs of nodes that the shard has had a part in.", repairs.nodes)
        to.counter("kvemb_shard_repaired_rows_total", "Rows that storage had lost and the shard has rewritten.", repairs.rows)
        to.gauge("kvemb_shard_repairing", "Whether the shard repairs a node now.", bool(repairs.now))
        to.gauge("kvemb_shard_recovered_rows", "Rows that the shard replayed from its journal when it started.", recovered.rows)
        to.gauge("kvemb_shard_recovery_seconds", "How long that took.", recovered.seconds)


def _add_start(to: MetricFamilies, now: str) -> None:
    to.gauge("kvemb_shard_starting", "1 for the phase of its start that the shard is in.", [({"phase": of}, of == now) for of in PHASES])
