"""The verb `kvemb publish`: a copy of tables' weights in another server, kept until the command is ended."""

import argparse
import logging
import os
from urllib.parse import urlsplit

from kvemb.api import connect
from kvemb.config import Config, StorageConfig, load
from kvemb.errors import ConfigError
from kvemb.net.name_lookup import is_loopback
from kvemb.net.tls_config import TlsConfig
from kvemb.net.tls_link import connector_of
from kvemb.projection.projected_rows import SlotShare
from kvemb.projection.projection_target import ProjectionTarget
from kvemb.projection.publisher import Projection, Publisher
from kvemb.stores.redis_server.redis_login import RedisAccess

log = logging.getLogger("kvemb")


def publish_command(args: argparse.Namespace) -> int:
    """Publish until the command is ended."""
    config = load(args.config, os.environ)
    tables = tuple(name for name in args.tables.split(",") if name)
    projection = Projection(tables, args.dtype, args.layout, SlotShare.parse(args.part))
    target = _target(args.to, args.password_env, config, projection.share)
    publisher = Publisher(
        projection,
        target,
        lambda: connect(args.config),
        patience_s=config.servers.away_timeout_s,
        report=lambda line: print(line, flush=True),
    )
    publisher.run()


def _target(url: str, password_env: str, config: Config, share: SlotShare) -> ProjectionTarget:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.path.strip("/") or parts.query or parts.password is not None:
        raise ConfigError("--to: give redis://[USER@]HOST:PORT, or rediss://; --password-env names the variable that holds a password")
    if password_env and password_env not in os.environ:
        raise ConfigError(f"--password-env: the environment variable {password_env} is not set")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = f"{host}:{parts.port or 6379}"
    tls = (config.storage.tls or TlsConfig()) if parts.scheme == "rediss" else None
    if tls is None and not is_loopback(address):
        log.warning("rows go to %s in the clear; rediss:// encrypts them", address)
    storage = StorageConfig("redis", (address,), username=parts.username, password=os.environ.get(password_env))
    return ProjectionTarget(address, RedisAccess(storage, connector_of(tls)), share)
