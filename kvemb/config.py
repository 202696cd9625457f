"""kvemb.yaml: one file that names the cluster, its storage, its parameter servers and its tables; validated whole at load.

Every message holds the path of the wrong key. Secrets are named by environment variable here and resolved where a program opens a
connection (`StorageConfig.password`); they are in no repr. The environment is read through the mapping that the caller passes.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import yaml

from kvemb.errors import ConfigError, InvalidInputError, did_you_mean
from kvemb.init import ALGORITHM_VERSION, uniform, zeros
from kvemb.net.tls_config import TlsConfig, parse_tls
from kvemb.optim import FROZEN
from kvemb.schema.table_def import KEYS, TableDef, frozen_or_trained


class _Loader(yaml.SafeLoader):
    """Reads YAML, where 1e-3 is a number (YAML 1.1 wants a dot), and a key that stands twice is refused (PyYAML takes the last one)."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Compose a mapping; here, since later "<<" has put merged keys beside those that override them."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        known = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in known:
                raise ConfigError(f"line {key.start_mark.line + 1}: the key {key.value!r} stands twice in one mapping")
            known.add((key.tag, str(key.value)))
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"), list("-+0123456789"))

MODES = ("async", "sync")
ON_LOST_NODE = ("wait", "fail")
ON_LOST_TRAINER = ("abort", "wait", "drop")
DURABILITIES = ("fsync", "os")
_DURABLE = "fsync (an accepted push survives a power failure) or os (it survives the death of the shard, not of the machine)"
_LOOPBACK_NAME = "localhost"


@dataclass(frozen=True)
class StorageConfig:
    """The section `storage` of kvemb.yaml, checked."""

    kind: str  # "memcached", "redis", "valkey", "redis-cluster", or the name of a registered store
    nodes: tuple[str, ...]  # "host:port", in order; for redis-cluster, any primaries to start from
    # how long a node may be silent before an exchange with it fails, and is tried again. For a shard, and with `on_lost_node: fail`, the
    # deadline of one whole exchange with all nodes. A large call takes several: such a pull of more than 128 MB has this time for every 32
    # MB. A shard has it for every piece of a batch, and makes pieces smaller where storage is slow.
    timeout_s: float = 5.0
    # username, password: of Redis; resolved from the environment
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    # connect to nodes whose settings can lose rows (eviction, slab moves). A lost row is restored by the next batch that touches it; after
    # memcached moved a slab page, all of the node's are. Until then pulls give the initializer's rows for them.
    allow_row_loss: bool = False
    # how connecting and a trainer's pull behave while a node is down or the parameter servers restore its rows. "wait": they wait for it as
    # long as a shard may be away (`parameter_servers.away_timeout_s`), or the call's own timeout; "fail": they fail at once.
    on_lost_node: str = "wait"
    tls: TlsConfig | None = None  # how connections to the nodes are encrypted; None: they are not
    insecure: bool = False  # nodes beyond this machine may be reached without encryption


@dataclass(frozen=True)
class ServersConfig:
    """The section `parameter_servers` of kvemb.yaml, checked."""

    shards: tuple[str, ...]  # "host:port" of every shard, in the order of their numbers. `kvemb shards` adds and removes some.
    mode: str = "async"  # "async" (apply as pushes come) or "sync" (all trainers' parts of a step, then one apply)
    trainers: int = 0  # number of trainers of a sync job (0 in async mode)
    # directory in which each shard keeps its state, in a folder of its own. In the file, a relative one starts at the folder of the file.
    data_dir: str = "kvemb-data"
    # how long a trainer of a sync job may be silent while a step waits for it; longer than any trainer's longest step
    barrier_timeout_s: float = 60.0
    # how long a shard may be away (it restarts and replays a journal, say), or a node, before a call that waits for it fails: pulls, steps,
    # pushes, flushes and all others without a time of their own. Pulls do not wait for a shard.
    away_timeout_s: float = 600.0
    cache_mb: int = 256  # memory in which each shard keeps records that it wrote lately, so as not to fetch them again; 0 for none
    index_mb: int = 1024  # memory in which each shard keeps versions of rows, 24 bytes each, about; those of the others are on its disk
    # when a push counts as accepted. "fsync": its journal entry is on disk; "os": the operating system has it, so it survives the death of
    # the shard, not of the machine.
    durability: str = "fsync"
    journal_max_mb: int = 4096  # size of a shard's journal at which it takes a local checkpoint and discards what that holds
    # how a shard treats a trainer that is silent for longer. "abort": the step fails and the shard stops. "wait": the step waits until a
    # trainer of that name is back. "drop": steps go on without it, and it may connect again. Each shard decides alone, so the last step of
    # a dead trainer may have reached some shards only. A trainer that never joined is not dropped.
    on_lost_trainer: str = "abort"
    # where Prometheus scrapes a shard, on the host that the shard listens on; 0: nowhere. Of several shards that `shards` gives one host,
    # the first has this port, the next the one above, and so on.
    metrics_port: int = 0
    # how connections to the shards are encrypted, and the roles of clients; None: plain, and every client may do everything
    tls: TlsConfig | None = None
    insecure: bool = False  # shards beyond this machine may be reached without encryption

    def metrics_port_of(self, shard: int, address: str = "") -> int:
        """The port on which a shard is scraped, 0: none. By its place: once shards have left, the file's order is not the numbers'."""
        hosts = [address.rpartition(":")[0] for address in self.shards]
        at = self.shards.index(address) if address in self.shards else shard
        if at < len(hosts):
            return self.metrics_port and self.metrics_port + hosts[:at].count(hosts[at])
        n_here = hosts.count(address.rpartition(":")[0])  # numbers between may be of the same machine, too
        return self.metrics_port and self.metrics_port + (n_here and n_here + shard - len(hosts))

    def last_words(self, shard: int) -> Path:
        """Return the file in which a shard that ended in trouble says why, to trainers of the same machine."""
        return Path(self.data_dir) / f"shard-{shard}.last-words"


@dataclass(frozen=True)
class Config:
    """A whole kvemb.yaml. `tables` is only input to creation: shard 0 keeps the registry."""

    cluster: str
    storage: StorageConfig
    servers: ServersConfig
    tables: tuple[TableDef, ...] = ()

    @property
    def node_waits(self) -> tuple[float, float]:
        """Seconds that a trainer's read waits for nodes in all, unless its call says otherwise, and for one that is silent."""
        at_once_s = self.storage.timeout_s
        if self.storage.on_lost_node != ON_LOST_NODE[0]:
            return at_once_s, math.inf
        return max(at_once_s, self.servers.away_timeout_s), at_once_s


def load(source: str | os.PathLike[str] | Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Read and validate a file.

    Args:
        source: a path, or a file:// URL (`kvemb.local` returns one); or the content of such a file, as a mapping.
        environ: where passwords are looked up.

    Raises:
        ConfigError: the file is unreadable, a key is wrong or stands twice; the message holds file and key path.
    """
    if isinstance(source, Mapping):
        config = parse(source, environ)
        return _starting_at(config, Path.cwd())
    path = _path(source)
    try:
        config = parse(yaml.load(path.read_text(encoding="utf-8"), _Loader), environ)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Give the path of a kvemb.yaml; `kvemb init` writes one.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    # absolute, not resolve: a mounted file may be a link into a folder that comes and goes.
    return _starting_at(config, path.absolute().parent)


def _starting_at(config: Config, folder: Path) -> Config:
    """Return the same with relative paths taken from a folder."""
    storage, servers = config.storage, config.servers
    return replace(
        config,
        storage=replace(storage, tls=storage.tls and storage.tls.starting_at(folder)),
        servers=replace(servers, tls=servers.tls and servers.tls.starting_at(folder), data_dir=str(folder / servers.data_dir)),
    )


def parse(tree: object, environ: Mapping[str, str]) -> Config:
    """Validate a parsed tree; see `load`. Here relative paths are left as they are."""
    top = _section(tree, "", {"cluster", "storage", "parameter_servers", "tables"}, {"cluster", "storage", "parameter_servers"})
    storage = _storage(top["storage"], environ)
    config = Config(
        cluster=_text(top, "cluster", ""),
        storage=storage,
        servers=_servers(top["parameter_servers"], environ),
        tables=_tables(top.get("tables") or {}, storage.kind),
    )
    for index, address in enumerate(config.servers.shards):
        if address in config.storage.nodes:
            raise ConfigError(
                f"parameter_servers.shards[{index}]: {address!r} stands in storage.nodes too; each server has its own address"
            )
        port = config.servers.metrics_port_of(index)
        if port > 65535 or f"{address.rpartition(':')[0]}:{port}" in (*config.servers.shards, *config.storage.nodes):
            raise ConfigError(
                f"parameter_servers.metrics_port: shard {index} would be scraped on port {port} of its host, which "
                f"{'does not exist' if port > 65535 else 'another server has'}; shards of one host have ports side by side"
            )
    return config


def _storage(tree: object, environ: Mapping[str, str]) -> StorageConfig:
    at = "storage."
    keys = {"kind", "nodes", "timeout_s", "username_env", "password_env", "allow_row_loss", "on_lost_node"}
    keys |= {"tls", "insecure"}
    fields = _section(tree, "storage", keys, {"kind", "nodes"})
    kind = _text(fields, "kind", at)
    nodes = _addresses(fields, "nodes", at)
    if kind == "memcached" and {"username_env", "password_env"} & set(fields):
        raise ConfigError("storage.password_env: memcached nodes take no credentials but client certificates (storage.tls)")
    return StorageConfig(
        kind=kind,
        nodes=nodes,
        timeout_s=_positive(fields, "timeout_s", at, 5.0),
        username=_secret(fields, "username_env", at, environ),
        password=_secret(fields, "password_env", at, environ),
        allow_row_loss=_flag(fields, "allow_row_loss", at),
        on_lost_node=_one_of(fields, "on_lost_node", at, ON_LOST_NODE),
        tls=parse_tls(fields.get("tls"), "storage.tls", environ, tokens=False),
        insecure=_flag(fields, "insecure", at),
    )


def _servers(tree: object, environ: Mapping[str, str]) -> ServersConfig:
    at = "parameter_servers."
    keys = {"shards", "mode", "trainers", "data_dir", "barrier_timeout_s", "cache_mb", "durability", "journal_max_mb", "on_lost_trainer"}
    keys |= {"index_mb", "metrics_port", "tls", "insecure", "away_timeout_s"}
    fields = _section(tree, "parameter_servers", keys, {"shards"})
    mode, on_lost_trainer = _one_of(fields, "mode", at, MODES), _one_of(fields, "on_lost_trainer", at, ON_LOST_TRAINER)
    trainers = _whole(fields, "trainers", at, 0)
    if (mode == "sync") != (trainers > 0):
        raise ConfigError("parameter_servers.trainers: give the number of trainers when mode is sync, and only then")
    for name in ("barrier_timeout_s", "on_lost_trainer"):
        if mode == "async" and name in fields:
            raise ConfigError(f"parameter_servers.{name}: has an effect in sync mode only")
    return ServersConfig(
        shards=_addresses(fields, "shards", at),
        mode=mode,
        trainers=trainers,
        data_dir=_text(fields, "data_dir", at) if "data_dir" in fields else "kvemb-data",
        barrier_timeout_s=_positive(fields, "barrier_timeout_s", at, 60.0),
        away_timeout_s=_positive(fields, "away_timeout_s", at, 600.0),
        cache_mb=_whole(fields, "cache_mb", at, 256, end=1 << 24, expected="a whole number of megabytes, 0 for none"),
        index_mb=_whole(fields, "index_mb", at, 1024, end=1 << 24, expected="a whole number of megabytes, 0 for none"),
        durability=_one_of(fields, "durability", at, DURABILITIES, _DURABLE),
        journal_max_mb=_whole(fields, "journal_max_mb", at, 4096, least=1, end=1 << 24, expected="a whole number of megabytes, at least 1"),
        on_lost_trainer=on_lost_trainer,
        metrics_port=_whole(fields, "metrics_port", at, 0, end=65536, expected="a port, 0 for none"),
        tls=parse_tls(fields.get("tls"), "parameter_servers.tls", environ, tokens=True),
        insecure=_flag(fields, "insecure", at),
    )


def _tables(tree: object, kind: str) -> tuple[TableDef, ...]:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"tables: got {type(tree).__name__}, expected a mapping of name to definition")
    tables = []
    for name, fields in tree.items():
        if not isinstance(fields, Mapping):
            raise ConfigError(f"tables.{name}: got {type(fields).__name__}, expected a mapping with dim, optimizer and initializer")
        if {"name", "tag_attempt", "life", "init_algorithm"} & set(fields):
            raise ConfigError(f"tables.{name}: the keys name, tag_attempt, life and init_algorithm are not set here")
        for key in sorted(set(fields) - KEYS - {"expected_rows", "layout", "frozen"}):
            raise ConfigError(f"tables.{name}.{key}: unknown key{did_you_mean(str(key), KEYS)}")
        if "layout" in fields and kind == "memcached":
            raise ConfigError(f"tables.{name}.layout: says how Redis and Valkey keep rows; memcached has a key for every row: leave it out")
        given = {key: value for key, value in fields.items() if key not in ("expected_rows", "layout", "frozen")}
        asked = [given.get(key) for key in ("dim", "dtype", "optimizer", "initializer")]
        try:
            dim, frozen = frozen_or_trained(name, *asked, frozen=fields.get("frozen", False))
            given.setdefault("initializer", (zeros() if frozen else uniform()).to_dict())
            if frozen:
                given |= {"dim": dim, "optimizer": FROZEN.to_dict()}
            table = TableDef.from_dict({"name": name, "init_algorithm": ALGORITHM_VERSION, **given})
            tables.append(table.laid_out(fields.get("expected_rows"), fields.get("layout")))
        except (InvalidInputError, TypeError) as error:
            raise ConfigError(f"tables.{name}: {error}") from error
    return tuple(tables)


def _path(source: str | os.PathLike[str]) -> Path:
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"got {type(source).__name__}, expected the path of a kvemb.yaml, a URL of kvemb.local, or a mapping")
    text = os.fspath(source)
    scheme, found, rest = text.partition("://")
    if found and scheme != "file":
        raise ConfigError(
            f"{scheme}://{rest.rpartition('@')[2]}: got the address of a server, expected a kvemb.yaml, which names the storage nodes "
            "(storage.kind, storage.nodes) and the parameter servers that write to them (parameter_servers.shards). Write one, or give "
            "what it would hold as a dict; the README has one to copy. To try things on this machine: kvemb.local()."
        )
    if not found:
        return Path(text)
    url = urlparse(text)
    if url.netloc not in ("", _LOOPBACK_NAME):
        raise ConfigError(f"{text}: a file:// URL names a file of this machine; leave the host out")
    return Path(unquote(url.path))


def _section(tree: object, at: str, known: set[str], required: set[str]) -> Mapping[str, Any]:
    if not isinstance(tree, Mapping):
        found = "nothing" if tree is None else type(tree).__name__
        raise ConfigError(f"{at or 'the file'}: got {found}, expected a mapping with {', '.join(sorted(known))}")
    prefix = f"{at}." if at else ""
    for key in tree:
        if key not in known:
            raise ConfigError(f"{prefix}{key}: unknown key; known here: {', '.join(sorted(known))}{did_you_mean(str(key), known)}")
    for key in sorted(required - set(tree)):
        raise ConfigError(f"{prefix}{key}: missing")
    return tree


def _text(fields: Mapping[str, Any], key: str, at: str) -> str:
    value = fields[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{at}{key}: got {value!r}, expected text, not empty")
    return value


def _one_of(fields: Mapping[str, Any], key: str, at: str, known: tuple[str, ...], expected: str = "") -> str:
    """The word that was given, or the first of those that are known."""
    value = fields.get(key, known[0])
    if value not in known:
        raise ConfigError(f"{at}{key}: got {value!r}, expected {expected or 'one of ' + ', '.join(known)}")
    return str(value)


def _whole(
    fields: Mapping[str, Any], key: str, at: str, default: int, *, least: int = 0, end: int = 1 << 31, expected: str = "a whole number"
) -> int:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < end:
        raise ConfigError(f"{at}{key}: got {value!r}, expected {expected}")
    return value


def _flag(fields: Mapping[str, Any], key: str, at: str) -> bool:
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{at}{key}: got {value!r}, expected true or false")
    return value


def _positive(fields: Mapping[str, Any], key: str, at: str, default: float) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        raise ConfigError(f"{at}{key}: got {value!r}, expected a number of seconds above 0")
    return float(value)


def _secret(fields: Mapping[str, Any], key: str, at: str, environ: Mapping[str, str]) -> str | None:
    if key not in fields:
        return None
    name = _text(fields, key, at)
    if name not in environ:
        raise ConfigError(f"{at}{key}: the environment variable {name} is not set")
    return environ[name]


def is_address(text: str) -> bool:
    """Whether this is "host:port"."""
    host, _, port = text.rpartition(":")
    return bool(host) and not set(host) & set("/ ,\t") and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def _addresses(fields: Mapping[str, Any], key: str, at: str) -> tuple[str, ...]:
    value = fields[key]
    if not isinstance(value, list) or not value:
        raise ConfigError(f'{at}{key}: got {value!r}, expected a list of "host:port"')
    for index, address in enumerate(value):
        if not isinstance(address, str) or not is_address(address):
            raise ConfigError(f'{at}{key}[{index}]: got {address!r}, expected "host:port"')
    if len(set(value)) != len(value):
        raise ConfigError(f"{at}{key}: an address stands twice in {value!r}")
    return tuple(value)
