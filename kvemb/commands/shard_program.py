"""The program of one shard, `kvemb shard`: runs `paramserver.__main__`, which is imported at first use."""

from collections.abc import Sequence

from kvemb.own import import_own


def main(arguments: Sequence[str]) -> int:
    """Run one shard until it is told to stop; return its exit code."""
    return int(import_own("paramserver.__main__").main(arguments))
