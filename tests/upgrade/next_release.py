"""A later release, for tests: `python next_release.py CHANGE… -- ARGUMENTS` is `kvemb ARGUMENTS` that writes and reads other formats."""

import sys
from collections.abc import Callable
from types import ModuleType

import msgpack

from kvemb.coordination import markers
from kvemb.protocol.message_format import Message
from kvemb.schema import cluster_map
from paramserver.journal import segment
from paramserver.row_log import sorted_run, state_file

NAMES: dict[str, tuple[ModuleType | type, dict[str, object]]] = {
    "marker": (markers, {"_VERSION": 7, "_REPAIRED_VERSION": 8}),
    "map": (cluster_map, {"FORMAT_VERSION": 4, "_FIELDS": {4: 12}}),
    "state": (state_file, {"FORMAT_VERSION": 5}),
    "segment": (segment, {"FORMAT_VERSION": 2}),
    "run": (sorted_run, {"FORMAT_VERSION": 4}),
}
"""Formats that this release does not read."""


def _with_further_fields(message: Message) -> bytes:
    packed: bytes = msgpack.packb([*msgpack.unpackb(_encode(message)), "of a later release", {"and": [1, b"2"]}])
    return packed


_encode = Message.encode
MESSAGES = {"messages": (Message, {"encode": _with_further_fields})}
"""Further fields of every message, which this release leaves unread."""


def apply(name: str, assign: Callable[[object, str, object], None] = setattr) -> None:
    """Make one of the changes in this process."""
    module, values = {**NAMES, **MESSAGES}[name]
    for constant, value in values.items():
        assert hasattr(module, constant)
        assign(module, constant, value)


if __name__ == "__main__":
    from kvemb.cli import main

    end = sys.argv.index("--")
    for given in sys.argv[1:end]:
        apply(given)
    sys.exit(main(sys.argv[end + 1 :]))
