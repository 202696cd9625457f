"""Other people's clients on the server that ours is measured on, as contenders.

redis-benchmark has key names of its own, so it gets values of the same size under them, in the same server. redis-py's MGET reads these;
the other Python clients read the very records that ours reads. Rows of bytes are also read out of a file on local disk. All check that they
read what exists: a run on missing keys would look like a fast one.
"""

import csv
import mmap
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray
from pymemcache.client.base import Client

from benchmarks.measure import Contender, Turn, repeated
from kvemb.arrays.ids import as_items, as_rows
from kvemb.errors import KvembError
from kvemb.wire.request_arrays import columns, decimals

KEYS_AT_ONCE = 1024
_FILL_KEYS = 100_000
_LEAST_REQUESTS = 100_000
_LATER_REQUESTS_PER_S = 1_000_000
# redis-benchmark's key range is the only way to tell it how many keys to miss, so the fraction it really misses varies by chance.
_MISS_TOLERANCE = 0.01


class PeerAbsentError(KvembError):
    """A peer is not installed: its line is skipped with this word."""


class PeerError(KvembError):
    """A peer failed, or did not read the right rows."""


def redis_benchmark(port: int, *, value_bytes: int, n_keys: int, missing: float) -> Contender:
    """redis-benchmark (C), GETs with 256 in a pipeline on 4 connections, keys drawn uniformly; fills its keys.

    Raises:
        PeerAbsentError: it is not installed; the message says what to install.
    """
    for program in ("redis-benchmark", "redis-cli"):
        if shutil.which(program) is None:
            raise PeerAbsentError(f"{program} is not installed. On Debian or Ubuntu: apt-get install redis-tools")
    fill_benchmark_keys(port, value_bytes, n_keys)
    rate = float(_LATER_REQUESTS_PER_S)

    def take_turn(seconds: float) -> Turn:
        nonlocal rate
        turn = _run_redis_benchmark(port, max(_LEAST_REQUESTS, int(seconds * rate)), value_bytes, n_keys, missing)
        rate = turn.n_rows / turn.wall_s
        return turn

    return Contender("redis-benchmark GET -P 256 -c 4 (C)", take_turn)


def fill_benchmark_keys(port: int, value_bytes: int, n_keys: int) -> None:
    """Write key:000000000000 and so on, the names that redis-benchmark reads, through `redis-cli --pipe`."""
    head, middle = b"*3\r\n$3\r\nSET\r\n$16\r\nkey:", b"\r\n$%d\r\n" % value_bytes + b"x" * value_bytes + b"\r\n"
    for start in range(0, n_keys, _FILL_KEYS):
        numbers = np.arange(start, min(start + _FILL_KEYS, n_keys), dtype=np.uint64) + np.uint64(10**12)
        requests = columns(len(numbers), head, decimals(numbers)[:, 1:], middle)
        command = ["redis-cli", "-p", str(port), "--pipe"]
        done = subprocess.run(command, input=requests.tobytes(), capture_output=True, check=False)
        if f"errors: 0, replies: {len(numbers)}" not in done.stdout.decode():
            raise PeerError(f"filling redis-benchmark's keys: {done.stdout.decode()} {done.stderr.decode()}")


def _run_redis_benchmark(port: int, n: int, value_bytes: int, n_keys: int, missing: float) -> Turn:
    with redis.Redis(port=port) as client:
        before = client.info("stats")
        cpu_before_s = children_cpu_s()
        done = subprocess.run(_benchmark_command(port, n, value_bytes, n_keys, missing), capture_output=True, text=True, check=False)
        cpu_s = children_cpu_s() - cpu_before_s
        after = client.info("stats")
    if done.returncode:
        raise PeerError(f"redis-benchmark ended with exit code {done.returncode}: {done.stderr}")
    hits, misses = (after[name] - before[name] for name in ("keyspace_hits", "keyspace_misses"))
    require_hits(hits, misses, n, missing)
    return Turn(n, n / requests_per_s(done.stdout), cpu_s)


def _benchmark_command(port: int, n: int, value_bytes: int, n_keys: int, missing: float) -> list[str]:
    command = ["redis-benchmark", "-p", str(port), "-P", "256", "-c", "4", "-n", str(n), "--csv"]
    if missing >= 1:
        return [*command, "-r", str(n_keys), "GET", "no-key:__rand_int__"]
    return [*command, "-t", "get", "-d", str(value_bytes), "-r", str(round(n_keys / (1 - missing)))]


def require_hits(hits: int, misses: int, n_requests: int, missing: float) -> None:
    """Refuse a run that did not read the right rows.

    Raises:
        PeerError: with what the server counted.
    """
    total = hits + misses
    if total < n_requests or abs(misses / total - missing) > (_MISS_TOLERANCE if missing else 0):
        raise PeerError(
            f"redis-benchmark was to send {n_requests} GETs, of which {missing:.0%} miss; the server counted {hits} hits, {misses} misses"
        )


def requests_per_s(output: str) -> float:
    """Return the rate in redis-benchmark's CSV.

    Raises:
        PeerError: there is none.

    Example:
        >>> requests_per_s('"test","rps","avg_latency_ms"\\n"GET","1672561.88","0.565"\\n')
        1672561.88
    """
    for line in csv.DictReader(output.splitlines()):
        if line.get("rps"):
            return float(line["rps"])
    raise PeerError(f"redis-benchmark printed no rate: {output!r}")


def redis_py(port: int, batches: Sequence[list[tuple[bytes, list[bytes]]]], record_bytes: int, n_missing: Sequence[int]) -> Contender:
    """redis-py with hiredis, pipelined HMGETs, on our own records; keys and fields are made outside the timed part.

    Args:
        port: the server's.
        batches: the buckets of each batch, each with its fields.
        record_bytes: size of a record that is there.
        n_missing: how many of each batch are not.

    Raises:
        PeerAbsentError: hiredis is not in use.
    """
    client = redis.Redis(port=port, protocol=2)
    if not redis.utils.HIREDIS_AVAILABLE:
        raise PeerAbsentError("redis-py runs without hiredis: pip install hiredis")

    def read(index: int) -> list[bytes | None]:
        with client.pipeline(transaction=False) as pipeline:
            for key, fields in batches[index]:
                pipeline.hmget(key, fields)
            return [value for values in pipeline.execute() for value in values]

    return Contender("redis-py + hiredis HMGET, pipelined", repeated(read, _check_values(record_bytes, n_missing), len(batches)))


def redis_py_mget(port: int, batches: Sequence[Sequence[int]], value_bytes: int) -> Contender:
    """redis-py with hiredis, MGETs of 1024 of redis-benchmark's keys, which are there; their names are made outside the timed part.

    Args:
        port: the server's.
        batches: of each batch the numbers of its keys.
        value_bytes: of every value.

    Raises:
        PeerAbsentError: hiredis is not in use.
    """
    client = redis.Redis(port=port, protocol=2)
    if not redis.utils.HIREDIS_AVAILABLE:
        raise PeerAbsentError("redis-py runs without hiredis: pip install hiredis")
    names = [[b"key:%012d" % number for number in batch] for batch in batches]

    def read(index: int) -> list[Any]:
        keys = names[index]
        return [value for at in range(0, len(keys), KEYS_AT_ONCE) for value in client.mget(keys[at : at + KEYS_AT_ONCE])]

    check = _check_values(value_bytes, [0] * len(batches))
    return Contender(f"redis-py + hiredis MGET {KEYS_AT_ONCE}", repeated(read, check, len(batches)))


def mapped_file(
    path: Path,
    rows: NDArray[np.uint8],
    batches: Sequence[NDArray[np.int64]],
    check: Callable[[int, NDArray[np.uint8]], tuple[int, int]],
    *,
    cold: bool,
) -> Contender:
    """A memory map of a file on local disk, one gather a batch.

    Args:
        path: where the file is, or is to be written.
        rows: uint8 [n, bytes]: its content.
        batches: int64 [m] each, the rows of a batch.
        check: of a batch's rows.
        cold: have the system forget the file's pages after each batch, so that rows come from the disk, as of a file larger than memory.
    """
    if not path.exists():
        path.write_bytes(rows.data)
        with path.open("rb") as written:
            os.fsync(written.fileno())

    def read(index: int) -> NDArray[np.uint8]:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            if cold:
                mapped.madvise(mmap.MADV_RANDOM)  # else the system reads far more around each row
            held = np.frombuffer(mapped, rows.dtype).reshape(rows.shape)
            found = as_items(held)[batches[index]]
            del held
        return as_rows(found)

    def check_and_forget(index: int, found: NDArray[np.uint8]) -> tuple[int, int]:
        if cold:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return check(index, found)

    turn = repeated(read, check_and_forget, len(batches))
    return Contender(f"memory map of a file, {'read from disk' if cold else 'all of it in memory'}", turn)


def pymemcache(port: int, batches: Sequence[list[bytes]], record_bytes: int, n_missing: Sequence[int]) -> Contender:
    """pymemcache get_many in chunks of 1024, on our own records; arguments as `redis_py`."""
    client = Client(("127.0.0.1", port), timeout=30, no_delay=True)

    def read(index: int) -> list[bytes | None]:
        keys, found = batches[index], {}
        for at in range(0, len(keys), KEYS_AT_ONCE):
            found.update(client.get_many(keys[at : at + KEYS_AT_ONCE]))
        return [found.get(key) for key in keys]

    return Contender(f"pymemcache get_many {KEYS_AT_ONCE}", repeated(read, _check_values(record_bytes, n_missing), len(batches)))


def _check_values(record_bytes: int, n_missing: Sequence[int]) -> Callable[[int, list[bytes | None]], tuple[int, int]]:
    def check(index: int, values: list[bytes | None]) -> tuple[int, int]:
        found = [len(value) for value in values if value is not None]
        if len(values) - len(found) != n_missing[index] or set(found) - {record_bytes}:
            raise PeerError(f"a peer read {len(found)} values of sizes {sorted(set(found))} in batch {index}")
        return len(values), len(values)

    return check


def children_cpu_s() -> float:
    """CPU time of the ended children of this process so far: seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
