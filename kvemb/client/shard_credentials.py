"""What a gRPC channel to a shard is opened with: nothing, a certificate, or a token over TLS."""

import grpc

from kvemb.net.tls_files import TlsFiles
from kvemb.net.tls_probe import own_uris

_Options = tuple[tuple[str, object], ...]


def open_channel(address: str, tls: TlsFiles | None, options: _Options) -> grpc.Channel:
    """Open a channel; gRPC connects it when it is first used.

    Args:
        address: "host:port".
        tls: the files as they are now; None: without encryption.
        options: of gRPC.

    Raises:
        ConfigError: a file cannot be read; a client lacks certificate and token, or its certificate is not good.
    """
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    if tls.config.has_token:
        credentials = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(tls.read("ca")), grpc.access_token_call_credentials(tls.tokens()[0])
        )
    else:
        tls.require_own("a client that has no token (token_env, token_file)")
        own_uris(tls.config, tls.at)  # what shards would refuse is said here, at once
        credentials = grpc.ssl_channel_credentials(tls.read("ca"), tls.read("key"), tls.read("cert"))
    return grpc.secure_channel(address, credentials, options=options)
