"""What `elastic` proves of a sync job: its losses are the same, bit for bit, whether nodes and shards come and go in the middle or not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np

import kvemb
from benchmarks.deepfm import example, steps_of
from benchmarks.elastic_moves import N_NODES, N_SHARDS, further_shard
from kvemb.api import Cluster
from kvemb.local_cluster import LocalCluster

_LINES, _LINES_OF_STEP = 20_000, 256


class OtherLossError(AssertionError):
    """A job whose nodes and shards changed did not compute what the same job computes where none did."""


def check_losses(store: str, at_least: int) -> int:
    """Train a small sync job with three changes of nodes and two of shards in the middle, and again without; return the number of steps.

    Raises:
        OtherLossError: a loss is not equal, bit for bit.
    """
    log, _ = example("synthetic").draw(_LINES, 0)
    batches = [log.take(np.arange(at, at + _LINES_OF_STEP)) for at in range(0, len(log) - _LINES_OF_STEP + 1, _LINES_OF_STEP)]
    changed = _losses(store, batches, at_least, changed=True)
    plain = _losses(store, batches, len(changed), changed=False)
    for at, (wanted, got) in enumerate(zip(plain, changed, strict=True)):
        if wanted != got:
            raise OtherLossError(f"{store}: losses differ from step {at} on: {wanted!r}, and {got!r} with changes of nodes and shards")
    return len(plain)


def _losses(store: str, batches: Sequence[object], n_steps: int, *, changed: bool) -> list[float]:
    """Losses of so many steps; with changes, of more when moves take longer than a quarter of them."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(store, N_NODES, shards=N_SHARDS, mode="sync", trainers=1))
        opened = stack.enter_context(kvemb.connect(cluster.url))
        step = steps_of(opened, batches, dim=8)
        losses: list[float] = []

        def train(n: int) -> None:
            for _ in range(n):
                losses.append(step(batches[len(losses) % len(batches)]))

        if not changed:
            train(n_steps)
            return losses
        train(n_steps // 4)
        for begin in _changes(cluster, opened):
            serial = opened.nodes.state().map.serial
            begin()
            train(n_steps // 4)
            while opened.nodes.state().map.plan is not None:
                train(1)
            if opened.nodes.state().map.serial == serial:
                raise OtherLossError(f"{store}: a move was taken back; the log of shard 0 says why")
    return losses


def _changes(cluster: LocalCluster, opened: Cluster) -> Iterator[Callable[[], object]]:
    """What begins three changes of nodes, and two of shards; each to be called when the one before is done."""
    nodes, shards, first = opened.nodes, opened.shards, cluster.servers[0].address
    third, fourth = (cluster.start_node().address for _ in range(2))
    yield lambda: nodes.begin(nodes.add(third))
    yield lambda: nodes.begin(nodes.remove(first))
    yield lambda: nodes.begin(nodes.exchange(third, fourth))
    shard = further_shard(cluster, N_SHARDS)
    yield lambda: shards.begin(shards.add(shard))
    yield lambda: shards.begin(shards.remove(shard))
