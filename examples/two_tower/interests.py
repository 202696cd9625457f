"""Pairs of a user and an item that were drawn from hidden interests. NumPy only, for every framework's program."""

import numpy as np
from numpy.typing import NDArray

N_INTERESTS, PER_USER, FAITHFUL = 20, 20, 0.9
Pairs = NDArray[np.int64]
"""[n, 2]: a user and an item."""


def interests_of(n_items: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw which of N_INTERESTS each item is of, [n_items]; the first that `draw` draws."""
    return rng.permutation(n_items) % N_INTERESTS


def draw(n_users: int, n_items: int, rng: np.random.Generator) -> tuple[Pairs, Pairs]:
    """Draw PER_USER pairs per user to train on, and one more to be found: every user has two interests and mostly takes items of these."""
    interest = interests_of(n_items, rng)
    by_interest = [np.flatnonzero(interest == one) for one in range(N_INTERESTS)]
    users = np.repeat(np.arange(n_users), PER_USER + 1)
    own = rng.integers(0, N_INTERESTS, (n_users, 2))[users, rng.integers(0, 2, len(users))]
    own = np.where(rng.random(len(users)) < FAITHFUL, own, rng.integers(0, N_INTERESTS, len(users)))
    rank = rng.random(len(users)) ** 2  # some items are more popular than others
    items = np.array([by_interest[one][int(at * len(by_interest[one]))] for one, at in zip(own.tolist(), rank.tolist(), strict=True)])
    pairs = np.stack([users, items], axis=1).reshape(n_users, PER_USER + 1, 2)
    return pairs[:, 1:].reshape(-1, 2), pairs[:, 0]


def log_shares(pairs: Pairs) -> NDArray[np.float32]:
    """Return the log of each item's share of all pairs; an item of none counts as of one."""
    return np.log(np.bincount(pairs[:, 1]).clip(1) / len(pairs)).astype(np.float32)


def best_of_popular(pairs: Pairs, wanted: Pairs, n_items: int, k: int) -> str:
    """Say what recommending the most popular items to everybody would get."""
    popular = np.argsort(-np.bincount(pairs[:, 1], minlength=n_items))[:k]
    return f"recall@{k} of the most popular items: {np.isin(wanted[:, 1], popular).mean():.3f}, at random: {k / n_items:.3f}"
