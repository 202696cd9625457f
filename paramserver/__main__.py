"""The process of one shard: `kvemb shard --config kvemb.yaml --shard 0`, or `python -m paramserver` in a checkout.

Exit codes: 0 stopped after draining; 2 wrong configuration or options; 3 could not start (storage, journal, a data folder that cannot be
used). 4 stopped with accepted changes not applied; 5 another process has taken the shard over. The environment and the command line are
read here only. How the process writes its log is here, too.
"""

import argparse
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvemb.api.plaintext import require_encrypted
from kvemb.commands.verb_options import shard_options
from kvemb.config import Config, load
from kvemb.errors import ConfigError, KvembError, ParameterServerError
from kvemb.process import formatter_of, replace_atomically
from kvemb.process.interrupts import StopFlag
from kvemb.schema.cluster_map import ClusterMap

from .lifecycle.shard import Shard
from .lifecycle.start import start
from .recovery.join_cluster import StoppedError, kept_place
from .rpc.access_control import AccessControl
from .shard_process.data_dir import named

_CONFIG, _START, _NOT_DRAINED, _FENCED = 2, 3, 4, 5
_POLL_S = 0.1
_UNCLAIMED: dict[str, object] = {"epoch": None, "map_version": None, "plan": None}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one shard until SIGTERM or SIGINT; return the exit code."""
    args = shard_options().parse_args(argv)
    lines = LogLines(args.shard, json=args.log_format == "json", level=args.log_level)
    lines.begin()
    stop = StopFlag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return _run(args, load(args.config, os.environ), stop, lines)
    except StoppedError:
        return 0
    except ConfigError as error:
        return _say(lines, error, _CONFIG)
    except KvembError as error:
        return _say(lines, error, _START)
    finally:  # Python gives signals their default action back as it ends: a second one would take the exit code away
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _run(args: argparse.Namespace, config: Config, stop: StopFlag, lines: "LogLines") -> int:
    lines.named(config.cluster)
    servers = config.servers
    listen = args.listen or kept_place(Path(servers.data_dir), args.shard, servers.shards)
    if args.shard < 0 or not listen:
        raise ConfigError(
            f"--shard {args.shard}: parameter_servers.shards has {len(servers.shards)} entries, counted from 0, and none is this shard's, "
            f"as far as its folder in {servers.data_dir} says: give --listen host:port, as to a shard that is to join; kvemb shards shows "
            "which there are"
        )
    require_encrypted(config, listen)
    AccessControl.of(config)  # raises for unusable settings before anything is started
    if args.ready_file and not Path(args.ready_file).resolve().parent.is_dir():
        raise ConfigError(f"--ready-file {args.ready_file}: its folder does not exist")

    def wait(pause_s: float) -> None:
        if stop.wait(pause_s):
            raise StoppedError

    take_over, roll_back = args.take_over, args.roll_back
    while True:
        again = threading.Event()
        shard = start(
            config,
            args.shard,
            listen=listen,
            start_timeout_s=args.start_timeout,
            wait=wait,
            take_over=take_over,
            roll_back=roll_back,
            on_fenced=stop.set,
            on_load=again.set,
            on_claimed=lines.claimed,
        )
        listen, take_over, roll_back = shard.address, False, False
        if args.ready_file:
            _tell_ready(shard, Path(args.ready_file), args.drain_timeout)
        while not stop.wait(_POLL_S) and not again.is_set():
            pass
        if shard.fenced:
            lines.say(f"FencedError: {_one_line(shard.stop(0.0))}")
            return _FENCED
        logging.getLogger("paramserver").info("stopping: draining for at most %g s", args.drain_timeout)
        trouble = shard.stop(args.drain_timeout)
        if stop.is_set():
            break
        logging.getLogger("paramserver").info("starting again, to load a checkpoint%s", f"; not drained: {trouble}" if trouble else "")
        del shard
        gc.collect()  # its cache and index hang in cycles: else they would be there as long as the next one's
    if trouble:
        lines.say(f"not drained: {_one_line(trouble)} The state was not saved.")
        return _NOT_DRAINED
    return 0


def _tell_ready(shard: Shard, path: Path, drain_timeout_s: float) -> None:
    """Write the ready file; where that fails the shard stops again, since no other process would learn that it is ready."""
    try:
        with named("--ready-file", path):
            replace_atomically(path, [f"{shard.address}\n".encode()], temporary=f"{path.name}.tmp")
    except ParameterServerError:
        shard.stop(drain_timeout_s)
        raise


def _say(lines: "LogLines", error: KvembError, code: int) -> int:
    lines.say(f"{type(error).__name__}: {_one_line(str(error))}")
    return code


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


class LogLines(logging.Filter):
    """Adds ids to every line of the process; they become known as the shard starts."""

    def __init__(self, shard: int, *, json: bool, level: str) -> None:
        super().__init__()
        self._shard, self._json, self._level = shard, json, level
        self._cluster: str | None = None
        self._of_claim: Callable[[], dict[str, object]] = lambda: _UNCLAIMED

    def begin(self) -> None:
        """Write the log of this process to standard error from now on."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(self._formatter())
        handler.addFilter(self)
        logging.basicConfig(level=self._level.upper(), handlers=[handler])
        # They log a traceback for every header that is no text, and every call of the health service that is none: strangers could fill
        # the disk with them.
        for name in ("grpc._cython.cygrpc", "grpc._common"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def named(self, cluster: str) -> None:
        """Say the cluster's name in later lines."""
        self._cluster = cluster

    def claimed(self, epoch: Callable[[], int], now: Callable[[], ClusterMap]) -> None:
        """Say epoch and plan in later lines as they are then: a shard that takes slots over rises in its epoch."""
        self._of_claim = lambda: _ids(epoch(), now())

    def say(self, text: str) -> None:
        """Write why the process ends: a line of the log where that is JSON, otherwise the text alone."""
        if self._json:
            logging.getLogger("paramserver").error("%s", text)
        else:
            print(text, file=sys.stderr)

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record).update(cluster=self._cluster, shard=self._shard, **self._of_claim())  # as `extra` of a log call does
        return True

    def _formatter(self) -> logging.Formatter:
        if not self._json:
            return logging.Formatter("%(asctime)s %(levelname)s shard %(shard)s: %(message)s")
        return formatter_of(("cluster", "shard", *_UNCLAIMED), {})


def _ids(epoch: int, now: ClusterMap) -> dict[str, object]:
    plan = None if now.plan is None else f"{now.plan.kind} {now.plan.phase}"
    return {"epoch": epoch, "map_version": now.version, "plan": plan}


if __name__ == "__main__":
    sys.exit(main())
