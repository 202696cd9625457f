"""The gRPC shell: bytes in, bytes out, one handler per method of `kvemb.protocol.messages`. Decides nothing itself.

Unary replies are always a `Reply`: errors travel in it with their type. No protobuf except gRPC's own health service.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvemb.errors import AccessDeniedError, KvembError, ParameterServerError, ShardUnavailableError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES, Message
from kvemb.protocol.messages import (
    MAX_REQUEST_BYTES,
    SERVICE,
    ByeRequest,
    CompareRequest,
    CreateTableRequest,
    Empty,
    EraseTableRequest,
    FlushRequest,
    HelloRequest,
    IdsRequest,
    LoadRequest,
    RepairRequest,
    Reply,
    RowsRequest,
    SampleIdsRequest,
    SaveRequest,
    SaveStatusRequest,
    ShowRowRequest,
    TableRequest,
)
from kvemb.protocol.move_messages import (
    AbortMoveRequest,
    LeftSessionRequest,
    MoveRequest,
    ReplaceNodeRequest,
    SlotEntriesRequest,
    WatermarksRequest,
)

from .access_control import AccessControl
from .checkpoint_handlers import CheckpointHandlers
from .handlers import Handlers
from .stream_limits import MAX_STREAMS, Streams, connection_options

MAX_WAITING_CALLS = 48
LIVE = "live"
"""The name under which gRPC's health service says that the process is there, whatever it can do."""
_LONGEST_WAIT_S = 3600.0  # of a call whose caller gave no deadline
_SPARE_THREADS = 16  # answer hello, status and health while every stream and every waiting call is taken
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
log = logging.getLogger("paramserver")


class Server:
    """A gRPC server around a shard's handlers.

    Args:
        handlers, checkpoints: what to call.
        listen: "host:port"; port 0 takes a free one.
        access: who may call.

    Raises:
        ParameterServerError: the address cannot be had.
    """

    def __init__(self, handlers: Handlers, checkpoints: CheckpointHandlers, listen: str, access: AccessControl) -> None:
        self._access = access
        self._handlers, self._checkpoints = handlers, checkpoints
        self._streams = Streams()
        self._waiting = threading.BoundedSemaphore(MAX_WAITING_CALLS)
        n_threads = MAX_STREAMS + MAX_WAITING_CALLS + _SPARE_THREADS
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="kvemb-rpc")
        self._server = grpc.server(self._threads, options=(*_OPTIONS, *connection_options(), *access.options))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._rpc_methods()),))
        try:
            port = access.listen(self._server, listen)
        except RuntimeError as error:
            raise ParameterServerError(f"cannot listen on {listen}: is another process there, or is it no address of this host?") from error
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        """Serve."""
        self._server.start()
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        """Set what the health service answers: to those who ask for `LIVE` that the process is there, to others whether it takes pushes."""
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            self._health.set(name, states.SERVING if serving else states.NOT_SERVING)
        self._health.set(LIVE, states.SERVING)

    def stop(self, grace_s: float) -> None:
        """End every call, those still under way after the grace time by force, and the threads."""
        self._health.enter_graceful_shutdown()
        self._streams.end_idle()  # trainers keep them open, and nobody need wait for that
        self._server.stop(grace_s).wait()
        self._threads.shutdown(wait=True)

    def _rpc_methods(self) -> dict[str, Any]:
        handlers, checkpoints = self._handlers, self._checkpoints
        unary = {
            "Hello": self._unary(HelloRequest, handlers.hello),
            "Describe": self._unary(Empty, handlers.describe),
            "CreateTable": self._unary(CreateTableRequest, handlers.create_table, waits=True),
            "DropTable": self._unary(TableRequest, handlers.drop.begin, waits=True),
            "EraseTable": self._unary(EraseTableRequest, handlers.drop.erase, waits=True),
            "EndDrop": self._unary(TableRequest, handlers.drop.end, waits=True),
            "GetTable": self._unary(TableRequest, handlers.get_table),
            "Assign": self._unary(RowsRequest, handlers.assign, waits=True),
            "Erase": self._unary(RowsRequest, handlers.erase, waits=True),
            "Flush": self._unary(FlushRequest, handlers.flush, waits=True),
            "Count": self._unary(TableRequest, handlers.count),
            "Step": self._unary(TableRequest, handlers.step),
            "Ids": self._unary(IdsRequest, handlers.ids),
            "Status": self._unary(Empty, handlers.status),
            "Progress": self._unary(Empty, handlers.progress),
            "Bye": self._unary(ByeRequest, handlers.bye),
            "Save": self._unary(SaveRequest, checkpoints.save, waits=True),
            "SaveStatus": self._unary(SaveStatusRequest, checkpoints.status),
            "Load": self._unary(LoadRequest, checkpoints.load, waits=True),
            "Compare": self._unary(CompareRequest, handlers.compare, waits=True),
            "Repair": self._unary(RepairRequest, handlers.repair, waits=True),
            "ShowRow": self._unary(ShowRowRequest, handlers.inspection.show_row, waits=True),
            "SampleIds": self._unary(SampleIdsRequest, handlers.inspection.sample_ids),
            "Examine": self._unary(Empty, handlers.inspection.examine, waits=True),
            "MoveSlots": self._unary(MoveRequest, handlers.moves.begin, waits=True),
            "ReplaceNode": self._unary(ReplaceNodeRequest, handlers.moves.replace_node, waits=True),
            "AbortMove": self._unary(AbortMoveRequest, handlers.moves.abort, waits=True),
            "MoveStatus": self._unary(Empty, handlers.moves.status, waits=True),
            "SlotSizes": self._unary(Empty, handlers.moves.slot_sizes, waits=True),
            "Watermarks": self._unary(WatermarksRequest, handlers.moves.watermarks),
            "LeftSession": self._unary(LeftSessionRequest, handlers.moves.left_session),
            "SlotEntries": self._unary(SlotEntriesRequest, handlers.moves.slot_entries, waits=True),
        }
        methods: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(handler(name)) for name, handler in unary.items()}
        return {**methods, "Push": grpc.stream_stream_rpc_method_handler(self._push)}

    def _unary(self, request_type: type[Message], verb: Callable[[Any, Deadline], Message], *, waits: bool = False) -> Callable[[str], Any]:
        """Make what makes a handler of a verb's name; `waits` marks those that may hold their thread for long, of which only so many may
        run at once."""
        return lambda name: partial(self._answer, name, request_type, verb, waits)

    def _answer(
        self, name: str, request_type: type[Message], verb: Callable[[Any, Deadline], Message], waits: bool, data: bytes, context: Any
    ) -> bytes:
        try:
            caller = self._access.caller(context)
            caller.require(name)
            request = request_type.decode(data)
            if isinstance(request, (HelloRequest, ByeRequest, LeftSessionRequest)):
                caller.require_seat(request.trainer)
            left_s = context.time_remaining()
            deadline = Deadline.after(_LONGEST_WAIT_S if left_s is None else min(left_s, _LONGEST_WAIT_S))
            reply = self._bounded(verb, request, deadline) if waits else verb(request, deadline)
            return Reply({}, reply.encode()).encode()
        except KvembError as error:
            return Reply(to_wire(error), b"").encode()
        except Exception as error:
            log.exception("%s failed because of an error of the parameter server itself", request_type.__name__)
            return Reply(to_wire(error), b"").encode()

    def _bounded(self, verb: Callable[[Any, Deadline], Message], request: Message, deadline: Deadline) -> Message:
        if not self._waiting.acquire(blocking=False):
            raise ShardUnavailableError(f"{MAX_WAITING_CALLS} flushes, assigns, erases, saves and repairs are waiting already; try again")
        try:
            return verb(request, deadline)
        finally:
            self._waiting.release()

    def _push(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            caller = self._access.caller(context)
            caller.require("Push")
        except AccessDeniedError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        stream = self._handlers.open_stream(requests, caller.require_seat)
        try:
            self._streams.enter(stream.answers, context.peer())
        except ShardUnavailableError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        try:
            if context.add_callback(stream.cancel):
                yield from stream.replies()
                if stream.unavailable:
                    context.abort(grpc.StatusCode.UNAVAILABLE, stream.unavailable)
        finally:
            self._streams.leave(stream.answers)
