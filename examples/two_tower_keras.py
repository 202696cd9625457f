"""Train a two-tower retrieval model in Keras, on any backend, on rows that live in Redis, Valkey or memcached, and print its recall.

    KERAS_BACKEND=jax python examples/two_tower_keras.py
    python examples/two_tower_keras.py --users 1000000 --items 200000 --config kvemb.yaml

The same data, model and loss as examples/two_tower_torch.py. It is a plain Keras model: `distribute` takes its two embeddings to the
cluster, and `prepare` has fit pull their rows ahead. --local trains it as it is, its embeddings by the towers' Adam.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from dlrm.place import add_arguments, opened
from keras import layers, ops
from two_tower.interests import Pairs, best_of_popular, draw, log_shares

import kvemb
from kvemb.cli import exit_in_order
from kvemb.errors import KvembError
from kvemb.keras import distribute, prepare

TEMPERATURE = 0.1
NEVER = -1e9  # as a logit; -inf has no gradient on JAX


class TwoTower:
    """Vectors of users and items, of length 1, and the model that trains them; its label is always 0.

    Source: Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", RecSys 2019.
    """

    def __init__(self, n_users: int, n_items: int, dim: int, lr: float) -> None:
        user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
        log_q = keras.Input((), name="log_q")  # of each item's share of all pairs
        self.users, self.items = (
            keras.Model(user, _tower("users", user, n_users, dim)),
            keras.Model(item, _tower("items", item, n_items, dim)),
        )
        of_user, of_item = self.users(user), self.items(item)
        right = ops.sum(of_user * of_item, axis=1) / TEMPERATURE - log_q
        all_items = ops.matmul(of_user, ops.transpose(of_item)) / TEMPERATURE - log_q
        wrong = ops.where(ops.equal(ops.expand_dims(item, 1), item), NEVER, all_items)  # the right one, once more or not, is no wrong one
        self.model = keras.Model([user, item, log_q], ops.concatenate([ops.expand_dims(right, 1), wrong], axis=1))
        self.model.compile(keras.optimizers.Adam(lr), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def recall(self, wanted: Pairs, n_items: int, k: int) -> float:
        """Return how many of the items to be found are among the k best of all items."""
        items = ops.convert_to_numpy(self.items(np.arange(n_items)))
        hits = 0
        for part in np.array_split(wanted, -(-len(wanted) // 1024)):
            products = ops.convert_to_numpy(self.users(part[:, 0])) @ items.T
            hits += int((np.argpartition(-products, k, axis=1)[:, :k] == part[:, 1:]).sum())
        return hits / len(wanted)


def _tower(name: str, ids: Any, n: int, dim: int) -> Any:
    rows = layers.Embedding(n, dim, embeddings_initializer=keras.initializers.RandomNormal(stddev=0.1), name=name)(ids)
    return ops.normalize(_dense(2 * dim, dim)(layers.ReLU()(_dense(dim, 2 * dim)(rows))), axis=1)


def _dense(n_in: int, n_out: int) -> Any:
    """Weights and bias uniform in ± 1/sqrt(inputs), as torch's."""
    first = [keras.initializers.RandomUniform(-(n_in**-0.5), n_in**-0.5) for _ in range(2)]
    return layers.Dense(n_out, kernel_initializer=first[0], bias_initializer=first[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0, or 1 after an error that was told in one line on standard error."""
    args = _arguments(argv)
    keras.utils.set_random_seed(args.seed)
    try:
        with opened(args) as cluster:
            _run(args, cluster)
    except KvembError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, cluster: Any) -> None:
    pairs, wanted = draw(args.users, args.items, np.random.default_rng(args.seed))
    print(best_of_popular(pairs, wanted, args.items, args.k))
    towers = TwoTower(args.users, args.items, args.dim, args.lr)
    if cluster:
        distribute(towers.model, cluster, min_rows=1, optimizer=kvemb.optim.adagrad(lr=args.row_lr), names="two_tower.{}".format)
        prepare(towers.model)
    x, y = [pairs[:, 0], pairs[:, 1], log_shares(pairs)[pairs[:, 1]]], np.zeros(len(pairs), np.int32)
    for epoch in range(1, args.epochs + 1):
        (loss,) = towers.model.fit(x, y, batch_size=args.batch_size, verbose=0).history["loss"]
        if cluster:
            cluster.flush()
        print(f"epoch {epoch}: loss {loss:.3f}, recall@{args.k} {towers.recall(wanted, args.items, args.k):.3f}", flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a two-tower retrieval model in Keras on rows that live in key-value storage.")
    add_arguments(parser)
    for name, default, what in (
        ("users", 5000, "users"), ("items", 2000, "items"), ("dim", 16, "weights per row"), ("epochs", 5, "times through all pairs"),
        ("batch-size", 512, "pairs per step"), ("k", 50, "items to return"), ("seed", 0, "of everything drawn"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--lr", type=float, default=0.003, help="of the towers' Adam (default 0.003)")
    parser.add_argument("--row-lr", type=float, default=0.1, help="of the rows' Adagrad (default 0.1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_in_order()
    sys.exit(main())
