"""The verb `kvemb publish`: a copy of tables' weights in another server, kept until the command is ended."""

import argparse
import logging
import os

from kvemb.api import connect
from kvemb.commands.server_url import given_server
from kvemb.config import Config, load
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
    storage, encrypted = given_server("--to", url, password_env)
    (address,) = storage.nodes
    tls = (config.storage.tls or TlsConfig()) if encrypted else None
    if tls is None and not is_loopback(address):
        log.warning("rows go to %s in the clear; rediss:// encrypts them", address)
    return ProjectionTarget(address, RedisAccess(storage, connector_of(tls)), share)
