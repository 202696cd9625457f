"""The gRPC shell: bytes in, bytes out, one handler per verb. Decides nothing itself.

Unary replies are always a `Reply`: errors travel in it with their type. No protobuf except gRPC's own health service.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvemb.errors import AccessDeniedError, KvembError, ParameterServerError, ShardStartingError, ShardUnavailableError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES, Message
from kvemb.protocol.messages import (
    GET_STATUS,
    MAX_REQUEST_BYTES,
    PUSH,
    SERVICE,
    ByeRequest,
    HelloRequest,
    LeftSessionRequest,
    Reply,
    StatusReply,
)
from kvemb.protocol.roles import Caller
from kvemb.protocol.verb import Verb

from ..capability import MAX_SUBSCRIBERS, Stream
from ..recovery.start_report import StartReport
from .access_control import AccessControl
from .handlers import Answer, Answers
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


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """A gRPC server around a shard's handlers. It listens as soon as it is made, and until it is opened says how far the start is."""

    def __init__(self, listen: str, access: AccessControl, shard: int, report: StartReport, verbs: Mapping[str, Verb[Any, Any]]) -> None:
        self._access, self._shard, self._report, self._verbs = access, shard, report, verbs
        self._open_stream: OpenStream | None = None
        self._answers: Answers | None = None
        self._subscribed: Mapping[Verb[Any, Any], Stream] = {}
        self._streams = Streams()
        self._waiting = threading.BoundedSemaphore(MAX_WAITING_CALLS)
        n_threads = MAX_STREAMS + MAX_SUBSCRIBERS + MAX_WAITING_CALLS + _SPARE_THREADS
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

    def open(self, open_stream: OpenStream, answers: Answers, subscribed: Mapping[Verb[Any, Any], Stream]) -> None:
        self._answers, self._subscribed, self._open_stream = answers, subscribed, open_stream
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
        self._server.stop(grace_s).wait()
        self._threads.shutdown(wait=True)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call; gRPC asks for each. None: there is no such method."""
        service, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if service != SERVICE:
            return None
        verb = self._verbs.get(name)
        if verb is PUSH:
            return grpc.stream_stream_rpc_method_handler(self._push)
        if verb is not None and verb.streams:
            return grpc.unary_stream_rpc_method_handler(partial(self._subscribe, verb))
        return None if verb is None else grpc.unary_unary_rpc_method_handler(partial(self._answer, verb))

    def _answer(self, verb: Verb[Any, Any], data: bytes, context: Any) -> bytes:
        try:
            caller = self._access.caller(context)
            caller.require(verb)
            if self._answers is None:
                return Reply({}, self._status_of_start(verb).encode()).encode()
            answer, request = self._answers[verb], verb.request.decode(data)
            if isinstance(request, (HelloRequest, ByeRequest, LeftSessionRequest)):
                caller.require_seat(request.trainer)
            left_s = context.time_remaining()
            deadline = Deadline.after(_LONGEST_WAIT_S if left_s is None else min(left_s, _LONGEST_WAIT_S))
            reply = self._bounded(answer, request, deadline) if verb.waits else answer(request, deadline)
            return Reply({}, reply.encode()).encode()
        except KvembError as error:
            return Reply(to_wire(error), b"").encode()
        except Exception as error:
            log.exception("%s failed because of an error of the parameter server itself", verb.name)
            return Reply(to_wire(error), b"").encode()

    def _status_of_start(self, verb: Verb[Any, Any]) -> StatusReply:
        """All that is answered before the shard serves."""
        if verb is not GET_STATUS:
            raise self._starting()
        return StatusReply(self._shard, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, "", starting=str(self._report))

    def _starting(self) -> ShardStartingError:
        return ShardStartingError(f"shard {self._shard} is starting: {self._report}")

    def _bounded(self, answer: Answer, request: Message, deadline: Deadline) -> Message:
        if not self._waiting.acquire(blocking=False):
            raise ShardUnavailableError(f"{MAX_WAITING_CALLS} flushes, assigns, erases, saves and repairs are waiting already; try again")
        try:
            return answer(request, deadline)
        finally:
            self._waiting.release()

    def _push(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Return the replies of a push stream; an abort raises."""
        caller = self._let_in(PUSH, context)
        assert self._open_stream is not None
        return self._streams.serve(self._open_stream(requests, caller.require_seat), context)

    def _subscribe(self, verb: Verb[Any, Any], data: bytes, context: Any) -> Iterator[bytes]:
        """Return the replies of a subscriber's stream; an abort raises."""
        self._let_in(verb, context)
        return self._subscribed[verb](data, context)

    def _let_in(self, verb: Verb[Any, Any], context: Any) -> Caller:
        """Return the caller of a stream; the call ends here unless it may be served."""
        try:
            caller = self._access.caller(context)
            caller.require(verb)
        except AccessDeniedError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if self._open_stream is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(self._starting()))
        return caller
