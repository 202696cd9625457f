"""One batch over several nodes: which node gets which rows, and the arrays that replies fill. Pure.

Rows of a part are put in the order of their nodes once. Each node's share is then a plain slice of every array: replies are parsed straight
into the result, and nothing is copied to sort it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from kvemb.wire.buffer_scan import WRONG_TYPE
from kvemb.wire.replies import RowsStep, UnexpectedValueError

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
}
_REFUSED = ("-NOAUTH", "-WRONGPASS", "-NOPERM", "-DENIED", "-ERR AUTH", "-ERR invalid password")
_MENDED = "The next push that touches the row, or `kvemb repair --all`, writes it over."


@dataclass(frozen=True, eq=False)
class Grouped:
    """The keys of a part in the order of their nodes.

    Args:
        keys: in node order.
        order: intp [n], position in the part of each; None when one node has all.
        shares: (node index, slice) of each node that has rows.
    """

    keys: RowKeys
    order: NDArray[np.intp] | None
    shares: list[tuple[int, slice]]


def group_by_node(keys: RowKeys, nodes: NDArray[np.integer[Any]] | None, kinds: NDArray[np.int8] | None = None) -> Grouped:
    """Put keys in the order of their nodes; within a node and a kind, rows of one page one after another, where rows lie in pages.

    Args:
        keys: n keys.
        nodes: of each the number of its node, or None when there is one node.
        kinds: int8 [n], none negative; within a node, rows come in their order (`Codec.read_kinds`).
    """
    locality = keys.locality()
    n = len(keys.ids)
    if nodes is None and locality is None and (kinds is None or (len(kinds) and (kinds == kinds[0]).all())):
        return Grouped(keys, None, [(0, slice(0, n))] if n else [])
    if nodes is None and kinds is None and locality is not None:
        order = locality.argsort(kind="stable")
        return Grouped(keys.take(order), order, [(0, slice(0, n))])
    nodes = np.zeros(len(keys), dtype=np.int64) if nodes is None else nodes
    wide = nodes if kinds is None else nodes.astype(np.int64) * (int(kinds.max(initial=0)) + 1) + kinds
    rank: NDArray[np.signedinteger[Any]] = wide.astype(np.int16 if wide.max(initial=0) < 1 << 15 else np.int64)
    # 16-bit keys: NumPy sorts them by radix, in linear time.
    if locality is None:
        order = np.argsort(rank, kind="stable")
    else:
        by_page = np.argsort(locality, kind="stable")
        order = by_page[np.argsort(rank[by_page], kind="stable")]
    sorted_nodes = nodes[order]
    present, starts = np.unique(sorted_nodes, return_index=True)
    bounds = [*starts.tolist(), len(keys)]
    shares = [(int(node), slice(bounds[i], bounds[i + 1])) for i, node in enumerate(present)]
    return Grouped(keys.take(order), order, shares)


@dataclass(frozen=True, eq=False)
class NodeSteps:
    """The steps of one part at one node, with its keys, by which an error names its row."""

    address: str
    keys: RowKeys
    steps: list[RowsStep]

    def row_errors(self) -> Iterator[tuple[int, bytes]]:
        """Every (row in the share, error line) that the node sent."""
        start = 0
        for step in self.steps:
            for row, line in step.reply.errors:
                yield start + row, line
            start += step.reply.n_rows


def raise_row_errors(parts: list[NodeSteps]) -> None:
    """Raise the first error line that a node sent in place of a row's reply, as a typed error."""
    for part in parts:
        if any([step.reply.errors for step in part.steps]):
            row, line = next(part.row_errors())
            raise server_error(part.address, line, part.keys, row)


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
            f"storage.password_env: {node} refused the command: {text}. Check username_env and password_env, and the user's "
            "permissions: `kvemb acl` prints what it takes, and `kvemb acl --check trainer` (or shard) asks the node."
        )
    if line.startswith(WRONG_TYPE):
        return _foreign(node, address, keys)
    if text.startswith(":"):
        return RecordError(f"{node}: the page of this row has {text[1:]} bytes, too many. Another program wrote under its key. {_MENDED}")
    return ProtocolError(f"{node}: the server answered {text!r}")


def _foreign(node: str, address: str, keys: RowKeys | None) -> RecordError:
    if isinstance(keys, (PagedKeys, BucketKeys)):
        what = "page" if isinstance(keys, PagedKeys) else "bucket"
        text = f"{node}: another program put a value of another type in the place of this row's {what}. {_MENDED}"
        return ForeignPageError(text, address)
    return RecordError(f"{node}: something that is no record lies under this row's key. Another program wrote there. {_MENDED}")


def unexpected_value(parts: list[NodeSteps], error: UnexpectedValueError) -> RecordError:
    """Say under which row's key a value of another size was found."""
    for part in parts:
        start = 0
        for step in part.steps:
            if step.reply is error.reply:
                return RecordError(
                    f"node {part.address}, {part.keys.described(start + error.row)}: a value of {error.size_bytes} bytes lies under this "
                    f"row's key, expected a record of {error.expected_bytes}. Another program wrote there, or the table was created "
                    f"with another definition. {_MENDED}"
                )
            start += step.reply.n_rows
    return RecordError(str(error))
