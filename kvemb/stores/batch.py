"""One batch over several nodes: who gets which rows, and the arrays that replies fill. Pure.

Rows of a part are put in the order of their nodes once; each node's share is then a plain slice of every array, so replies are parsed
straight into the result and nothing is copied to sort it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import NodeFullError, NodeUnavailableError, ProtocolError, RecordError, StorageError
from kvemb.keys import RowKeys
from kvemb.wire.replies import Step, UnexpectedValueError
from kvemb.wire.scan import WRONG_TYPE
from kvemb.wire.stride_reply import StrideReply
from kvemb.wire.token_reply import TokenReply

_NOT_READY = ("-LOADING", "-MASTERDOWN", "-READONLY", "-CLUSTERDOWN", "-BUSY ")  # starting up, or no primary for the moment


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


def group(keys: RowKeys, nodes: NDArray[np.int64] | None, kinds: NDArray[np.int8] | None = None) -> Grouped:
    """Put keys in the order of their nodes; within a node and a kind, rows of one page one after another, where rows lie in pages.

    Args:
        keys: n keys.
        nodes: int64 [n], or None when there is one node.
        kinds: int8 [n], none negative; within a node, rows come in their order (`Codec.read_kinds`).
    """
    near = keys.near()
    if nodes is None and near is None and (kinds is None or (len(kinds) and (kinds == kinds[0]).all())):
        return Grouped(keys, None, [(0, slice(0, len(keys)))] if len(keys) else [])
    nodes = np.zeros(len(keys), dtype=np.int64) if nodes is None else nodes
    wide = nodes if kinds is None else nodes * (int(kinds.max(initial=0)) + 1) + kinds
    rank: NDArray[np.signedinteger[Any]] = wide.astype(np.int16 if wide.max(initial=0) < 1 << 15 else np.int64)
    # 16-bit keys: NumPy sorts them by radix, in linear time.
    if near is None:
        order = np.argsort(rank, kind="stable")
    else:
        by_page = np.argsort(near, kind="stable")
        order = by_page[np.argsort(rank[by_page], kind="stable")]
    sorted_nodes = nodes[order]
    present, starts = np.unique(sorted_nodes, return_index=True)
    bounds = [*starts.tolist(), len(keys)]
    shares = [(int(node), slice(bounds[i], bounds[i + 1])) for i, node in enumerate(present)]
    return Grouped(keys.take(order), order, shares)


@dataclass(frozen=True, eq=False)
class NodeSteps:
    """The steps of one part at one node, with what is needed to say which row an error is about."""

    address: str
    ids: NDArray[np.uint64]
    steps: list[Step]

    def row_errors(self) -> Iterator[tuple[int, bytes]]:
        """Every (row in the share, error line) that the node sent."""
        start = 0
        for step in self.steps:
            for row, line in getattr(step.reply, "errors", ()):
                yield start + row, line
            start += _rows(step)


def _rows(step: Step) -> int:
    found = getattr(step.reply, "found", None)
    return len(found if found is not None else step.reply.out)  # type: ignore[attr-defined]


def tell_foreign(steps: list[Step], foreign: NDArray[np.bool_] | None) -> list[Step]:
    """Let the replies of steps that read n rows set here (bool [n]) which values have another size, instead of raising."""
    if foreign is None:
        return steps
    start = 0
    for step in steps:
        assert isinstance(step.reply, StrideReply | TokenReply)
        step.reply.foreign = foreign[start : start + len(step.reply.found)]
        start += len(step.reply.found)
    return steps


def raise_row_errors(parts: list[NodeSteps]) -> None:
    """Raise the first error line that a node sent in place of a row's reply, as a typed error."""
    for part in parts:
        for row, line in part.row_errors():
            raise server_error(part.address, line, int(part.ids[row]))


def server_error(address: str, line: bytes, row_id: int | None = None) -> StorageError:
    """Translate a server's error line."""
    text = line.decode("ascii", "replace")
    about = "" if row_id is None else f", id {row_id}"
    if text.startswith("-OOM") or "out of memory" in text:
        return NodeFullError(
            f"node {address}{about}: has no memory left ({text}). Give it more (maxmemory, -m). Shards "
            "try again until the write succeeds; what they have accepted and not applied is lost if they are stopped before that."
        )
    if "object too large" in text:
        return NodeFullError(f"node {address}{about}: the record exceeds the server's item limit ({text}). Start it with a larger -I.")
    if text.startswith(_NOT_READY):
        return NodeUnavailableError(f"node {address}{about}: does not serve now ({text}). Wait until it does.")
    if line.startswith(WRONG_TYPE):
        return RecordError(f"node {address}{about}: something that is no record lies under this row's key. Another program wrote there.")
    if text.startswith(":"):
        return RecordError(
            f"node {address}{about}: the page of this row has {text[1:]} bytes, too many. Another program wrote under its key."
        )
    return ProtocolError(f"node {address}{about}: the server answered {text!r}")


def unexpected_value(parts: list[NodeSteps], error: UnexpectedValueError) -> RecordError:
    """Say under which row's key a value of another size was found."""
    for part in parts:
        start = 0
        for step in part.steps:
            if step.reply is error.reply:
                return RecordError(
                    f"node {part.address}, id {int(part.ids[start + error.row])}: a value of {error.size_bytes} bytes lies under this "
                    f"row's key, expected a record of {error.expected_bytes}. Another program wrote there, or the table was created "
                    "with another definition."
                )
            start += _rows(step)
    return RecordError(str(error))
