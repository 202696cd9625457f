"""A trainer that goes on learning from clicks, in a process of its own; its queue stands for a topic of Kafka or the like."""

import argparse
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dlrm.place import started
from two_tower_torch import TwoTower

import kvemb
from kvemb.torch import Embedding, SparseOptimizer, prepare
from two_tower.data import Batches
from two_tower.interests import Pairs, draw
from two_tower.served import ITEMS, USERS, export

DIM, EPOCHS, BATCH, OF_A_CLICK, STEPS_PER_CLICK = 16, 3, 512, 32, 5
_START_S, _END_S = 300, 10


@dataclass(frozen=True)
class TrainedOnline:
    """A model that is served, and goes on learning.

    Attributes:
        url: of the cluster with its rows.
        folder: with its dense part, see `two_tower.served`.
        clicks: takes pairs of a user and an item that the trainer is to learn.
    """

    url: str
    folder: Path
    clicks: Any


@contextmanager
def trained(args: argparse.Namespace) -> Iterator[TrainedOnline]:
    """Train a model with a process of its own, on the cluster of `dlrm.place`, and have it learn clicks until the end of the block."""
    context = multiprocessing.get_context("spawn")
    clicks, ready = context.Queue(), context.Event()
    with started(args) as url, tempfile.TemporaryDirectory() as folder:
        words = (url, Path(folder), clicks, ready, args.users, args.items)
        trainer = context.Process(target=_train, args=words, name="trainer", daemon=True)
        trainer.start()
        try:
            until_s = time.monotonic() + _START_S
            while not ready.wait(0.1):
                if not trainer.is_alive() or time.monotonic() > until_s:
                    raise SystemExit("the trainer has ended, or is not done; what it said stands above")
            yield TrainedOnline(url, Path(folder), clicks)
        finally:
            clicks.put(None)
            trainer.join(_END_S)
            trainer.kill()


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Declare how much there is to learn."""
    parser.add_argument("--users", type=int, default=1000, help="users (default 1000)")
    parser.add_argument("--items", type=int, default=400, help="items (default 400)")


def _train(url: str, folder: Path, clicks: Any, ready: Any, n_users: int, n_items: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both processes; the other one says when to end
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    pairs, _ = draw(n_users, n_items, rng)
    with kvemb.connect(url) as cluster:
        first, rule = kvemb.init.normal(std=0.1), kvemb.optim.adagrad(lr=0.1)
        users, items = (
            Embedding(cluster.create_table(name, dim=DIM, optimizer=rule, initializer=first, num_ids=n, exist_ok=True))
            for name, n in ((USERS, n_users), (ITEMS, n_items))
        )
        model = TwoTower(users, items, DIM)
        rows = SparseOptimizer(model)
        towers = torch.optim.Adam([*model.user_tower.parameters(), *model.item_tower.parameters()], lr=0.01)
        for _ in range(EPOCHS):
            for batch in prepare(model, Batches(pairs, BATCH, rng)):
                _step(model, batch, rows, towers)
        cluster.flush()
        export(model, folder, n_items)
        ready.set()
        while (click := clicks.get()) is not None:
            for _ in range(STEPS_PER_CLICK):
                _step(model, next(iter(Batches(with_click(pairs, click, rng), BATCH, rng))), rows)  # rows alone: the towers are served


def with_click(pairs: Pairs, click: tuple[int, int], rng: np.random.Generator) -> Pairs:
    """Return a batch, [BATCH, 2]: a click several times, among others that keep it from moving all items."""
    others = pairs[rng.integers(0, len(pairs), BATCH - OF_A_CLICK)]
    return np.concatenate([others, np.tile(np.array(click), (OF_A_CLICK, 1))])


def _step(model: TwoTower, batch: Any, *optimizers: Any) -> None:
    loss = model(batch)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
