"""What admission and eviction bring to a shard."""

from typing import TYPE_CHECKING, ClassVar

from kvemb.evict import never
from kvemb.life.eviction_messages import EVICTIONS, EvictionsReply, EvictionsRequest
from kvemb.net.deadline import Deadline
from kvemb.protocol.verb import Handled

from ..capability import Capability, ShardKernel
from .admission import Admissions
from .evictor import Evictor, TableEvictions

if TYPE_CHECKING:
    from kvemb.process.metrics import MetricFamilies


class LifeOfIds(Capability):
    """Which ids get rows, and which rows go again."""

    def __init__(self, kernel: ShardKernel) -> None:
        super().__init__(kernel)
        parts = self._parts
        self._admissions, self._evictor = Admissions(parts.registry.policies, parts.tables, sync=parts.sync), Evictor(parts)
        self.jobs, self.judges = (self._evictor,), (self._admissions.judge,)

    def evictions(self, request: EvictionsRequest, deadline: Deadline) -> EvictionsReply:
        """Say which rows the tables' policies have erased since the shard was started; a dry run: which they would erase now."""
        parts, evictor, found = self._parts, self._evictor, []
        deadline, done = deadline.within(request.timeout_s), evictor.report()
        for definition in parts.registry.tables:
            if parts.registry.policies(definition.key).eviction == never() and definition.key not in done:
                continue
            state = parts.tables.state(definition)
            of = evictor.dry_run(state, deadline) if request.dry_run else done.get(definition.key, TableEvictions())
            found.append(evictor.described(definition, of, state.n_rows))
        return EvictionsReply(found)

    verbs: ClassVar[Handled] = {EVICTIONS: evictions}

    def add_metrics(self, to: "MetricFamilies") -> None:
        tables = [({"table": table.name}, table) for table in self._parts.registry.tables]
        text = "Gradients of ids that get no row yet, by the table's admission, since the shard's process was started."
        to.counter("kvemb_shard_held_back_total", text, [(labels, self._admissions.held_back[table.name]) for labels, table in tables])
        text = "Memory in which the occurrences of such ids are counted."
        to.gauge("kvemb_shard_admission_bytes", text, [(labels, self._admissions.filter_bytes(table.key)) for labels, table in tables])
        report = self._evictor.report()
        done = [(labels, report[table.key]) for labels, table in tables if table.key in report]
        rows = [({**labels, "policy": of}, float(n)) for labels, one in done for of, n in one.by_policy.items()]
        to.counter("kvemb_shard_evicted_rows_total", "Rows that the tables' policies have erased.", rows)
        to.counter("kvemb_shard_evicted_bytes_total", "Bytes of their records.", [(labels, float(one.size_bytes)) for labels, one in done])
        text = "Walks through a table that has a policy, for rows that it sends away."
        to.counter("kvemb_shard_eviction_walks_total", text, [(labels, float(one.walks)) for labels, one in done])
