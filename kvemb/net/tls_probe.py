"""Looks at certificates and ports with the standard library alone: the names in our own, those that others show, why a connection fails.

gRPC tells neither. Nothing here is on a data path.
"""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvemb.errors import ConfigError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.name_lookup import connect_timeout_s, host_and_port
from kvemb.net.tls_config import TlsConfig

_FAULTS = {10: "expired", 9: "not yet valid", 62: "names", 64: "names", 26: "purpose"}
"""OpenSSL's numbers (X509_V_ERR_…) of a certificate's faults."""


def own_uris(config: TlsConfig, at: str, *, server: bool = False) -> tuple[str, ...]:
    """Return the URIs among the alternative names of this process's certificate; none where it has none.

    It shows the certificate to itself, in memory. So a fault that a peer would refuse is told here, where it can be mended.
    """
    if not config.own:
        return ()
    try:
        shown = _shown_to_itself(config, server=server)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{at}.cert: {config.cert}: not good with {at}.ca ({config.ca or 'of the system'}): {error.verify_message}"
        ) from error
    except (ssl.SSLError, OSError) as error:
        why = error.strerror or error
        raise ConfigError(f"{at}: {', '.join(filter(None, (config.ca, *config.own)))}: cannot be used: {why}") from error
    return _uris_of(shown)


@dataclass(frozen=True)
class SeenCertificate:
    """The result of a look at a certificate."""

    # "" where it is good; "expired", "not yet valid", "names", "purpose", "untrusted"; "no tls" (no handshake came about), "files" (our own
    # cannot be used), "nobody" (no connection)
    fault: str = ""
    why: str = ""  # the fault in words
    ends: str = ""  # when its time is over, in words; "" where nothing could be seen
    ends_s: float = 0.0  # the same as a time of day
    uris: tuple[str, ...] = ()  # among its alternative names


def look_at(address: str, config: TlsConfig, deadline: Deadline) -> SeenCertificate:
    """Return the certificate that a server shows, by a connection to it."""
    try:
        with _connection(address, config, deadline) as sock:
            return _seen(dict(sock.getpeercert() or {}))
    except ssl.SSLError as error:
        return _faulty(error, "no tls")
    except (OSError, NodeUnavailableError) as error:
        return SeenCertificate("nobody", str(error))


NOBODY, SILENT, HANGS_UP, SPEAKS_TLS, GREETS, FOREIGN = "nobody", "silent", "hangs up", "tls", "greets", "foreign"
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and settings, none of them
_SETTINGS, _ALERT = 4, 21  # the types of HTTP/2's frame and of TLS's record
_TLS_ANSWERS = (bytes([_ALERT]), bytes([22]))  # a refusal, or the next word of the handshake


def look_at_port(address: str, deadline: Deadline) -> str:
    """Return what a shard's port answers to gRPC's greeting without TLS.

    Returns:
        NOBODY: no connection. SILENT: one without an answer, as of a process that was stopped, or hangs. GREETS: as gRPC does. SPEAKS_TLS:
        it answers TLS's greeting, not ours. HANGS_UP: neither, as of a proxy whose server is gone. FOREIGN: other bytes.
    """
    try:
        with socket.create_connection(host_and_port(address, deadline), timeout=connect_timeout_s(deadline)) as plain:
            try:
                plain.sendall(_HTTP2_PREFACE)
                plain.settimeout(max(0.001, deadline.remaining_s()))
                said = plain.recv(5)
            except TimeoutError:
                return SILENT
            except OSError:
                said = b""
    except ConnectionResetError:  # taken, and ended before this thread came to see the first of it
        said = b""
    except (OSError, NodeUnavailableError):
        return NOBODY
    if said[3:4] == bytes([_SETTINGS]):
        return GREETS
    if not said:
        return SPEAKS_TLS if _answers_tls(address, deadline) else HANGS_UP
    return SPEAKS_TLS if said[0] == _ALERT else FOREIGN


def _answers_tls(address: str, deadline: Deadline) -> bool:
    """Whether a server knows the greeting of TLS, whatever certificate it shows or asks for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    greeting = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), greeting).do_handshake()
    try:
        with socket.create_connection(host_and_port(address, deadline), timeout=connect_timeout_s(deadline)) as plain:
            plain.sendall(greeting.read())
            return plain.recv(1) in _TLS_ANSWERS
    except (OSError, NodeUnavailableError):
        return False


def look_at_own(config: TlsConfig, *, server: bool = False) -> SeenCertificate:
    """Return the certificate that this process shows as a client, or as a server, by a handshake with itself."""
    try:
        return _seen(_shown_to_itself(config, server=server))
    except ssl.SSLError as error:
        return _faulty(error, "files")
    except OSError as error:
        return SeenCertificate("files", str(error))


def _seen(shown: dict[str, Any]) -> SeenCertificate:
    ends = str(shown.get("notAfter", ""))
    return SeenCertificate("", "", ends, ssl.cert_time_to_seconds(ends) if ends else 0.0, _uris_of(shown))


def _faulty(error: ssl.SSLError, otherwise: str) -> SeenCertificate:
    if isinstance(error, ssl.SSLCertVerificationError):
        return SeenCertificate(_FAULTS.get(error.verify_code, "untrusted"), error.verify_message)
    return SeenCertificate(otherwise, str(error.reason or error).lower().replace("_", " "))


def _uris_of(shown: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "URI")


def why_refused(address: str, config: TlsConfig, at: str, deadline: Deadline) -> str:
    """Return why no TLS connection to a server of ours comes about, as far as a connection of our own shows; "" for no reason."""
    try:
        own_uris(config, at)
        with _connection(address, config, deadline) as sock:
            ended = sock.recv(1) == b""  # the server's refusal of our certificate comes after the handshake
    except (ConfigError, NodeUnavailableError) as error:
        return str(error)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not good with {at}.ca ({config.ca or 'of the system'}): {error.verify_message}"
    except ssl.SSLError as error:
        return f"TLS: {error.reason or error}: does the other side speak TLS, and take this certificate?"
    except OSError:  # no connection, or no answer: no matter of certificates
        return ""
    if not ended:
        return ""
    if not config.own:
        return f"it asks for a certificate, and this process has none ({at}.cert, {at}.key).{config.lacks}"
    return f"it does not take the certificate {config.cert}: is its {at}.ca of the same authority, and neither expired?"


@contextmanager
def _connection(address: str, config: TlsConfig, deadline: Deadline) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=config.ca)
    if config.own:
        context.load_cert_chain(*config.own)
    context.set_alpn_protocols(["h2"])  # gRPC's protocol; others do not ask
    endpoint = host_and_port(address, deadline)
    with (
        socket.create_connection(endpoint, timeout=connect_timeout_s(deadline)) as plain,
        _wrapped(plain, context, endpoint[0]) as sock,
    ):
        yield sock


def _wrapped(plain: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    plain.getpeername()  # fails where the server has reset it by now; so does wrap_socket, which then leaves it open
    return context.wrap_socket(plain, server_hostname=host)


def _shown_to_itself(config: TlsConfig, *, server: bool) -> dict[str, Any]:
    """Run a handshake in memory in which one side shows our certificate to the other; return it, as `ssl.SSLSocket.getpeercert` does."""
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    looking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if server else ssl.PROTOCOL_TLS_SERVER)
    (looking if server else shown).check_hostname = False
    if not server:
        shown.verify_mode = ssl.CERT_NONE
        looking.load_cert_chain(*config.own)  # a server has to have one
    shown.load_cert_chain(*config.own)
    looking.verify_mode = ssl.CERT_REQUIRED
    if config.ca is None:
        looking.load_default_certs(ssl.Purpose.SERVER_AUTH if server else ssl.Purpose.CLIENT_AUTH)
    else:
        looking.load_verify_locations(config.ca)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [looking.wrap_bio(there, back, server_side=not server), shown.wrap_bio(back, there, server_side=server)]
    for _ in range(4):  # as many turns as a handshake has
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(sides[0].getpeercert() or {})
