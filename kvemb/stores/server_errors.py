"""Servers' error lines as typed errors: which pass by themselves, which the operator mends, and the next step for each. Pure.

Every line that a server's sources can send to a command of ours is one of these:

    wait     the node cannot serve now, or is full: NodeUnavailableError, NodeFullError; tried again until it can
    refuse   it does not let us in, or not do this: NodeRefusesError; raised while connecting, else waited for until that is mended
    stop     no such server answers so to what was asked: ProtocolError
"""

from kvemb.errors import (
    ForeignPageError,
    KvembError,
    NodeFullError,
    NodeRefusesError,
    NodeUnavailableError,
    ProtocolError,
    RecordError,
)
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PagedKeys
from kvemb.wire.buffer_scan import UNREAD, WRONG_TYPE

# Errors that pass by themselves, or once the node is mended; and the next step for each.
_NOT_READY = {
    "-LOADING": "It reads its data from disk; wait until it has.",
    "-MASTERDOWN": "It is a replica whose primary is down; wait for the failover, or start the primary.",
    "-READONLY": "It is a replica; wait for the failover, or correct storage.nodes.",
    "-CLUSTERDOWN": "`CLUSTER INFO` on it tells which slots have no primary.",
    "-TRYAGAIN": "Its slots are on their way to another node.",
    "-BUSY ": "A script keeps it busy; wait, or end it with SCRIPT KILL.",
    "-MISCONF": "It cannot write its snapshots; look at its log and its disk.",
    "-NOREPLICAS": "It has fewer replicas than min-replicas-to-write; start them.",
    "-ERR max number of clients": "redis-cli gets no connection there either. End programs that hold some (`ss -tnp` on its host names "
    "them) and type CONFIG SET maxclients 10000; or put that into redis.conf and start it again: the shards bring its rows back.",
    "-UNBLOCKED": "An operator ended the command (CLIENT UNBLOCK).",
    "ERROR Too many open connections": "Start it with a larger -c, or close other connections.",
    UNREAD.decode(): "Give it more (-m, or the line `cache_memlimit MEGABYTES`); it needs some for rows on their way from flash.",
}
_FULL = ("-OOM", "SERVER_ERROR out of memory storing", "SERVER_ERROR Out of memory allocating")
_REFUSED = (
    "-NOAUTH", "-WRONGPASS", "-NOPERM", "-DENIED", "-ERR AUTH", "-ERR invalid password", "-ERR Protocol error: unauthenticated",
)  # fmt: skip
_PASSWORD_ASKED = ("CLIENT_ERROR unauthenticated", "CLIENT_ERROR authentication failure")  # by memcached
_UNKNOWN_COMMAND = ("-ERR unknown command", "-ERR unknown subcommand", "-ERR Unknown subcommand")
_OF_A_CLUSTER = ("-MOVED ", "-ASK ", "-CROSSSLOT")
MENDED = "The next push that touches the row, or `kvemb repair --all`, writes it over."


def server_error(address: str, line: bytes, keys: RowKeys | None = None, row: int = 0) -> KvembError:
    """Translate a server's error line."""
    text = line.decode("ascii", "replace")
    node = f"node {address}" if keys is None else f"node {address}, {keys.described(row)}"
    if text.startswith(_FULL):
        return NodeFullError(
            f"{node}: is out of memory ({text}). Give it more (maxmemory, -m). Shards "
            "try again until the write succeeds; their journals keep what they have accepted."
        )
    if "object too large" in text:
        return NodeFullError(f"{node}: the record exceeds the server's item limit ({text}). Start it with a larger -I.")
    for code, advice in _NOT_READY.items():
        if text.startswith(code):
            return NodeUnavailableError(f"{node}: does not serve now ({text}). {advice}")
    if text.startswith("SERVER_ERROR "):
        return NodeUnavailableError(f"{node}: cannot serve now ({text}). Look at its log; where it lacks memory, give it more (-m).")
    if text.startswith(_PASSWORD_ASKED):
        return NodeRefusesError(f"{node}: asks for a password (-Y), and kvemb gives memcached none ({text}). Start it without.")
    if text.startswith(_UNKNOWN_COMMAND):
        return NodeRefusesError(
            f"{node}: does not know a command that kvemb needs ({text}). Was it renamed or switched off there (rename-command)? Else: is "
            "this a server of the kind that storage.kind says?"
        )
    if text.startswith(_REFUSED):
        return NodeRefusesError(
            f"storage.password_env, or --password-env of a projection's target: {node} refused the command: {text}. Check the user's name "
            "(username_env, or --to), its password and permissions: `kvemb acl` prints what a node's user takes, and "
            "`kvemb acl --check trainer` (or shard) asks the node."
        )
    if line.startswith(WRONG_TYPE):
        return _foreign(node, address, keys)
    if text.startswith(":"):
        return RecordError(f"{node}: the page of this row has {text[1:]} bytes, too many. Another program wrote under its key. {MENDED}")
    asks = "; is this a server of the kind that storage.kind says?" if text == "ERROR" or text.startswith(_OF_A_CLUSTER) else ""
    return ProtocolError(f"{node}: the server answered {text!r}{asks}")


def _foreign(node: str, address: str, keys: RowKeys | None) -> RecordError:
    if isinstance(keys, (PagedKeys, BucketKeys)):
        what = "page" if isinstance(keys, PagedKeys) else "bucket"
        text = f"{node}: another program put a value of another type in the place of this row's {what}. {MENDED}"
        return ForeignPageError(text, address)
    return RecordError(f"{node}: something that is no record lies under this row's key. Another program wrote there. {MENDED}")
