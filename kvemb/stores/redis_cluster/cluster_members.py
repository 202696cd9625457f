"""Which server processes of a Redis Cluster are known to hold all of their rows. Pure.

Markers of slots move with their slots, so they cannot say which process they were written for. Instead the cluster keeps a list of its
whole primaries as a small value: those that were empty when it was provisioned, and those whose rows the shards have compared since. A
primary that is not on it was restarted from a snapshot, or was a replica that may have lagged behind: its rows are suspect.

A process is named by its run id and by the replication history that it took over when it was promoted. The same process may be demoted, and
promoted again with other rows. (A server forgets that history an hour after its last replica has left, which changes nothing here: the run
id alone then stands for it.)
"""

import logging
from collections.abc import Iterable, Mapping

import msgpack

log = logging.getLogger("kvemb")
MEMBERS = "kvemb:primaries"
_HISTORY_CHARACTERS = 16


def process_of(info: Mapping[str, object]) -> str:
    """Name a server process, from its INFO.

    Example:
        >>> process_of({"run_id": "abc", "master_replid2": "0" * 40}), process_of({"run_id": "abc", "master_replid2": "12" * 20})
        ('abc', 'abc:1212121212121212')
    """
    history = str(info.get("master_replid2", "0"))[:_HISTORY_CHARACTERS]
    return str(info["run_id"]) + (f":{history}" if history.strip("0") else "")


def run_id_in(process: str) -> str:
    """The run id in a process's name.

    Example:
        >>> run_id_in("abc:1212121212121212")
        'abc'
    """
    return process.partition(":")[0]


def encode_members(processes: Iterable[str]) -> bytes:
    """The bytes of the list.

    Example:
        >>> sorted(decode_members(encode_members({"b", "a"})))
        ['a', 'b']
    """
    packed: bytes = msgpack.packb(sorted(processes))
    return packed


def decode_members(data: bytes | None) -> frozenset[str]:
    """Read the list; one that is missing or damaged is empty: every primary is compared then, and put on a new list."""
    if data is None:
        return frozenset()
    try:
        processes = msgpack.unpackb(data, max_array_len=1 << 16, max_map_len=0, max_str_len=64)
        if not isinstance(processes, list) or not all(isinstance(process, str) for process in processes):
            raise ValueError("no list of texts")
    except Exception as error:
        log.error("the value under the key %s is damaged, or another program's: %s; got %r", MEMBERS, error, data[:40])
        return frozenset()
    return frozenset(processes)
