"""Training from a stream: each click of a Kafka topic counts once, however often the job, or a server, is killed.

    pip install confluent-kafka pyarrow fsspec
    python examples/click_stream.py --brokers 10.0.0.9:9092 --topic clicks --checkpoints /data/run/clicks --config kvemb.yaml

A message is the id of an item, as decimal digits. The table `clicks` counts how often each was clicked: write your model's step in place of
`learn`. Where the job is in the topic stands in the `extra` of each checkpoint: the offset of the next message of each partition. Rows and
offsets are one checkpoint, so they cannot disagree. A job that is started again takes the rows back to the newest checkpoint, and reads on
from its offsets: what was pushed behind it is forgotten, and read again. Kafka's consumer groups and its own offsets are not used.

What must not live here: how a checkpoint is made (docs/checkpoints.md).
"""

import argparse
import sys
import time

import numpy as np
from confluent_kafka import Consumer, Message, TopicPartition
from numpy.typing import NDArray

import kvemb
from kvemb.checkpoint.checkpoint_log import CheckpointLog
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.cli import exit_in_order

TRAINER = "click-stream-0"  # a job that is started again takes the place of the one before, which is fenced
BATCH, KEEP, PATIENCE_S = 1000, 3, 30.0


class Clicks:
    """Messages of all partitions of a topic, each once, from where it is told.

    Args:
        brokers: as host:port,host:port.
        topic: its name.

    Attributes:
        offsets: by partition, the next message that is not given out yet.
    """

    def __init__(self, brokers: str, topic: str) -> None:
        self._topic, self.offsets = topic, dict[int, int]()
        # Offsets that are gone, or not there yet, are an error: going on elsewhere would skip clicks, or repeat them.
        options = {"group.id": TRAINER, "enable.auto.commit": False, "auto.offset.reset": "error"}
        self._consumer = Consumer({"bootstrap.servers": brokers, **options})

    def seek(self, offsets: dict[int, int]) -> None:
        """Go on at these offsets; a partition that has none begins with its oldest message."""
        about = self._consumer.list_topics(self._topic, timeout=PATIENCE_S).topics[self._topic]
        if about.error is not None:
            raise RuntimeError(f"topic {self._topic}: {about.error}")
        for partition in sorted(about.partitions):
            oldest, _ = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=PATIENCE_S)
            self.offsets[partition] = offsets.get(partition, oldest)
        self._consumer.assign([TopicPartition(self._topic, partition, offset) for partition, offset in self.offsets.items()])

    def take(self, timeout_s: float) -> NDArray[np.int64]:
        """Return the ids of the next messages, int64 [n]; of none after the time."""
        messages: list[Message] = self._consumer.consume(BATCH, timeout_s)
        for message in messages:
            if message.error() is not None:
                raise RuntimeError(f"topic {self._topic}: {message.error()}")
            self.offsets[message.partition()] = message.offset() + 1
        return np.array([message.value() for message in messages]).astype(np.int64)

    def close(self) -> None:
        """End the connections."""
        self._consumer.close()


def learn(cluster: kvemb.Cluster, ids: NDArray[np.int64]) -> None:
    """Train on a batch."""
    cluster.table("clicks").push(ids, np.full((len(ids), 1), -1.0, np.float32))  # SGD with lr 1: the row of each click gets 1 more


def resumed(cluster: kvemb.Cluster, folder: str) -> dict[int, int] | None:
    """Take the rows back to the newest checkpoint of a folder; return its offsets, None where there is none."""
    cluster.push({})  # takes the trainer's place: a job before this one that was only paused can push no more
    there = [one for one in list_checkpoints(folder) if one.manifest is not None]
    newest = max(there, key=lambda one: one.name, default=None)
    if newest is None or newest.manifest is None:
        return None
    cluster.load(newest.url)
    return {int(partition): offset for partition, offset in newest.manifest.extra["offsets"].items()}


def run(cluster: kvemb.Cluster, clicks: Clicks, folder: str, *, every: int, idle_s: float) -> None:
    """Train until nothing has come for so long.

    Args:
        folder: of the checkpoints.
        every: clicks from one checkpoint to the next.
        idle_s: 0: for ever.
    """
    log = CheckpointLog(cluster.save, folder, keep=KEEP)

    def save() -> None:
        cluster.flush()  # nothing is pushed until the checkpoint is there: it has the clicks up to these offsets, and no others
        cluster.push({}).wait_applied()  # in a sync job: still our place? Not the rows of a successor are saved with our offsets
        done = log.save(extra={"offsets": {str(partition): offset for partition, offset in clicks.offsets.items()}})
        print(f"saved {done.url} at {clicks.offsets}", flush=True)

    table = {"dim": 1, "optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros()}
    offsets = resumed(cluster, folder)
    cluster.create_table("clicks", exist_ok=True, **table)
    clicks.seek(offsets or {})
    print(f"{'begins' if offsets is None else 'goes on'} at {clicks.offsets}", flush=True)
    if offsets is None:
        save()  # rows that are ahead of every checkpoint could not be taken back
    n_unsaved, heard_s = 0, time.monotonic()
    while not idle_s or time.monotonic() - heard_s < idle_s:
        ids = clicks.take(timeout_s=0.5)
        if len(ids):
            learn(cluster, ids)
            n_unsaved, heard_s = n_unsaved + len(ids), time.monotonic()
        if n_unsaved >= every:
            save()
            n_unsaved = 0
    save()


def main(argv: list[str] | None = None) -> int:
    """Run the job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="kvemb.yaml", help="of the cluster (kvemb.yaml)")
    parser.add_argument("--brokers", required=True, help="host:port,host:port")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--checkpoints", required=True, metavar="URL", help="a folder that the shards reach, too")
    parser.add_argument("--every", type=int, default=1_000_000, metavar="N", help="clicks from one checkpoint to the next (1000000)")
    parser.add_argument("--idle", type=float, default=0.0, metavar="S", help="end when nothing has come for so long (0: never)")
    args = parser.parse_args(argv)
    exit_in_order()
    clicks = Clicks(args.brokers, args.topic)
    try:
        with kvemb.connect(args.config, trainer=TRAINER) as cluster:
            run(cluster, clicks, args.checkpoints, every=args.every, idle_s=args.idle)
    finally:
        clicks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
