"""The verbs that set a cluster up: `kvemb init`, `certificates` (for a trial of TLS), `acl`, `completion`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import yaml

from kvemb.config import Config, load, parse
from kvemb.errors import ConfigError, n_of
from kvemb.net.deadline import Deadline
from kvemb.net.name_lookup import is_loopback
from kvemb.net.tls_link import connector_of
from kvemb.process.extras import require_extra
from kvemb.protocol.roles import SCHEME
from kvemb.protocol.verb import ADMIN, SHARD, TRAINER
from kvemb.stores.redis_server.acl_users import ACL_USERS, check_user
from kvemb.stores.redis_server.redis_login import RedisAccess

# A key that is commented out has its default there, or shows how it is written.
_TEMPLATE = """\
# One file for the whole cluster: it starts the shards, connects the trainers and drives the `kvemb` command.
cluster: {cluster}
storage:
  kind: {kind}
  nodes: {nodes}  # at the first start they get equal shares, and the cluster notes whose is which: the order is free from then on
  # timeout_s: 5.0  # how long a node may be silent in an exchange; pulls wait for it longer, see away_timeout_s
  # on_lost_node: wait  # or fail: what a pull does while a node is down or in repair
  # allow_row_loss: false  # true: also nodes whose settings may evict rows
  # username_env: KVEMB_STORAGE_USER  # names of environment variables, never the secrets; Redis and Valkey
  # password_env: KVEMB_STORAGE_PASSWORD
  # tls: {{ca: tls/ca.pem}}  # docs/security.md
  # insecure: false  # true: plain text to other machines, on a network that only the job's own processes reach
parameter_servers:
  shards: {shards}  # kvemb shard --shard 0, 1, …
  # data_dir: kvemb-data  # journals and indexes, from this file's folder on: keep them on a disk that lasts
  # durability: fsync  # or os: an acknowledged push survives the process, not the machine
  # journal_max_mb: 4096  # then a shard flushes to its row log and cuts its journal
  # away_timeout_s: 600.0  # how long a shard or a node may be away before what waits for it fails
  # cache_mb: 256  # records that a shard keeps so as not to fetch them again
  # index_mb: 1024  # versions of rows that a shard keeps in memory, 24 bytes each; the others are on its disk
  # mode: async  # or sync: all trainers' parts of a step at once
  # trainers: 4  # sync only: how many
  # barrier_timeout_s: 60.0  # sync only: how long a step waits for a trainer
  # on_lost_trainer: abort  # sync only: or wait, or drop
  # metrics_port: 9470  # for Prometheus; shards of one host have ports side by side
  # tls: {{ca: tls/ca.pem, cert: tls/me.crt, key: tls/me.key}}  # docs/security.md
  # insecure: false
tables: {{}}
  # Programs create tables; those that all agree on may stand here instead:
  # user: {{dim: 16, optimizer: {{kind: adam, lr: 1e-3}}, initializer: {{kind: normal, std: 0.01}}}}
"""


def init_command(args: argparse.Namespace) -> int:
    """Write the file, unless there is one."""
    path = Path(args.config)
    nodes = args.nodes or ["127.0.0.1:11211" if args.store == "memcached" else "127.0.0.1:6379"]
    lists = {
        name: "[" + ", ".join(f'"{address}"' for address in given) + "]" for name, given in (("nodes", nodes), ("shards", args.shards))
    }
    text = _TEMPLATE.format(cluster=yaml.safe_dump(args.cluster).splitlines()[0], kind=args.store, **lists)
    config = parse(yaml.safe_load(text), {})
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already, and was not changed; give another path") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    where = "" if path == Path("kvemb.yaml") else f" {os.fspath(path)}"
    print(f"wrote {path}.{_unencrypted(config)} With {n_of(len(nodes), f'empty {args.store} node')} running, start the shards:")
    for shard in range(len(args.shards)):
        print(f"  kvemb shard --config {path} --shard {shard}")
    print(f"then look for faults:\n  kvemb doctor{where}")
    return 0


def _unencrypted(config: Config) -> str:
    """Return in words what keeps shards from starting with a new file, "" for nothing: it has addresses of other machines and no tls."""
    sections = {"storage": config.storage.nodes, "parameter_servers": config.servers.shards}
    beyond = " and ".join(name for name, addresses in sections.items() if not all(map(is_loopback, addresses)))
    return beyond and f" It has addresses of other machines: first give {beyond} the line tls, or insecure: true (docs/security.md)."


_SECTION = "tls: {{ca: {ca}, cert_env: KVEMB_TLS_CERT, key_env: KVEMB_TLS_KEY}}"


def certificates_command(args: argparse.Namespace) -> int:
    """Write them beside kvemb.yaml, and say where each belongs."""
    require_extra("cryptography", what="certificates", extra="certificates")
    from kvemb.net.certificate_authority import Authority

    config = load(args.config, os.environ)
    beside = Path(args.config).parent
    authority = Authority(beside / args.out)
    for name, uris, purposes, addresses in _holders(config):
        authority.issue(name, *uris, purposes=purposes, hosts=_hosts(addresses), days=args.days)
    _say(args, beside / args.out, config.servers.shards)
    return 0


def _holders(config: Config) -> list[tuple[str, tuple[str, ...], tuple[str, ...], Sequence[str]]]:
    """Return for each certificate its name, the identities of its holder, its uses, and the addresses at which the holder serves."""
    of = f"{SCHEME}{quote(config.cluster, safe='')}"
    both = ("server", "client")
    shards = [(f"shard-{n}", (f"{of}/{SHARD}/{n}",), both, (address,)) for n, address in enumerate(config.servers.shards)]
    return [
        *shards,
        ("trainer", (f"{of}/{TRAINER}/*",), ("client",), ()),
        ("admin", (f"{of}/{ADMIN}/trial",), ("client",), ()),
        ("storage", (), both, config.storage.nodes),  # members of a Redis Cluster are each other's clients
    ]


def _hosts(addresses: Sequence[str]) -> list[str]:
    hosts = dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in addresses)
    local = {"127.0.0.1": None, "localhost": None} if hosts.keys() & {"127.0.0.1", "localhost", "::1"} else {}
    return list(hosts | local)


def _say(args: argparse.Namespace, folder: Path, shards: Sequence[str]) -> None:
    section = _SECTION.format(ca=f"{args.out}/ca.pem")
    print(f"wrote certificates for {args.days:g} days, and all keys, the authority's too, to {folder}: for a trial, not for production.")
    print(f"In {args.config}, under storage: and under parameter_servers: (paths start at its folder):\n  {section}")
    print("In each process's environment its own:")
    holders = [(f"shard-{n}", f"kvemb shard --config {args.config} --shard {n}: the one at {at}") for n, at in enumerate(shards)]
    for name, what in [*holders, ("trainer", "a trainer"), ("admin", "kvemb load, drop, repair, nodes, shards, moves")]:
        print(f"  KVEMB_TLS_CERT={args.out}/{name}.crt KVEMB_TLS_KEY={args.out}/{name}.key   # {what}")
    print(f"Storage nodes: {folder}/storage.crt and storage.key, with ca.pem as their authority (docs/security.md)")


_EXPLANATION = """\
# Lines of a users file (aclfile), or after ACL SETUSER. Put the SHA-256 of each one's password in the place of HASH:
#   printf %s "$PASSWORD" | sha256sum
# kvemb.yaml names the variables: storage.username_env and storage.password_env, with other values for trainers and for shards.
# A table with layout: compact needs its limits of hashes set in the servers' own configuration: shards may not run CONFIG SET."""


def acl_command(args: argparse.Namespace) -> int:
    """Print the two users; with --check, ask every node for the permissions of kvemb.yaml's user."""
    if not args.check:
        print(_EXPLANATION)
        for user in ACL_USERS.values():
            print(f"user {user.name} {user.rules()} #HASH")
        return 0
    config = load(args.config, os.environ)
    if config.storage.kind == "memcached":
        raise ConfigError("storage.kind: memcached has no users; it can ask for client certificates (docs/security.md)")
    access = RedisAccess(config.storage, connector_of(config.storage.tls))
    wrong = []
    for address in config.storage.nodes:
        wrong += check_user(address, access, ACL_USERS[args.check], Deadline.after(config.storage.timeout_s))
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(
            f"{n_of(len(config.storage.nodes), 'node')}: the user may do what a {args.check} does, and nothing that was asked about besides"
        )
    return 1 if wrong else 0


def completion_command(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for one shell."""
    shtab = require_extra("shtab", what="completions", extra="completion")
    for one in _parsers(parser):
        for action in one._actions:
            if action.dest in ("config", "url"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(parser, shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    verbs = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(verb for of in verbs for verb in of)]
