"""Alters a table, and dies at a call of a shard: URL, table, function or method, which call of it, whether before it."""

import os
import signal
import sys
from typing import Any

import kvemb
from kvemb.alter import table_alteration
from kvemb.client.shard_client import ShardClient


def main(url: str, name: str, method: str, nth: int, before: bool) -> None:
    table_alteration.block_rows = lambda definition: 100
    where: Any = ShardClient if method == "end_drop" else table_alteration
    whole, calls = getattr(where, method), []

    def dying(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(method)
        if len(calls) <= nth:
            return whole(self, *arguments, **options)
        if not before:
            whole(self, *arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(where, method, dying)
    with kvemb.connect(url) as cluster:
        cluster.alter_table(name, dim=6, new_columns="zeros")


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5] == "True")
