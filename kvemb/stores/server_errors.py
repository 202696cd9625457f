"""Servers' error lines as typed errors: which pass by themselves, which the operator mends, and the next step for each. Pure."""

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
    "-ERR max number of clients": "Raise its maxclients, or close other connections.",
    UNREAD.decode(): "Give it more (-m, or the line `cache_memlimit MEGABYTES`); it needs some for rows on their way from flash.",
}
_REFUSED = ("-NOAUTH", "-WRONGPASS", "-NOPERM", "-DENIED", "-ERR AUTH", "-ERR invalid password")
MENDED = "The next push that touches the row, or `kvemb repair --all`, writes it over."


def server_error(address: str, line: bytes, keys: RowKeys | None = None, row: int = 0) -> KvembError:
    """Translate a server's error line.

    Args:
        address: "host:port" of the node.
        line: as it came.
        keys: of the batch that it answers; None where it is about no row.
        row: which of them.
    """
    text = line.decode("ascii", "replace")
    node = f"node {address}" if keys is None else f"node {address}, {keys.described(row)}"
    if text.startswith("-OOM") or "out of memory" in text:
        return NodeFullError(
            f"{node}: is out of memory ({text}). Give it more (maxmemory, -m). Shards "
            "try again until the write succeeds; their journals keep what they have accepted."
        )
    if "object too large" in text:
        return NodeFullError(f"{node}: the record exceeds the server's item limit ({text}). Start it with a larger -I.")
    for code, advice in _NOT_READY.items():
        if text.startswith(code):
            return NodeUnavailableError(f"{node}: does not serve now ({text}). {advice}")
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
    asks = "; is this a server of the kind that storage.kind says?" if "unknown command" in text.lower() else ""
    return ProtocolError(f"{node}: the server answered {text!r}{asks}")


def _foreign(node: str, address: str, keys: RowKeys | None) -> RecordError:
    if isinstance(keys, (PagedKeys, BucketKeys)):
        what = "page" if isinstance(keys, PagedKeys) else "bucket"
        text = f"{node}: another program put a value of another type in the place of this row's {what}. {MENDED}"
        return ForeignPageError(text, address)
    return RecordError(f"{node}: something that is no record lies under this row's key. Another program wrote there. {MENDED}")
