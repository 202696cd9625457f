"""A shard that kills itself (SIGKILL) at a chosen point of its work: `python shard_launcher.py FOLDER --config … --shard …`.

The point is chosen while it runs, by a file of its name in FOLDER, which is taken away before the end, so that the next process lives.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvemb.net.link import Link
from paramserver.__main__ import main
from paramserver.engine import Engine
from paramserver.journal import files
from paramserver.ledger import Ledger

POINTS = (
    "before fetch",
    "after optimize",
    "in the middle of a write",
    "after a write",
    "in the middle of a journal entry",
    "before a commit",
    "after a commit",
)
_folder = Path(sys.argv[1]) if __name__ == "__main__" else Path()


def _told(point: str, shard: str) -> bool:
    """Whether this is where to end; only once."""
    try:
        (_folder / f"{point} {shard}").unlink()
    except FileNotFoundError:
        return False
    return True


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _patch(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def install(shard: str) -> None:
    """Put the ends in."""

    def before(point: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if _told(point, shard):
                    _die()
                return original(*args, **kwargs)

            return call

        return wrap

    def after(point: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if _told(point, shard):
                    _die()
                return result

            return call

        return wrap

    def half_entry(original: Callable[..., None]) -> Callable[..., None]:
        def write_all(descriptor: int, pieces: Sequence[Any], offset: int) -> None:
            if len(pieces) > 1 and _told("in the middle of a journal entry", shard):
                data = b"".join(bytes(piece) for piece in pieces)
                original(descriptor, [data[: len(data) // 2]], offset)
                _die()
            original(descriptor, pieces, offset)

        return write_all

    def half_write(original: Callable[..., int]) -> Callable[..., int]:
        def send(self: Link, data: memoryview) -> int:
            # Requests of thousands of bytes are rows on their way into storage; reads of so few rows are smaller.
            if len(data) > 4000 and _told("in the middle of a write", shard):
                original(self, data[: len(data) // 2])
                _die()
            return original(self, data)

        return send

    _patch(Engine, "_fetch", before("before fetch"))
    _patch(Engine, "_prepare", after("after optimize"))
    _patch(Engine, "_settle", before("after a write"))
    _patch(Link, "send", half_write)
    _patch(files, "write_all", half_entry)
    _patch(Ledger, "commit", before("before a commit"))
    _patch(Ledger, "commit", after("after a commit"))


if __name__ == "__main__":
    options = sys.argv[2:]
    install(options[options.index("--shard") + 1])
    sys.exit(main(options))
