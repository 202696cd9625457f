"""A shard's answers, verb by verb: messages in, messages out. No gRPC here, no threads of its own."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from kvemb.errors import (
    InvalidInputError,
    ShardFailedError,
    TableAlteredError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol import messages
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import (
    ByeRequest,
    CompareRequest,
    CountReply,
    CreateTableRequest,
    DescribeReply,
    Empty,
    FlushReply,
    FlushRequest,
    HelloReply,
    HelloRequest,
    IdsReply,
    IdsRequest,
    ProgressReply,
    RepairReply,
    RepairRequest,
    RowsRequest,
    SetPoliciesRequest,
    StatusReply,
    StepReply,
    TableReply,
    TableRequest,
)
from kvemb.protocol.verb import Handled, Verb
from kvemb.schema.policies import NO_POLICIES
from kvemb.schema.table_def import TableDef

from ..ingest.part_checks import check_push, check_rows, find_same
from ..model.batch import ASSIGN, ERASE, RowsWork
from ..recovery.shard_parts import ShardParts
from ..repair.repair_jobs import Comparisons, Repairs
from ..repair.scrub import Scrub
from .push_streams import BytesInHand, PushReceiver

MAX_IDS = 4 << 20
MAX_COMPARED = 1 << 12
log = logging.getLogger("paramserver")


class Handlers:
    """The verbs of one shard that are no capability's, without drops. Thread-safe. Each takes its request and the caller's deadline."""

    def __init__(self, parts: ShardParts, repairs: Repairs, comparisons: Comparisons, scrub: Scrub, wake: Callable[[], None]) -> None:
        self._parts, self._repairs, self._comparisons, self._scrub, self._wake = parts, repairs, comparisons, scrub, wake
        self._in_hand = BytesInHand()

    def hello(self, request: HelloRequest, deadline: Deadline) -> HelloReply:
        """Let a trainer in; both sides must mean the same cluster."""
        ours = self._parts.cluster_id
        if request.cluster_id != ours:
            raise WrongNodeError(
                f"trainer {request.trainer!r} reads nodes of cluster {request.cluster_id.hex() or '-'}, this shard writes to cluster "
                f"{ours.hex()}; use the same kvemb.yaml"
            )
        incarnation, last = self._parts.ingest.attendance.hello(request.trainer, request.incarnation)
        log.info("trainer %s joined: incarnation %d, last part %d", request.trainer, incarnation, last)
        first_step, serial = self._parts.ingest.attendance.first_step(request.trainer), self._parts.registry.serial
        return HelloReply(incarnation, last, self._parts.config.servers.mode, first_step, serial, self._parts.ingest.loads.serial)

    def bye(self, request: ByeRequest, deadline: Deadline) -> Empty:
        self._parts.ingest.attendance.bye(request.trainer, request.incarnation)
        log.info("trainer %s left", request.trainer)
        return Empty()

    def describe(self, request: Empty, deadline: Deadline) -> DescribeReply:
        """Return the facts that a client needs."""
        parts, servers = self._parts, self._parts.config.servers
        tables = [table.to_dict() for table in parts.registry.tables]
        return DescribeReply(
            parts.config.cluster, parts.cluster_id, parts.shard, parts.maps.cluster_map.n_shards, servers.mode, servers.trainers, tables
        )

    def create_table(self, request: CreateTableRequest, deadline: Deadline) -> TableReply:
        """Create or open a table (shard 0)."""
        try:
            table = TableDef.from_dict(request.table)
        except TypeError as error:
            raise InvalidInputError(f"table definition: {error}") from error
        policies = NO_POLICIES.updated(request.policies)
        return self._table(self._parts.registry.create(table, exist_ok=request.exist_ok, policies=policies))

    def get_table(self, request: TableRequest, deadline: Deadline) -> TableReply:
        """Say what a table is now; of rows of an earlier schema, what their table has become."""
        find = self._parts.registry.find
        if request.schema < 0:
            return self._table(find(request.table))
        with suppress(TableAlteredError):
            find_same(request.table, request.schema, find)
        return replace(self._table(find(request.table)), load_serial=self._parts.ingest.loads.of(request.table))

    def set_policies(self, request: SetPoliciesRequest, deadline: Deadline) -> TableReply:
        """Change policies of a table (shard 0), or hear that they were changed."""
        registry = self._parts.registry
        if not request.tables_serial:
            registry.set_policies(request.table, request.policies)
        elif registry.serial < request.tables_serial:
            registry.load()
        self._wake()  # jobs that go by policies look at them
        return self._table(registry.find(request.table))

    def _table(self, table: TableDef) -> TableReply:
        registry = self._parts.registry
        return TableReply(table.to_dict(), registry.policies(table.key).to_dict(), registry.serial)

    def open_stream(self, requests: Iterator[bytes], require_seat: Callable[[str], None]) -> PushReceiver:
        """Make the server's end of a push stream."""
        parts, sync = self._parts, self._parts.config.servers.mode == "sync"
        check = partial(check_push, registry=parts.registry, shard=parts.shard, maps=parts.maps, sync=sync, loads=parts.ingest.loads)
        return PushReceiver(parts.ingest, check, requests, self._in_hand, require_seat)

    def assign(self, request: RowsRequest, deadline: Deadline) -> Empty:
        """Set rows, in order with pushes; answered once applied."""
        self._change_rows(ASSIGN, request, deadline)
        return Empty()

    def erase(self, request: RowsRequest, deadline: Deadline) -> CountReply:
        """Erase rows, in order with pushes; answered once applied, with the number of rows that existed."""
        return CountReply(self._change_rows(ERASE, request, deadline))

    def flush(self, request: FlushRequest, deadline: Deadline) -> FlushReply:
        """Wait until everything accepted is applied and in storage."""
        return FlushReply(self._parts.ingest.backlog.flush(deadline.within(request.timeout_s)))

    def count(self, request: TableRequest, deadline: Deadline) -> CountReply:
        """Count the rows of a table on this shard; without a name those of all tables."""
        if not request.table:
            return CountReply(sum(state.n_rows for state in self._parts.tables.all()))
        return CountReply(self._parts.tables.state(self._parts.registry.find(request.table)).n_rows)

    def step(self, request: TableRequest, deadline: Deadline) -> StepReply:
        """Say how often the optimizer was applied to a table on this shard."""
        state = self._parts.tables.state(self._parts.registry.find(request.table))
        return StepReply(state.step, state.n_applied)

    def ids(self, request: IdsRequest, deadline: Deadline) -> IdsReply:
        """List ids of a table on this shard in the order of their keys."""
        if not 1 <= request.limit <= MAX_IDS:
            raise InvalidInputError(f"limit is {request.limit}; give 1 to {MAX_IDS}")
        if not 0 <= request.after < 1 << 64:
            raise InvalidInputError(f"after is {request.after}; give an id as uint64")
        state = self._parts.tables.state(self._parts.registry.find(request.table))
        after = int(state.definition.order.keys(np.array([request.after], np.uint64))[0])
        return IdsReply(state.page(after if request.first else after + 1, request.limit).astype("<u8").tobytes())

    def repair(self, request: RepairRequest, deadline: Deadline) -> RepairReply:
        """Have lost nodes repaired, and the named ones compared; answered when that is done."""
        if self._parts.ingest.state.why_failed:
            raise ShardFailedError(self._parts.ingest.state.why_failed)
        known, started_s = self._parts.repairer.addresses, time.monotonic()
        unknown = sorted(set(request.addresses) - set(known))
        if unknown:
            raise InvalidInputError(f"no storage node {', '.join(unknown)}; there are {', '.join(known)}")
        ticket = self._repairs.ask(known if request.all_nodes else request.addresses)
        ticket.wait(deadline.within(request.timeout_s))
        return RepairReply(ticket.nodes, ticket.rows, time.monotonic() - started_s)

    def compare(self, request: CompareRequest, deadline: Deadline) -> CountReply:
        """Compare rows with storage, those that the index knows; answered with how many had to be restored."""
        n_ids, left = divmod(len(request.ids), 8)
        if left or n_ids > MAX_COMPARED:
            raise InvalidInputError(f"{len(request.ids)} bytes of ids to be compared: give at most {MAX_COMPARED} ids of 8 bytes")
        find = self._parts.registry.find
        table = find(request.table) if request.schema < 0 else find_same(request.table, request.schema, find)
        state = self._parts.tables.state(table)
        ids = np.unique(np.frombuffer(request.ids, "<u8").astype(np.uint64))
        ids = ids[state.known(ids)]
        if not len(ids) or self._parts.ingest.state.why_failed:
            return CountReply(0)
        ticket = self._comparisons.ask(state, ids)
        ticket.wait(deadline)
        return CountReply(ticket.rows)

    def progress(self, request: Empty, deadline: Deadline) -> ProgressReply:
        """Say up to which batch storage has everything."""
        return ProgressReply(self._parts.engine.epoch, self._parts.engine.k)

    def status(self, request: Empty, deadline: Deadline) -> StatusReply:
        parts = self._parts
        pending, lag_s = parts.ingest.backlog.n_and_age_s()
        unfinished = parts.registry.unfinished if parts.shard == 0 else ""  # drops and alterations
        cache = parts.tables.cache_budget
        return StatusReply(
            shard=parts.shard,
            epoch=parts.engine.epoch,
            k=parts.engine.k,
            rows_applied=parts.engine.rows_applied,
            pending_parts=pending,
            lag_s=lag_s,
            n_rows=sum(state.n_rows for state in parts.tables.all()),
            n_trainers=parts.ingest.attendance.n_trainers,
            cache_bytes=cache.used_bytes,
            cache_lookups=cache.n_lookups,
            cache_hits=cache.n_hits,
            failure=parts.ingest.state.why_failed or parts.ingest.state.waits_for or unfinished,
            journal_bytes=parts.fenced_log.journal.size_bytes,
            recovered_rows=parts.recovered.rows,
            recovery_s=parts.recovered.seconds,
            repair=parts.repairer.figures.now,
            compared=self._scrub.describe(),
            step=parts.ingest.attendance.step,
        )

    def _change_rows(self, kind: str, request: RowsRequest, deadline: Deadline) -> int:
        cluster_map = self._parts.maps.cluster_map
        rows = check_rows(request.rows, self._parts.registry.find, self._parts.shard, cluster_map, kind)
        return self._parts.ingest.submit_rows(RowsWork(kind, rows), deadline.within(request.timeout_s), cluster_map.shards_serial)

    verbs: ClassVar[Handled] = {
        messages.HELLO: hello,
        messages.BYE: bye,
        messages.DESCRIBE: describe,
        messages.GET_TABLE: get_table,
        messages.CREATE_TABLE: create_table,
        messages.SET_POLICIES: set_policies,
        messages.ASSIGN_ROWS: assign,
        messages.ERASE_ROWS: erase,
        messages.FLUSH: flush,
        messages.COUNT: count,
        messages.STEP: step,
        messages.LIST_IDS: ids,
        messages.GET_STATUS: status,
        messages.PROGRESS: progress,
        messages.COMPARE: compare,
        messages.REPAIR: repair,
    }


Answer = Callable[[Any, Deadline], Message]
Answers = Mapping[Verb[Any, Any], Answer]


def answers_of(*answering: tuple[Handled, object]) -> Answers:
    """Return what answers each verb, of objects with their verbs."""
    return {verb: partial(answer, one) for verbs, one in answering for verb, answer in verbs.items()}
