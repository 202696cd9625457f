"""The verbs `kvemb publish`, a copy of tables' weights in another server that is kept as they are, and `kvemb view`, copies that stay."""

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvemb.api import Cluster, connect
from kvemb.config import Config, load
from kvemb.errors import ConfigError, n_of
from kvemb.projection.projected_rows import SlotShare
from kvemb.projection.projection_target import ProjectionTarget, TargetUrl
from kvemb.projection.publisher import Projection, Publisher
from kvemb.projection.views import COMPLETE, LIVE, MOST_DENSE_BYTES, DenseFile, TargetViews, View
from kvemb.stores.redis_server.redis_login import RedisAccess


def publish_command(args: argparse.Namespace) -> int:
    """Publish until the command is ended."""
    config = load(args.config, os.environ)
    projection = Projection(_tables(args), args.dtype, args.layout, SlotShare.parse(args.part))
    target = ProjectionTarget(*_reached(args, config), projection.share)
    _publisher(projection, target, lambda: connect(args.config), config).run()
    return 0


def view_command(args: argparse.Namespace) -> int:
    """Make a view, have readers follow one, list them, or delete one."""
    if args.action == "create":
        return _create(args)
    encrypted = TargetUrl.parse(args.to, ()).encrypted
    views = TargetViews(*_reached(args, load(args.config, os.environ) if encrypted else None))
    if args.action == "use":
        views.use(args.name)
        print(f"{args.name} is in use")
    elif args.action == "drop":
        views.drop(args.name)
        print(f"view {args.name} is deleted")
    else:
        found = views.read()
        for view in sorted(found.views.values(), key=lambda view: view.number):
            print(_line(view, in_use=found.in_use == view.name))
        if found.in_use == LIVE:
            print("no view is in use: readers follow what `kvemb publish` maintains there")
    return 0


def _create(args: argparse.Namespace) -> int:
    config, tables = load(args.config, os.environ), _tables(args)
    content, dense = _dense(args.model)
    views = TargetViews(*_reached(args, config))
    view = views.begin(args.name, tables, args.dtype, dense)
    if view.state != COMPLETE:
        until_s = time.time()
        target = views.target(view)

        def opened() -> Cluster:
            views.require_building(view)  # dropped meanwhile, its rows would stay for ever
            return connect(args.config)

        _publisher(Projection(tables, args.dtype), target, opened, config).run(until_s)
        try:
            views.complete(view, target, content, until_s)
        finally:
            target.close()
    print(_line(views.read().views[args.name], in_use=False))
    return 0


def _publisher(projection: Projection, target: ProjectionTarget, opened: Callable[[], Cluster], config: Config) -> Publisher:
    report: Callable[[str], None] = lambda line: print(line, flush=True)  # noqa: E731
    return Publisher(projection, target, opened, patience_s=config.servers.away_timeout_s, report=report)


def _dense(path: str) -> tuple[bytes, DenseFile | None]:
    """Read the dense file; its content, and what is noted of it."""
    if not path:
        return b"", None
    try:
        size = os.path.getsize(path)
        if not 0 < size <= MOST_DENSE_BYTES:
            raise ConfigError(f"--model {path}: has {n_of(size, 'byte')}; a dense file of 1 byte to {MOST_DENSE_BYTES >> 30} GiB fits")
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--model {path}: cannot be read: {error.strerror}") from error
    return content, DenseFile(Path(path).name, len(content), hashlib.sha256(content).hexdigest())


def _line(view: View, *, in_use: bool) -> str:
    dense = f"dense {view.dense.name} ({view.dense.size_bytes:,} bytes)" if view.dense else "no dense file"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.until))
    state = f"as of {at}" if view.state == COMPLETE else f"not whole ({view.state})"
    return f"view {view.name}: tables {','.join(view.tables)} as {view.dtype}, {dense}, {state}{', in use' if in_use else ''}"


def _tables(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name for name in args.tables.split(",") if name)


def _reached(args: argparse.Namespace, config: Config | None) -> tuple[str, RedisAccess]:
    url = TargetUrl.parse(args.to, ())
    return url.address, url.access(os.environ, args.password_env, config.storage.tls if config else None)
