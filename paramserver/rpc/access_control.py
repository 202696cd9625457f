"""Access to a shard's verbs: TLS for the server's port, and the caller's certificate or token at every call.

`kvemb.protocol.roles` says how a caller's role is known, and which verbs it may call.
"""

import hmac
import logging
from typing import Any

import grpc

from kvemb.config import Config
from kvemb.errors import AccessDeniedError, ConfigError
from kvemb.net.tls_files import Stamp, TlsFiles
from kvemb.net.tls_probe import own_uris
from kvemb.protocol.roles import ANYBODY, Caller, caller_of
from kvemb.protocol.verb import SHARD

# A connection lives no longer than this, so that a certificate that is no longer good has an end, too. Streams are opened again by their
# trainers, and nothing is lost.
MAX_CONNECTION_AGE_S = 1800
_AGE_GRACE_S = 30
_BEARER = "Bearer "
log = logging.getLogger("paramserver")


class AccessControl:
    """How a shard's port is protected. Thread-safe."""

    def __init__(self, tls: TlsFiles | None, cluster: str) -> None:
        self._tls, self._cluster = tls, cluster
        self._served: Stamp = ()
        self._tokens: tuple[str, ...] = ()
        self._tokens_of: Stamp = ()
        if tls is None:
            return
        tls.require_own("a shard")
        uris = own_uris(tls.config, tls.at, server=True)
        if not any(role == SHARD for role, _ in caller_of(uris, cluster).grants):
            raise ConfigError(
                f"{tls.at}.cert: {tls.config.cert}: is not of a shard of cluster {cluster!r}: its alternative names say "
                f"{', '.join(uris) or 'no URI'}, expected kvemb://{cluster}/shard/…"
            )
        if tls.config.has_token:
            tls.tokens()

    @staticmethod
    def of(config: Config) -> "AccessControl":
        """Return the access control of a kvemb.yaml."""
        tls = config.servers.tls
        return AccessControl(None if tls is None else TlsFiles(tls, "parameter_servers.tls"), config.cluster)

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """gRPC's options for the server."""
        if self._tls is None:
            return ()
        return (
            ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_S * 1000),
            ("grpc.max_connection_age_grace_ms", _AGE_GRACE_S * 1000),
        )

    def listen(self, server: Any, address: str) -> int:
        """Have a gRPC server listen; return the port."""
        if self._tls is None:
            return int(server.add_insecure_port(address))
        if self._tls.config.has_token:
            log.warning("a client with the token of %s may do everything, as any trainer; certificates tell roles apart", self._tls.at)
        configuration = self._configuration()
        self._served = self._tls.stamp()
        needed = not self._tls.config.has_token
        return int(server.add_secure_port(address, grpc.dynamic_ssl_server_credentials(configuration, self._renewed, needed)))

    def caller(self, context: Any) -> Caller:
        """Return the caller."""
        if self._tls is None:
            return ANYBODY
        if self._tls.config.has_token:
            shown = dict(context.invocation_metadata()).get("authorization", "")
            if not self._is_good(shown.removeprefix(_BEARER)):
                raise AccessDeniedError(
                    f"the token {'is not one of this shard' if shown else 'is missing'}; set {self._tls.at}.token_env or token_file"
                )
            return ANYBODY
        uris = [uri.decode("utf-8", "replace") for uri in context.auth_context().get("peer_uri", ())]
        return caller_of(uris, self._cluster)

    def _is_good(self, shown: str) -> bool:
        assert self._tls is not None
        if (stamp := self._tls.stamp()) != self._tokens_of:
            try:
                self._tokens, self._tokens_of = self._tls.tokens(), stamp
            except ConfigError as error:  # in the middle of its renewal: those before are good until it is read
                log.error("%s", error)
        return any([hmac.compare_digest(shown.encode(), token.encode()) for token in self._tokens])

    def _configuration(self) -> Any:
        assert self._tls is not None
        pairs = [(self._tls.read("key"), self._tls.read("cert"))]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=self._tls.read("ca"))

    def _renewed(self) -> Any:
        """gRPC asks before every handshake; None: nothing has changed. Where files do not fit together, the old ones stay in force."""
        assert self._tls is not None
        if (stamp := self._tls.stamp()) == self._served:
            return None
        try:
            own_uris(self._tls.config, self._tls.at, server=True)
            renewed = self._configuration()
        except ConfigError as error:
            log.error("the certificate was changed and cannot be used; the one before stays in force: %s", error)
            return None
        self._served = stamp
        log.info("the certificate was renewed from %s", self._tls.config.cert)
        return renewed
