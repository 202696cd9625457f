"""redis-benchmark's pipelined SET, the write beside the GET of benchmarks.peers: the same keys, values of the same size."""

import subprocess

import redis

from benchmarks.measure import Contender, Turn
from benchmarks.peers import PeerError, children_cpu_s, requests_per_s


def redis_benchmark_set(port: int, *, value_bytes: int, n_keys: int, n_requests: int) -> Contender:
    """redis-benchmark (C), SETs with 256 in a pipeline on 4 connections, over existing keys drawn uniformly.

    Args:
        port: of a server that `benchmarks.peers.redis_benchmark` has filled.
        value_bytes: size of each value.
        n_keys: how many keys exist.
        n_requests: of one turn, whatever its length in seconds.
    """
    command = ["redis-benchmark", "-p", str(port), "-P", "256", "-c", "4", "-n", str(n_requests), "--csv"]
    command += ["-t", "set", "-d", str(value_bytes), "-r", str(n_keys)]

    def take_turn(seconds: float) -> Turn:
        before, before_cpu_s = _sets_and_keys(port), children_cpu_s()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        cpu_s, after = children_cpu_s() - before_cpu_s, _sets_and_keys(port)
        if done.returncode:
            raise PeerError(f"redis-benchmark ended with exit code {done.returncode}: {done.stderr}")
        require_overwritten(before, after, n_requests)
        return Turn(n_requests, n_requests / requests_per_s(done.stdout), cpu_s)

    return Contender("redis-benchmark SET -P 256 -c 4 (C)", take_turn)


def require_overwritten(before: tuple[int, int], after: tuple[int, int], n_requests: int) -> None:
    """Refuse a run that did not write the right values.

    Args:
        before: SETs that the server has counted, and its keys.
        after: the same, after the run.
        n_requests: SETs to expect; redis-benchmark fills its last pipeline.

    Raises:
        PeerError: with what the server counted.
    """
    n_sets, n_new = after[0] - before[0], after[1] - before[1]
    if n_sets < n_requests or n_new:
        raise PeerError(f"redis-benchmark was to overwrite {n_requests} values; the server counted {n_sets} SETs and {n_new} new keys")


def _sets_and_keys(port: int) -> tuple[int, int]:
    with redis.Redis(port=port) as client:
        return int(client.info("commandstats").get("cmdstat_set", {}).get("calls", 0)), int(client.dbsize())
