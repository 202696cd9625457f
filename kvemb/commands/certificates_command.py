"""What `kvemb certificates` makes: an authority and one certificate for each process of a cluster, for a trial of TLS."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kvemb.config import Config, load
from kvemb.errors import ConfigError
from kvemb.protocol.roles import ADMIN, SCHEME, SHARD, TRAINER

_SECTION = "tls: {{ca: {ca}, cert_env: KVEMB_TLS_CERT, key_env: KVEMB_TLS_KEY}}"


def certificates_command(args: argparse.Namespace) -> int:
    """Write them beside kvemb.yaml, and say where each belongs."""
    try:
        from kvemb.net.certificate_authority import Authority
    except ImportError as error:
        raise ConfigError(
            "certificates are made by cryptography, which is not installed here: pip install 'kvemb[certificates]'"
        ) from error
    config = load(args.config, os.environ)
    beside = Path(args.config).parent
    authority = Authority(beside / args.out)
    for name, uris, purposes, addresses in _holders(config):
        authority.issue(name, *uris, purposes=purposes, hosts=_hosts(addresses), days=args.days)
    _say(args, beside / args.out, len(config.servers.shards))
    return 0


def _holders(config: Config) -> list[tuple[str, tuple[str, ...], tuple[str, ...], Sequence[str]]]:
    """Return of each certificate its name, who its holder is, what it is for, and the addresses at which the holder serves."""
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


def _say(args: argparse.Namespace, folder: Path, n_shards: int) -> None:
    section = _SECTION.format(ca=f"{args.out}/ca.pem")
    print(f"wrote certificates for {args.days:g} days, and all keys, the authority's too, to {folder}: for a trial, not for production.")
    print(f"In {args.config}, under storage: and under parameter_servers: (paths start at its folder):\n  {section}")
    print("In each process's environment its own:")
    holders = [(f"shard-{n}", f"kvemb shard --config {args.config} --shard {n}") for n in range(n_shards)]
    for name, what in [*holders, ("trainer", "a trainer"), ("admin", "kvemb load, drop, repair, nodes, shards, moves")]:
        print(f"  KVEMB_TLS_CERT={args.out}/{name}.crt KVEMB_TLS_KEY={args.out}/{name}.key   # {what}")
    print(f"Storage nodes: {folder}/storage.crt and storage.key, with ca.pem as their authority (docs/security.md)")
