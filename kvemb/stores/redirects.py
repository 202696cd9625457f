"""The answers of a Redis Cluster node about slots that it does not serve, or not now. Pure."""

from kvemb.errors import NodeUnavailableError

NOT_NOW = (b"-TRYAGAIN", b"-CLUSTERDOWN", b"-LOADING", b"-MASTERDOWN")
REDIRECTS = (b"-MOVED", b"-ASK", *NOT_NOW)


def redirect_target(line: bytes, asked: str) -> str:
    """The "host:port" of `-ASK 3999 host:port`; an empty host means the node that was asked."""
    target = (*line.decode("utf-8", "replace").split(" "), "", "")[2]
    host, _, port = target.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise NodeUnavailableError(f"node {asked}: redirects to {target!r}, which is no address")
    return target if host else f"{asked.rpartition(':')[0]}:{port}"
