"""The question `policies`: what do admission and eviction cost a model on clicks whose ids drift, and what memory do they save?"""

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from benchmarks.train import STORES
from benchmarks.train_loop import TIMEOUT_S
from kvemb import admit, evict
from kvemb.arrays.hashing import mix64
from kvemb.local_cluster import LocalCluster

_DIM, _SEED = 16, 5
_LEARNING_RATE, _STD = 0.3, 0.3
_ONE_OFF = 0.3  # of the clicks are of users who never come again
_SHARPNESS = 6.0  # of the true odds: the larger, the fewer clicks are chance
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Clicks:
    """A log of (user, item, clicked). Items come, are popular while they are new, and go; so do some users, after one line.

    Args:
        n_lines: of a step.
        n_users: who stay.
        n_new: items that are new with each step.
        window: items that may be shown: the newest.
    """

    n_lines: int
    n_users: int
    n_new: int
    window: int

    def step(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Return the lines of a step: users and items int64 [n], whether they clicked float32 [n]."""
        rng = np.random.default_rng((_SEED, number))
        users = (self.n_users * rng.random(self.n_lines) ** 3).astype(np.int64)
        one_off = np.flatnonzero(rng.random(self.n_lines) < _ONE_OFF)
        users[one_off] = self.n_users + number * self.n_lines + one_off
        newest = self.window + number * self.n_new
        items = newest - 1 - (self.window * rng.random(self.n_lines) ** 2).astype(np.int64)
        odds = _SHARPNESS * np.einsum("nd,nd->n", _truth(users, 1), _truth(items, 2))
        return users, items, (rng.random(self.n_lines) < _sigmoid(odds)).astype(np.float32)


def policies(options: argparse.Namespace) -> Report:
    """What do admission and eviction cost a model on clicks whose ids drift, and what memory do they save?

    The same log is trained four times, each on a cluster of its own (one node, one shard): without a policy, with `admit.after(--after)`,
    with `evict.keep` (as many users as stay and twice the items that may be shown), and with both. Two towers of one embedding each, dim
    16, Adagrad: a click's probability is the sigmoid of the dot product. Three lines of ten are of users who never come again, and each
    step shows --new items that were never shown. Read: "AUC" is of the second half of the steps, each predicted before it is trained;
    rows, and MB of storage, at the end; "held back" is the share of gradients that the admission took.
    """
    clicks = Clicks(options.batch, options.users, options.new, options.window)
    keep = (evict.keep(options.users), evict.keep(2 * options.window))
    rules = {
        "no policy": (admit.any(), (evict.never(), evict.never())),
        f"after({options.after})": (admit.after(options.after), (evict.never(), evict.never())),
        "keep": (admit.any(), keep),
        "both": (admit.after(options.after), keep),
    }
    lines = [Line(name, _trained(clicks, admission, evictions, options)) for name, (admission, evictions) in rules.items()]
    settings = {"store": options.store, "dim": _DIM, "optimizer": "adagrad", "steps": options.steps, "batch": options.batch}
    more = {"users": options.users, "new": options.new, "window": options.window}
    return Report("policies", [Section({**settings, **more}, lines=lines)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `policies` can be asked."""
    parser.add_argument("--store", choices=STORES, default="redis", help="storage kind (redis)")
    parser.add_argument("--steps", type=whole(2), default=1000, metavar="N", help="steps (1000)")
    parser.add_argument("--batch", type=whole(2), default=4096, metavar="N", help="lines of a step (4096)")
    parser.add_argument("--users", type=whole(1), default=10_000, metavar="N", help="users who stay (10000)")
    parser.add_argument("--new", type=whole(1), default=10, metavar="N", help="new items of a step (10)")
    parser.add_argument("--window", type=whole(1), default=2000, metavar="N", help="items that may be shown (2000)")
    parser.add_argument("--after", type=whole(1), default=3, metavar="N", help="of the admission (3)")


def _trained(
    clicks: Clicks, admission: admit.Admission, evictions: tuple[evict.Eviction, evict.Eviction], options: argparse.Namespace
) -> dict[str, float]:
    spec, seen, aucs, n_held, n_pushed = kvemb.optim.adagrad(lr=_LEARNING_RATE), set[int](), list[float](), 0, 0
    with LocalCluster(options.store, shards=1, memory_mb=4096, durability="os") as cluster, kvemb.connect(cluster.url) as opened:
        users, items = (
            opened.create_table(name, dim=_DIM, optimizer=spec, initializer=kvemb.init.normal(std=_STD), admission=admission, eviction=rule)
            for name, rule in zip(("user", "item"), evictions, strict=True)
        )
        for number in range(options.steps):
            user_ids, item_ids, clicked = clicks.step(number)
            u, v = users.pull(user_ids, timeout_s=TIMEOUT_S), items.pull(item_ids, timeout_s=TIMEOUT_S)
            guess = _sigmoid(np.einsum("nd,nd->n", u, v))
            if number >= options.steps // 2:
                aucs.append(auc(guess, clicked))
            off = (guess - clicked)[:, None].astype(np.float32)
            acks = users.push(user_ids, off * v, timeout_s=TIMEOUT_S), items.push(item_ids, off * u, timeout_s=TIMEOUT_S)
            for ack in acks:
                ack.wait_applied(TIMEOUT_S)
                n_held, n_pushed = n_held + ack.held_back, n_pushed + ack.n_rows
            seen.update(user_ids.tolist(), (-1 - item_ids).tolist())
        used = opened.status().nodes[0].used_bytes
        figures: dict[str, float] = {"AUC": float(np.mean(aucs)), "rows": len(users) + len(items), "ids seen": len(seen)}
        return figures | {"storage MB": used / 1e6, "held back": n_held / n_pushed}


def auc(guess: Floats, clicked: Floats) -> float:
    """Return the share of pairs of a click and no click whose guesses are in order.

    Example:
        >>> auc(np.array([0.1, 0.4, 0.35, 0.8], np.float32), np.array([0, 0, 1, 1], np.float32))
        0.75
    """
    order = np.argsort(guess, kind="stable")
    ranks = np.empty(len(order))
    ranks[order] = np.arange(1, len(order) + 1)
    n_clicks = float(clicked.sum())
    n_others = len(clicked) - n_clicks
    return float((ranks[clicked > 0].sum() - n_clicks * (n_clicks + 1) / 2) / max(n_clicks * n_others, 1.0))


def _truth(ids: NDArray[np.int64], kind: int) -> Floats:
    """What an id is like in truth: float32 [n, 4], uniform in -1 to 1."""
    counted: NDArray[np.uint64] = (ids[:, None] * 8 + np.arange(4)).astype(np.uint64)
    words = mix64(counted ^ np.uint64(kind << 60))
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23)) - np.float32(1.0)


def _sigmoid(x: Floats) -> Floats:
    values: Floats = np.float32(1) / (np.float32(1) + np.exp(-x))
    return values
