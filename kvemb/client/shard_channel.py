"""One gRPC channel to one shard: unary calls, the push stream, and the one place where gRPC's errors become ours.

Errors that the shard reports travel inside the reply and are raised as their own class. What gRPC itself reports becomes
ShardUnavailableError or ParameterServerError, naming shard, address and verb. Thread-safe; not fork-safe (see `kvemb.client.all_shards`).
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic

import grpc

from kvemb.client import note_channel
from kvemb.errors import (
    AccessDeniedError,
    ConfigError,
    KvembError,
    MessageError,
    ParameterServerError,
    ShardStartingError,
    ShardUnavailableError,
    from_wire,
)
from kvemb.net.deadline import SAY_AFTER_S, Absence, Deadline, pauses
from kvemb.net.tls_files import Stamp, TlsFiles
from kvemb.net.tls_probe import FOREIGN, HANGS_UP, NOBODY, SILENT, SPEAKS_TLS, look_at_port, own_uris, why_refused
from kvemb.process import interrupts
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES
from kvemb.protocol.messages import GET_STATUS, MAX_REQUEST_BYTES, SERVICE, Empty, Reply
from kvemb.protocol.verb import Q, R, Verb

_Options = tuple[tuple[str, object], ...]


def open_channel(address: str, tls: TlsFiles | None, options: _Options) -> grpc.Channel:
    """Open a channel; gRPC connects it when it is first used."""
    note_channel()
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    if tls.config.has_token:
        credentials = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(tls.read("ca")), grpc.access_token_call_credentials(tls.tokens()[0])
        )
    else:
        tls.require_own("a client that has no token (token_env, token_file)")
        own_uris(tls.config, tls.at)  # a certificate that shards would refuse is named here, at once
        credentials = grpc.ssl_channel_credentials(tls.read("ca"), tls.read("key"), tls.read("cert"))
    return grpc.secure_channel(address, credentials, options=options)


_OPTIONS = (
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that says nothing any more is noticed within 25 s, however it went silent. Without its own time a ping is waited for for 60 s,
    # whatever the keepalive's says. Shards take one every 10 s.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # else no ping is sent after the second one while a long call waits
    ("grpc.keepalive_permit_without_calls", 0),  # an idle trainer sends nothing
    ("grpc.use_local_subchannel_pool", 1),  # two clusters opened in one process do not share sockets or their failures
    ("grpc.enable_http_proxy", 0),  # shards are cluster-internal addresses; a proxy of the environment is not for them
    ("grpc.enable_retries", 0),  # `Verb.repeatable` decides instead: a blind retry of assign could undo a later push
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # a pod that starts again has another address; gRPC would ask after 30 s
)
_LONGEST_WORDS = 4096
_GRACE_S = 5.0  # gRPC keeps the deadline itself; where it does not, gRPC has failed and not the shard
_STUCK = "gRPC did not end the call at its deadline; connect again"
_PROBE_S = 2.0
_GREETING_S = 0.5  # a server that lives greets at once
_SHUT = "No process listens there, or a firewall or a network policy shuts it off"
HANGS, LAST_WORDS = "A process has the port and says nothing", "It has ended; its last words"
log = logging.getLogger("kvemb")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class PendingCall(Generic[R]):
    """A unary call to a shard under way: gRPC's future, to be waited for, or called again where that is safe."""

    def __init__(self, channel: "ShardChannel", verb: Verb[Q, R], request: Q, deadline: Deadline) -> None:
        self._channel, self._verb, self._method, self._request, self._deadline = channel, verb, verb.name, request.encode(), deadline
        self._closed = False
        self._future = self._send()

    def result(self) -> R:
        """Wait for the answer; a verb that may be repeated is, while the shard goes away and comes back.

        Raises:
            ShardUnavailableError: none came within the deadline; the request may have been carried out.
        """
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                reply = self._verb.reply.decode(self._answer())
                if self._verb is not GET_STATUS:  # which a shard that starts answers, too
                    self._channel.back()
                return reply
            except ShardStartingError as error:  # nothing was taken, whatever it is
                self._channel.away(str(error))
                if self._deadline.remaining_s() <= pause_s:
                    raise
            except ShardUnavailableError:
                if not self._verb.repeatable or self._closed or self._deadline.remaining_s() <= pause_s:
                    raise
            time.sleep(pause_s)
            self._future = self._send()
        raise AssertionError("unreachable")

    def _send(self) -> Any:
        timeout_s = self._deadline.remaining_s()
        self._sent_s, self._looked = time.monotonic(), False

        def begin() -> Any:
            return self._channel.unary(self._method).future(self._request, timeout=timeout_s, wait_for_ready=True)

        try:
            return interrupts.begin_off_main_thread(begin, timeout_s + _GRACE_S)
        except ValueError as error:
            raise self._over() from error
        except RuntimeError as error:
            self._closed = True
            self._channel.abandon()
            raise self._channel.unavailable(self._method, f"the interpreter is ending ({error})") from error

    def _over(self) -> ShardUnavailableError:
        self._closed = True
        return self._channel.unavailable(self._method, "the cluster was closed")

    def _answer(self) -> bytes:
        try:
            self.say_who_is_away()
            data = self._future.result(self._deadline.remaining_s() + _GRACE_S)
        except (grpc.FutureCancelledError, ValueError) as error:  # gRPC raises the latter for a closed channel
            raise self._over() from error
        except (grpc.FutureTimeoutError, TimeoutError) as error:
            raise self._channel.unavailable(self._method, _STUCK) from error
        except grpc.RpcError as error:
            raise self._channel.translate(error, self._method, self._deadline.timeout_s) from error
        if data is None:  # so says gRPC's Python layer of a call that ends well and without a message
            raise MessageError(f"{self._channel}: {self._method}: ended without an answer; is a kvemb shard at that address?")
        reply = Reply.decode(data)
        if reply.error:
            raise from_wire(reply.error)
        return reply.body

    def say_who_is_away(self) -> None:
        """Wait for a while since the call was sent; then say, once, that no process answers, or why the shard does not get on.

        The rest of the wait may be long.
        """
        left_s = max(0.0, self._sent_s + SAY_AFTER_S - time.monotonic())
        if not self._looked and self._deadline.remaining_s() > left_s:
            with suppress(grpc.FutureTimeoutError, TimeoutError):
                self._future.exception(left_s)
                return
            self._looked = True
            if look_at_port(self._channel.address, Deadline.after(_GREETING_S)) in (NOBODY, SILENT, HANGS_UP):
                self._channel.away(str(self._channel.unavailable(self._method, "no answer yet")), SAY_AFTER_S)
            elif self._verb is not GET_STATUS:
                self._channel.say_trouble(self._deadline)


class ShardChannel:
    """The connection to one shard; gRPC connects it when it is first used, and again whenever it broke."""

    def __init__(self, shard: int, address: str, last_words: Path | None = None, tls: TlsFiles | None = None) -> None:
        self.shard, self.address, self._last_words, self._tls = shard, address, last_words, tls
        self._renewing = threading.Lock()
        self._stamp: Stamp = () if tls is None else tls.stamp()
        self._channels = [open_channel(address, tls, _OPTIONS)]  # the last is in use; calls may be under way on the one before
        self._abandoned = False
        self.absence = Absence()

    def away(self, why: str, for_s: float = 0.0) -> None:
        """Record that the shard does not answer, starts, or does not get on, and say it once it has lasted: callers may wait for long."""
        if (lasted_s := self.absence.lasts(for_s)) is not None:
            log.warning("waiting for %.0f s; pulls go on: %s", lasted_s, why)

    def back(self) -> None:
        """Record that the shard answers; where it was said that it is waited for, that is said, too."""
        if (lasted_s := self.absence.over()) is not None:
            log.warning("%s goes on after %.0f s", self, lasted_s)

    def trouble(self, deadline: Deadline) -> str:
        """Why the shard does not get on, as it says itself; "" where it does, or does not answer."""
        with suppress(KvembError):
            reply = self.call(GET_STATUS, Empty(), deadline.within(_PROBE_S))
            return f"{self}: {reply.failure}" if reply.failure else ""
        return ""

    def say_trouble(self, deadline: Deadline) -> None:
        """Say, once, why a shard does not get on that answers, and has kept a caller waiting for `SAY_AFTER_S`."""
        if why := self.trouble(deadline):
            self.away(why, SAY_AFTER_S)

    def start(self, verb: Verb[Q, R], request: Q, deadline: Deadline) -> PendingCall[R]:
        """Send a unary request; it waits for a shard that is still starting, at most until the deadline."""
        return PendingCall(self, verb, request, deadline)

    def call(self, verb: Verb[Q, R], request: Q, deadline: Deadline) -> R:
        """Send a unary request and wait for its answer; see `PendingCall.result`."""
        return self.start(verb, request, deadline).result()

    def unary(self, method: str) -> Any:
        """Return gRPC's callable of a verb."""
        return self._channel().unary_unary(f"/{SERVICE}/{method}")

    def push_stream(self, parts: Iterator[bytes]) -> Any:
        """Open the push stream; iterating over the result gives encoded PushReplys, `cancel()` ends it."""
        return self._channel().stream_stream(f"/{SERVICE}/Push")(parts)

    def feed_stream(self, request: bytes) -> Any:
        """Open a subscriber's stream; iterating over the result gives encoded FeedReplys, `cancel()` ends it."""
        return self._channel().unary_stream(f"/{SERVICE}/Feed")(request)

    def translate(self, error: Any, method: str, timeout_s: float | None = None) -> ParameterServerError | MessageError:
        """Return our error for one of gRPC's."""
        code = error.code() if callable(getattr(error, "code", None)) else None
        name, details = getattr(code, "name", "UNKNOWN"), getattr(error, "details", lambda: str(error))()
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return AccessDeniedError(f"{self}: {details}")
        if code in _GONE:
            within = f" within {round(timeout_s, 1):g} s" if timeout_s is not None and code is grpc.StatusCode.DEADLINE_EXCEEDED else ""
            return self.unavailable(method, f"no answer{within} ({name}: {details})")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            limits = f"a shard takes {MAX_REQUEST_BYTES} bytes, and answers with {MAX_MESSAGE_BYTES}"
            return MessageError(f"{self}: {method}: a message is too large: {limits} ({details})")
        return ParameterServerError(f"{self}: {method} failed ({name}: {details}); look into the shard's log")

    def unavailable(self, method: str, why: str) -> ShardUnavailableError:
        """Return the error of a shard that cannot be reached."""
        return ShardUnavailableError(f"{self}: {method}: {why}. {self._why_silent()}")

    def _why_silent(self) -> str:
        """Describe the server at the address, as far as a connection of our own shows, and say the next step."""
        if self._tls is not None:
            refused = why_refused(self.address, self._tls.config, self._tls.at, Deadline.after(_PROBE_S))
            if refused:
                return refused
        heard = look_at_port(self.address, Deadline.after(_GREETING_S))
        if heard == SILENT:
            process = self._signed_by()
            return (
                f"{HANGS}{f' ({process})' if process else ''}: look at it (stopped? swapping? its disk?). If it does not come back, end "
                f"it (kill -9) and start the shard as always: `kvemb shard --shard {self.shard}`."
            )
        if heard == SPEAKS_TLS and self._tls is None:
            return "It speaks TLS there, and this kvemb.yaml does not say so: parameter_servers.tls."
        if heard in (NOBODY, HANGS_UP):
            there = _SHUT if heard == NOBODY else "Connections are taken and ended there, as by a proxy with no shard"
            return f"{there}{self._words_of_the_dead()}"
        if heard == FOREIGN:
            return "The server there is no shard: correct the address in kvemb.yaml."
        return "A process answers there, but not this in time: is it busy, and is this the shard's address in kvemb.yaml?"

    def _signed_by(self) -> str:
        """The process that has the shard's port, by its data folder if that is on this machine; "" where it is not known."""
        if self._last_words is not None:
            with suppress(OSError, ValueError):
                signature = (self._last_words.with_suffix("") / "lock").read_text(encoding="utf-8", errors="replace").strip()
                pid, _, host = signature.removeprefix("process ").partition(" on ")
                if host == os.uname().nodename:
                    os.kill(int(pid), 0)  # raises where it is gone: no operator is sent to end another program
                return signature
        return ""

    def _words_of_the_dead(self) -> str:
        if self._last_words is not None:
            with suppress(OSError):  # it ran elsewhere, or was killed
                words = self._last_words.read_bytes()[:_LONGEST_WORDS].decode(errors="replace")
                return f". {LAST_WORDS}, at {_clock_time(self._last_words)}: {words}"
        return ": start the shard (kvemb shard), or put its address right in kvemb.yaml."

    def abandon(self) -> None:
        """Leave the channel to the end of the process: gRPC could not start a thread, and closing would wait for it for ever."""
        self._abandoned = True
        interrupts.end_at_once()

    def close(self) -> None:
        """Close the channel; calls under way fail. Idempotent."""
        if not self._abandoned:
            for channel in self._channels:
                channel.close()

    def _channel(self) -> grpc.Channel:
        """The channel to use: a new one where certificate or token were renewed. Files that cannot be used leave the old one in use."""
        if self._tls is not None and self._tls.stamp() != self._stamp:
            with self._renewing, suppress(ConfigError):
                if (stamp := self._tls.stamp()) != self._stamp:
                    self._channels.append(open_channel(self.address, self._tls, _OPTIONS))
                    self._stamp = stamp
                    for channel in self._channels[:-2]:
                        channel.close()
                    del self._channels[:-2]
        return self._channels[-1]

    def __str__(self) -> str:
        return f"shard {self.shard} ({self.address})"


def _clock_time(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
