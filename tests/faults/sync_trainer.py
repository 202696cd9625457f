"""A trainer of a sync job as a process of its own: every push adds 1 to its own column of every row, which so counts its steps.

It touches `<name>.ready`, then waits for the file `go`; before the step of `--gate` it touches `<name>.gate` and waits for `gate`.
With `--die-in` it kills itself in the middle of that step: when shard 0 has applied it and shard 1 has had nothing of it.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from jobs import PATIENCE_S, eventually, ids_of_shard

import kvemb
from kvemb.client.push_sender import PushSender
from kvemb.errors import KvembError, ShardUnavailableError

NAMES = "abc"
IDS = np.concatenate([ids_of_shard(shard, 2, 20) for shard in (0, 1)])
_LOOK_S = 2.0


def open_table(cluster: kvemb.Cluster) -> kvemb.Table:
    """The job's table: a column for each trainer."""
    return cluster.create_table("steps", dim=len(NAMES), optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), exist_ok=True)


def die_on_the_way_to_shard_1(table: kvemb.Table, column: int, step: int) -> None:
    """From now on the next part to shard 1 is the end of this process, once shard 0 has applied its own."""
    send = PushSender.send

    def send_or_die(self: PushSender, *args: object) -> None:
        if self.channel.shard == 1:
            eventually(lambda: table.pull(IDS[:1], timeout_s=_LOOK_S)[0, column] == step, "shard 0 did not apply its part")
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, *args)  # type: ignore[arg-type]

    PushSender.send = send_or_die  # type: ignore[method-assign]


def train(table: kvemb.Table, args: argparse.Namespace) -> None:
    """Push step by step, each once the last is applied; say so while it is not."""
    grads = np.zeros((len(IDS), len(NAMES)), np.float32)
    grads[:, NAMES.index(args.name)] = -1
    for step in range(1, args.steps + 1):
        if step == args.gate:
            (args.folder / f"{args.name}.gate").touch()
            await_file(args.folder / "gate")
        if step == args.die_in:
            die_on_the_way_to_shard_1(table, NAMES.index(args.name), step)
        ack = table.push(IDS, grads, timeout_s=PATIENCE_S)
        while not ack.applied:
            try:
                ack.wait_applied(timeout_s=_LOOK_S)
            except ShardUnavailableError as error:
                print(f"still waiting: {error}", flush=True)


def await_file(path: Path) -> None:
    """Wait for a sign of the test."""
    deadline_s = time.monotonic() + 2 * PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"nobody made {path.name}"
        time.sleep(0.02)


def main() -> int:
    """Run one trainer; 3 when its session ended with an error, which it prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True, choices=tuple(NAMES))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--gate", type=int, default=0)
    parser.add_argument("--die-in", type=int, default=0)
    args = parser.parse_args()
    try:
        with kvemb.connect(args.config, trainer=args.name, timeout_s=PATIENCE_S) as cluster:
            table = open_table(cluster)
            (args.folder / f"{args.name}.ready").touch()
            await_file(args.folder / "go")
            train(table, args)
    except KvembError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
