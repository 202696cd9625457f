"""A shard's answers, verb by verb: messages in, messages out. No gRPC here, no threads of its own."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from kvemb.checkpoint.checkpoint_messages import (
    LOAD_CHECKPOINT,
    SAVE_CHECKPOINT,
    SAVE_STATUS,
    LoadRequest,
    SaveReply,
    SaveRequest,
    SaveStatusRequest,
)
from kvemb.checkpoint.load import Decision
from kvemb.errors import (
    CheckpointError,
    InvalidInputError,
    ParameterServerError,
    ShardFailedError,
    TableAlteredError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol.feed_messages import FEED
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import (
    ASSIGN_ROWS,
    BYE,
    COMPARE,
    COUNT,
    CREATE_TABLE,
    DESCRIBE,
    ERASE_ROWS,
    FLUSH,
    GET_STATUS,
    GET_TABLE,
    HELLO,
    LIST_IDS,
    PROGRESS,
    PUSH,
    REPAIR,
    SET_POLICIES,
    STEP,
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
from kvemb.schema.move_plan import refuses
from kvemb.schema.policies import NO_POLICIES
from kvemb.schema.table_def import TableDef
from kvemb.stores.store_nodes import StoreNodes

from ..checkpoint.loader import check
from ..checkpoint.save_job import SaveOrder
from ..checkpoint.saver import Saver
from ..eviction.evictor import Evictor
from ..ingest.part_checks import check_push, check_rows, find_same
from ..model.batch import ASSIGN, ERASE, RowsWork
from ..model.table_registry import Registry
from ..recovery.shard_parts import ShardParts
from ..repair.repair_jobs import Comparisons, Repairs
from ..repair.scrub import Scrub
from .feed_streams import FeedStreams
from .inspection_handlers import InspectionHandlers
from .move_handlers import MoveHandlers
from .push_streams import BytesInHand, PushReceiver
from .table_changes import TableChanging

MAX_IDS = 4 << 20
MAX_COMPARED = 1 << 12
_DECIDED_WITHIN_S = 120.0  # of its check: two calls of a client; after that it is gone
log = logging.getLogger("paramserver")


class Handlers:
    """The verbs of one shard, without checkpoints, drops, inspection. Thread-safe. Each takes its request and the caller's deadline."""

    def __init__(
        self,
        parts: ShardParts,
        repairs: Repairs,
        comparisons: Comparisons,
        scrub: Scrub,
        evictor: Evictor,
        moves: MoveHandlers,
        checkpoints: "CheckpointHandlers",
        feeds: FeedStreams,
    ) -> None:
        self._parts, self._repairs, self._comparisons, self._scrub, self._evictor = parts, repairs, comparisons, scrub, evictor
        self.feeds = feeds
        self._in_hand = BytesInHand()
        self._tables = TableChanging(parts, no_shard_move=moves.no_shard_move, tell=feeds.tell)
        handlers: tuple[Any, ...] = (self, self._tables, InspectionHandlers(parts, evictor), moves, checkpoints)
        self.answers: Answers = {verb: partial(answer, one) for one in handlers for verb, answer in one.verbs.items()}

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
        self._evictor.look_at_policies()
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
            failure=parts.ingest.state.why_failed or parts.ingest.state.waits_for or self._tables.unfinished,
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
        HELLO: hello,
        BYE: bye,
        DESCRIBE: describe,
        GET_TABLE: get_table,
        CREATE_TABLE: create_table,
        SET_POLICIES: set_policies,
        ASSIGN_ROWS: assign,
        ERASE_ROWS: erase,
        FLUSH: flush,
        COUNT: count,
        STEP: step,
        LIST_IDS: ids,
        GET_STATUS: status,
        PROGRESS: progress,
        COMPARE: compare,
        REPAIR: repair,
    }


@dataclass(frozen=True)
class LoadPorts:
    """What a load asks of the rest of the shard.

    Args:
        undone: returns the load that was decided and is still to be carried out here, if there is one.
        flush: has the shard flush to its row log; the event is set when it is done.
        on_load: called once when the shard is to start again, to load; None where no caller would start it.
        shard: number.
    """

    undone: Callable[[], Decision | None]
    flush: Callable[[], threading.Event]
    on_load: Callable[[], None] | None
    shard: int


class CheckpointHandlers:
    """Answers one shard's saves and loads. Thread-safe."""

    def __init__(self, saver: Saver, registry: Registry, nodes: StoreNodes, loads: LoadPorts) -> None:
        self._saver, self._registry, self._nodes, self._loads = saver, registry, nodes, loads
        self._lock, self._deciding = threading.Lock(), ("", 0.0)  # the load that was checked last, and until when its decision is awaited

    def save(self, request: SaveRequest, deadline: Deadline) -> SaveReply:
        """Cut the shard and begin to save it; answered once it is cut."""
        order = SaveOrder(request.save_id, request.url, request.base_version, request.weights_only)
        self._saver.begin(order, deadline.within(request.timeout_s))
        return SaveReply(*self._saver.progress(request.save_id))

    def status(self, request: SaveStatusRequest, deadline: Deadline) -> SaveReply:
        """Say how far a save is; hear that all of it is whole."""
        if request.whole:
            self._saver.figures.end(request.save_id, done=True)
        return SaveReply(*self._saver.progress(request.save_id))

    def load(self, request: LoadRequest, deadline: Deadline) -> Empty:
        """Check whether this shard could load a checkpoint, or begin; it stops serving then and starts again."""
        if self._loads.on_load is None:
            raise ParameterServerError("this shard is not run by `kvemb shard`: stop and start it to load")
        if self._nodes.cluster_map.plan is not None:
            self._nodes.refresh_map(deadline)  # a move that has just ended is not said to go on
        if why := refuses(self._nodes.cluster_map.plan):
            raise CheckpointError(why)
        if request.begin:
            self._loads.on_load()
        elif self._awaits_decision(request):
            check(request.url, request.save_id, self._registry, request.tables)
            if self._registry.altering:
                raise CheckpointError(f"{self._registry.unfinished}; nothing was changed. Load when that is over")
            self._require_covered(request.tables)
            if request.tables:  # of the other tables the log is all that the load leaves; what comes behind this is flushed at the start
                self._loads.flush().wait(deadline.remaining_s() / 2)
        return Empty()

    def _awaits_decision(self, request: LoadRequest) -> bool:
        """Let one load at a time be between check and decision, where another one would displace it; False where it gives up.

        Shard 0 does: where several did, each of two loads might be refused by one of them.
        """
        with self._lock:
            load_id, until_s = self._deciding
            ours = load_id == request.load_id
            if not request.url:
                self._deciding = ("", 0.0) if ours else self._deciding
                return False
            if self._loads.shard == 0 and not ours and time.monotonic() < until_s:
                raise CheckpointError("another load is about to be decided; nothing was changed. Load again when that one is done")
            self._deciding = request.load_id, time.monotonic() + _DECIDED_WITHIN_S
            return True

    def _require_covered(self, tables: Sequence[str]) -> None:
        """Refuse a load of some tables that would take the place of one of others, which not all shards have carried out."""
        undone = self._loads.undone() if tables else None
        if undone is not None and not (undone.tables and set(undone.tables) <= set(tables)):
            what = f"of table {', '.join(undone.tables)}" if undone.tables else "of all tables"
            raise CheckpointError(
                f"a load {what} from {undone.url} is decided and not carried out here; nothing was changed. Start this shard again, which "
                "carries it out, and load then"
            )

    verbs: ClassVar[Handled] = {SAVE_CHECKPOINT: save, SAVE_STATUS: status, LOAD_CHECKPOINT: load}


Answer = Callable[[Any, Deadline], Message]
Answers = Mapping[Verb[Any, Any], Answer]
_HANDLED: tuple[Handled, ...] = (
    Handlers.verbs,
    TableChanging.verbs,
    InspectionHandlers.verbs,
    MoveHandlers.verbs,
    CheckpointHandlers.verbs,
)
_VERBS: list[Verb[Any, Any]] = [PUSH, FEED, *chain.from_iterable(_HANDLED)]
VERBS = {verb.name: verb for verb in _VERBS}
"""Every verb, by its name."""
