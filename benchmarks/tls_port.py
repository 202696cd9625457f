"""A TLS port on storage servers that run already, and the same table read through it: the cost of encryption, in one run."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import redis

import kvemb
from benchmarks.servers import Filled
from kvemb.api.table import Table
from kvemb.errors import KvembError
from kvemb.local_cluster.processes import free_ports


def table_over_tls(stack: ExitStack, target: Filled) -> Table:
    """Let Redis servers listen on one more port each, and open the table there, with a client's certificate.

    Args:
        stack: closes all that is opened.
        target: the servers, and the table.

    Raises:
        KvembError: the servers cannot be given a port while they run, or are built without TLS.
    """
    from kvemb.net.certificate_authority import Authority

    if target.opened.config.storage.kind != "redis":
        raise KvembError("--tls: only Redis servers take a TLS port while they run, and the Valkey wheel is built without TLS")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    authority = Authority(folder)
    node, client = authority.issue("node", purposes=("server",)), authority.issue("client", purposes=("client",))
    ports = free_ports(len(target.ports))
    for plain, port in zip(target.ports, ports, strict=True):
        with redis.Redis(port=plain, protocol=2) as admin:
            files = {"tls-cert-file": node.cert, "tls-key-file": node.key, "tls-ca-cert-file": authority.ca}
            words = [str(word) for pair in files.items() for word in pair]
            admin.execute_command("CONFIG", "SET", *words, "tls-port", str(port))
    config = target.opened.config
    tree = {
        "cluster": config.cluster,
        "storage": {
            "kind": "redis",
            "nodes": [f"127.0.0.1:{port}" for port in ports],
            "tls": {"ca": str(authority.ca), "cert": str(client.cert), "key": str(client.key)},
        },
        "parameter_servers": {"shards": list(config.servers.shards)},
    }
    return stack.enter_context(kvemb.connect(tree, read_only=True)).table(target.table.name)
