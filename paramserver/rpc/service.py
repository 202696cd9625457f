"""The gRPC shell: bytes in, bytes out, one handler per method of `kvemb.protocol.messages`. Decides nothing itself.

Unary replies are always a `Reply`: errors travel in it with their type. No protobuf except gRPC's own health service.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvemb.errors import AccessDeniedError, KvembError, ParameterServerError, ShardStartingError, ShardUnavailableError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES, Message
from kvemb.protocol.messages import MAX_REQUEST_BYTES, SERVICE, ByeRequest, HelloRequest, Reply, StatusReply
from kvemb.protocol.move_messages import LeftSessionRequest
from kvemb.protocol.roles import Caller

from ..recovery.start_report import StartReport
from .access_control import AccessControl
from .feed_streams import MAX_FEEDS, FeedStreams
from .handlers import Handlers
from .push_streams import MAX_STREAMS, PushReceiver, Streams, connection_options

MAX_WAITING_CALLS = 48
LIVE = "live"
"""The name under which gRPC's health service says that the process is there, also while it takes no pushes."""
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

OpenStream = Callable[[Iterator[bytes], Callable[[str], None]], PushReceiver]


class _Verb(NamedTuple):
    """A verb, and whether it may hold its thread for long: only so many of those may run at once."""

    request_type: type[Message]
    call: Callable[[Any, Deadline], Message]
    waits: bool


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """A gRPC server around a shard's handlers. It listens as soon as it is made, and until it is opened says how far the start is."""

    def __init__(self, listen: str, access: AccessControl, shard: int, report: StartReport) -> None:
        self._access, self._shard, self._report = access, shard, report
        self._open_stream: OpenStream | None = None
        self._feeds: FeedStreams | None = None
        self._verbs: Mapping[str, _Verb] = {}
        self._streams = Streams()
        self._waiting = threading.BoundedSemaphore(MAX_WAITING_CALLS)
        n_threads = MAX_STREAMS + MAX_FEEDS + MAX_WAITING_CALLS + _SPARE_THREADS
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="kvemb-rpc")
        self._server = grpc.server(self._threads, options=(*_OPTIONS, *connection_options(), *access.options))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((self,))
        try:
            port = access.listen(self._server, listen)
        except RuntimeError as error:
            raise ParameterServerError(f"cannot listen on {listen}: is another process there, or is it no address of this host?") from error
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        self._server.start()
        self.set_serving(False)

    def open(self, handlers: Handlers) -> None:
        self._open_stream, self._feeds = handlers.open_stream, handlers.feeds
        self._verbs = _verbs(handlers)
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        """Set the health service's answers: for `LIVE` that the process is there, for other names whether it takes pushes."""
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            self._health.set(name, states.SERVING if serving else states.NOT_SERVING)
        self._health.set(LIVE, states.SERVING)

    def stop(self, grace_s: float) -> None:
        """End every call, those still under way after the grace time by force, and the threads."""
        self._health.enter_graceful_shutdown()
        self._streams.end_idle()  # trainers keep them open; their end need not be waited for
        if self._feeds is not None:
            self._feeds.close()
        self._server.stop(grace_s).wait()
        self._threads.shutdown(wait=True)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call; gRPC asks for each. None: there is no such method."""
        service, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if service != SERVICE:
            return None
        if name == "Push":
            return grpc.stream_stream_rpc_method_handler(self._push)
        if name == "Feed":
            return grpc.unary_stream_rpc_method_handler(self._feed)
        return grpc.unary_unary_rpc_method_handler(partial(self._answer, name)) if name in self._verbs or not self._verbs else None

    def _answer(self, name: str, data: bytes, context: Any) -> bytes:
        try:
            caller = self._access.caller(context)
            caller.require(name)
            if not self._verbs:
                return Reply({}, self._status_of_start(name).encode()).encode()
            request_type, verb, waits = self._verbs[name]
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
            log.exception("%s failed because of an error of the parameter server itself", name)
            return Reply(to_wire(error), b"").encode()

    def _status_of_start(self, name: str) -> StatusReply:
        """All that is answered before the shard serves."""
        if name != "Status":
            raise self._starting()
        return StatusReply(self._shard, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, "", starting=str(self._report))

    def _starting(self) -> ShardStartingError:
        return ShardStartingError(f"shard {self._shard} is starting: {self._report}")

    def _bounded(self, verb: Callable[[Any, Deadline], Message], request: Message, deadline: Deadline) -> Message:
        if not self._waiting.acquire(blocking=False):
            raise ShardUnavailableError(f"{MAX_WAITING_CALLS} flushes, assigns, erases, saves and repairs are waiting already; try again")
        try:
            return verb(request, deadline)
        finally:
            self._waiting.release()

    def _push(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Return the replies of a push stream; an abort raises."""
        caller = self._let_in("Push", context)
        assert self._open_stream is not None
        return self._streams.serve(self._open_stream(requests, caller.require_seat), context)

    def _feed(self, data: bytes, context: Any) -> Iterator[bytes]:
        """Return the replies of a subscriber's stream; an abort raises."""
        self._let_in("Feed", context)
        assert self._feeds is not None
        return self._feeds.serve(data, context)

    def _let_in(self, name: str, context: Any) -> Caller:
        """Return the caller of a stream; the call ends here unless it may be served."""
        try:
            caller = self._access.caller(context)
            caller.require(name)
        except AccessDeniedError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if self._open_stream is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(self._starting()))
        return caller


def _verbs(handlers: Handlers) -> dict[str, _Verb]:
    """Return every verb but Push; its request is the one that its handler is annotated with."""
    tables, inspection = handlers.tables, handlers.inspection
    moves, checkpoints = handlers.moves, handlers.checkpoints
    at_once: dict[str, Callable[[Any, Deadline], Message]] = {
        "Hello": handlers.hello,
        "Describe": handlers.describe,
        "GetTable": handlers.get_table,
        "Count": handlers.count,
        "Step": handlers.step,
        "Ids": handlers.ids,
        "Status": handlers.status,
        "Progress": handlers.progress,
        "Bye": handlers.bye,
        "SaveStatus": checkpoints.status,
        "SampleIds": inspection.sample_ids,
        "Watermarks": moves.watermarks,
        "LeftSessions": moves.left_sessions,
        "MoveNews": moves.news,
        "LeftSession": moves.left_session,
    }
    that_wait: dict[str, Callable[[Any, Deadline], Message]] = {
        "CreateTable": handlers.create_table,
        "SetPolicies": handlers.set_policies,
        "DropTable": tables.begin_drop,
        "EraseTable": tables.erase,
        "EndDrop": tables.end_drop,
        "AlterTable": tables.alter,
        "FollowAlter": tables.follow_alter,
        "Assign": handlers.assign,
        "Erase": handlers.erase,
        "Flush": handlers.flush,
        "Save": checkpoints.save,
        "Load": checkpoints.load,
        "Compare": handlers.compare,
        "Repair": handlers.repair,
        "ShowRow": inspection.show_row,
        "Examine": inspection.examine,
        "Evictions": inspection.evictions,
        "MoveSlots": moves.begin,
        "ReplaceNode": moves.replace_node,
        "AbortMove": moves.abort,
        "MoveStatus": moves.status,
        "SlotSizes": moves.slot_sizes,
        "SlotEntries": moves.slot_entries,
    }
    return {name: _Verb(get_type_hints(call)["request"], call, name in that_wait) for name, call in (*at_once.items(), *that_wait.items())}
