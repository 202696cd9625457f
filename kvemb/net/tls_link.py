"""Links that encrypt: TLS over the non-blocking sockets of `link`, and their `Connect`. A link's user need not know which kind it is.

TLS keeps bytes of its own. It may have deciphered more than was asked for, which no poll reports: `receive` therefore reads until TLS has
no more, or the buffer is full, and `pending` says which. And it may have to write in order to read, or to read in order to write (new
keys, a new handshake): `wants_write` and `waits_to_read` tell a poll so.
"""

import select
import ssl

from kvemb.errors import ConfigError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Connect, Link, connect_link, connect_socket
from kvemb.net.tls_config import TlsConfig
from kvemb.net.tls_files import Stamp, TlsFiles

_HANDSHAKE_S = 5.0  # longer than TCP's greeting may take: the other side computes
_SEND_BYTES = 256 << 10
_TRUST = "is storage.tls.ca of the authority that signed it, and its name or address among the certificate's?"


class TlsLink(Link):
    """A connection over TLS, after its handshake."""

    HIDDEN_BYTES = (16 << 10) + 512
    """A record of which the end has not come."""
    JOINED_BYTES = 0
    """A request has records of its own. memcached reads a value out of a record and then waits for the socket, though the record may hold
    further commands; it goes on when the next record comes."""
    sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, address: str, lacks: str = "") -> None:
        super().__init__(sock, address)
        self._heard, self._lacks = False, lacks

    @property
    def pending(self) -> int:
        """Bytes that TLS has deciphered and that were not received yet."""
        return self.sock.pending()

    def receive(self) -> int:
        """See `Link.receive`; takes all that TLS has, record by record of at most 16 KB, as far as there is room."""
        total = 0
        self.wants_write = False
        while True:
            try:
                count = super().receive()
            except NodeUnavailableError:
                if total:  # the end comes again with the next call; the bytes before it count
                    return total
                raise
            total += count
            self._heard |= count > 0
            if not count or not self.has_room:
                return total

    def _recv_into(self, room: memoryview) -> int | None:
        try:
            return self.sock.recv_into(room)
        except ssl.SSLWantWriteError:
            self.wants_write = True
        except ssl.SSLWantReadError:
            pass
        return None

    def send(self, data: memoryview) -> int:
        """See `Link.send`. Bytes that TLS has begun to send must be sent again unchanged. They are: callers go on where the count ends."""
        self.waits_to_read = False
        total = 0
        while total < len(data):
            try:
                count = self.sock.send(data[total : total + _SEND_BYTES])
            except ssl.SSLWantReadError:
                self.waits_to_read = True
                return total
            except ssl.SSLWantWriteError:
                return total
            except OSError as error:
                raise self._unavailable(error) from error
            total += count
        return total

    def _unavailable(self, error: OSError) -> NodeUnavailableError:
        # With TLS 1.3 the server looks at our certificate when the handshake is over for us, and may end the connection without a word.
        if not self._heard:
            return NodeUnavailableError(
                f"node {self.address}: ended the TLS connection before its first answer: {_reason(error)}. Does it ask for a certificate "
                f"(storage.tls.cert and key), of another authority, or is ours expired?{self._lacks}"
            )
        return super()._unavailable(error)


class TlsConnector:
    """Opens encrypted connections; a `Connect`. Thread- and fork-safe."""

    def __init__(self, config: TlsConfig) -> None:
        self._files = TlsFiles(config, "storage.tls")
        self._made: tuple[Stamp, ssl.SSLContext] | None = None

    def __call__(self, address: str, deadline: Deadline) -> Link:
        """Open a connection."""
        context = self._context()
        sock = connect_socket(address, deadline)
        host = address.rpartition(":")[0].strip("[]")
        try:
            sock.getpeername()  # fails where the node has reset it by now; so does wrap_socket, which then leaves it open
            sock = encrypted = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            encrypted.setblocking(False)
            _shake_hands(encrypted, deadline.within(_HANDSHAKE_S))
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise NodeUnavailableError(f"node {address}: its certificate is not trusted: {error.verify_message}; {_TRUST}") from error
        except OSError as error:
            sock.close()
            raise NodeUnavailableError(
                f"node {address}: no TLS connection: {_reason(error)}. Does it speak TLS at this port, and take this process's certificate?"
                f"{self._files.config.lacks}"
            ) from error
        except BaseException:
            sock.close()
            raise
        return TlsLink(encrypted, address, self._files.config.lacks)

    def _context(self) -> ssl.SSLContext:
        stamp = self._files.stamp()
        if self._made is None or self._made[0] != stamp:
            try:
                self._made = stamp, _new_context(self._files.config)
            except ConfigError:
                if self._made is None:  # else they are just being changed
                    raise
        return self._made[1]


def connector_of(config: TlsConfig | None) -> Connect:
    """Return the function that opens connections to storage nodes."""
    return connect_link if config is None else TlsConnector(config)


def _new_context(config: TlsConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if config.own:
            context.load_cert_chain(*config.own)
    except (ssl.SSLError, OSError) as error:
        files = ", ".join(filter(None, (config.ca, *config.own)))
        raise ConfigError(f"storage.tls: {files}: cannot be used: {_reason(error)}") from error
    return context


def _shake_hands(sock: ssl.SSLSocket, deadline: Deadline) -> None:
    poll = select.poll()
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            poll.register(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            poll.register(sock, select.POLLOUT)
        else:
            return
        if deadline.expired or not poll.poll(deadline.remaining_s() * 1000):
            raise TimeoutError(f"no answer to the handshake within {deadline.timeout_s:.3g} s")


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")
