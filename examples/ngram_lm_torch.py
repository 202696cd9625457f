"""Train a small GPT with an n-gram memory whose rows live in Redis, Valkey or memcached: two ranks, the Python standard library's text.

    python examples/ngram_lm_torch.py
    python examples/ngram_lm_torch.py --local          # the same rows in each rank's memory: the same losses, to the last bit
    python examples/ngram_lm_torch.py --kill-at 120    # rank 1 is killed before that step: the same losses still

Beside each byte's own embedding the model reads two rows of a table of a million: one for the last two bytes, one for the last three, by a
hash of them. Which rows a batch needs follows from its bytes, so they are pulled while the batch before it is trained; the cluster works in
sync mode, and the rows are exactly those of training without it (docs/async-lookup.md). Dense weights are averaged over the ranks by gloo.
Rows and dense weights are saved every 50 steps; when a rank dies, all start again from there.
"""

import argparse
import os
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F

import kvemb
from kvemb.arrays.segment_sum import group_by_id
from kvemb.demo.corpus import source_files
from kvemb.local_cluster.processes import free_ports
from kvemb.own import import_own
from kvemb.schema.table_def import TableDef
from kvemb.torch import Embedding, RowCheckpoints, SparseOptimizer, connect_rank, prepare

WORLD, WIDTH, ROW_DIM, HEADS, GRAMS = 2, 64, 16, 4, (2, 3)
RULE, FIRST = kvemb.optim.adagrad(lr=0.05), kvemb.init.normal(std=0.02)


class SmallGpt(nn.Module):
    """A decoder over bytes; `memory` looks n-grams up."""

    def __init__(self, memory: nn.Module, context: int, n_layers: int) -> None:
        super().__init__()
        self.memory = memory
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(context, WIDTH)
        self.from_memory = nn.Linear(len(GRAMS) * ROW_DIM, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss of the next bytes: "text" int64 [b, l + 1], "grams" int64 [b, l, 2]."""
        text, n = batch["text"][:, :-1], batch["text"].shape[1] - 1
        rows = self.memory(batch["grams"]).flatten(2)  # [b, l, 2 * ROW_DIM]
        x = self.token(text) + self.place(torch.arange(n)) + self.from_memory(rows)
        x = self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(n), is_causal=True)
        return F.cross_entropy(self.out(x).flatten(0, 1), batch["text"][:, 1:].flatten())


class RowsOfEveryRank(nn.Module):
    """The table in each rank's memory: gradients of all ranks are gathered, summed and applied as the shards of a cluster do it."""

    def __init__(self, definition: TableDef) -> None:
        super().__init__()
        assert definition.num_ids is not None
        self._optimizer = import_own("paramserver.optim").build_optimizer(definition.optimizer)
        self._rows = definition.initial_rows(np.arange(definition.num_ids, dtype=np.uint64))
        self._state = self._optimizer.initial_state(definition.num_ids, definition.dim)
        self._n_steps = 0

    def forward(self, ids: Tensor) -> Tensor:
        self._ids, at = torch.unique(ids, return_inverse=True)
        self._leaf = torch.from_numpy(self._rows[self._ids.numpy()]).requires_grad_()
        return F.embedding(at, self._leaf)

    def step(self) -> None:
        """Apply what backward left on every rank."""
        gathered: list[Any] = [None] * WORLD
        assert self._leaf.grad is not None
        distributed.all_gather_object(gathered, (self._ids.numpy().astype(np.uint64), self._leaf.grad.numpy()))
        every_id, gradients = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
        groups = group_by_id(every_id)
        ids, sums = groups.ids, groups.sum(gradients)
        self._n_steps += 1
        self._rows[ids], self._state[ids] = self._optimizer.update(
            self._rows[ids], self._state[ids], sums / np.float32(WORLD), {}, self._n_steps
        )


class Batches:
    """The batches of one rank from a step on: any stretches of text, with the ids of their n-grams."""

    def __init__(self, text: NDArray[np.uint8], rank: int, begin: int, args: argparse.Namespace) -> None:
        self._text, self._args, self._seed, self._begin = text, args, args.seed + rank, begin

    def __len__(self) -> int:
        return int(self._args.steps) - self._begin

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rng, args = np.random.default_rng(self._seed), self._args
        most = max(GRAMS) - 1  # bytes before a stretch that its first n-grams have
        for number in range(args.steps):
            starts = rng.integers(most, len(self._text) - args.context - 1, args.batch_size)
            if number < self._begin:
                continue
            part = self._text[starts[:, None] + np.arange(-most, args.context + 1)]  # uint8 [b, most + context + 1]
            yield {"text": torch.from_numpy(part[:, most:].astype(np.int64)), "grams": torch.from_numpy(ids_of(part[:, :-1], args.rows))}


def ids_of(text: NDArray[np.uint8], n_rows: int) -> NDArray[np.int64]:
    """Return the row of the last n bytes at each byte but the first ones, for each n: int64 [b, l, number of n].

    Example:
        >>> text = np.frombuffer(b"abcabc", np.uint8)[None]
        >>> found = ids_of(text, 1_000_000)
        >>> found.shape, bool((found[0, 0] == found[0, 3]).all()), bool((found[0, 0] == found[0, 1]).any())
        ((1, 4, 2), True, False)
    """
    most, heads = max(GRAMS), []
    for n in GRAMS:
        number = np.full((), n, np.uint64)  # the n-gram as one number, hashed by a multiplication that mixes its upper bits
        for back in range(n - 1, -1, -1):
            number = number << np.uint64(8) | text[:, most - 1 - back : text.shape[1] - back].astype(np.uint64)
        heads.append((number * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(24)) % np.uint64(n_rows))
    return np.stack(heads, axis=2).astype(np.int64)


def read_text(n_bytes: int) -> NDArray[np.uint8]:
    """Return the first bytes of the standard library's files, one behind the other."""
    parts, size = [], 0
    for path in source_files(Path(sysconfig.get_path("stdlib"))):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= n_bytes:
            break
    return np.frombuffer(b"".join(parts)[:n_bytes], np.uint8)


def train(rank: int, url: str, folder: Path, port: int, args: argparse.Namespace) -> None:
    """One rank, from the newest checkpoint of the folder on; rank 0 prints the mean loss of each step of all ranks."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    with ExitStack() as stack:
        stack.callback(distributed.destroy_process_group)
        definition = TableDef("ngram", ROW_DIM, RULE, FIRST, reduce="mean", num_ids=args.rows)
        memory: nn.Module = RowsOfEveryRank(definition) if not url else _in_cluster(stack, url, args.rows)
        torch.manual_seed(args.seed)
        model = SmallGpt(memory, args.context, args.layers)
        dense = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("memory")], lr=args.lr)
        saved = Saved(model, dense, folder) if url else None
        begin = saved.begin() if saved else 0
        batches: Any = Batches(read_text(args.text_mb << 20), rank, begin, args)
        if url:
            rows, batches = SparseOptimizer(model), prepare(model, batches, features={"memory": "grams"}, consistency="exact")
        else:
            rows = memory
        for number, batch in enumerate(batches, begin + 1):
            if saved and (number - 1) % args.save_every == 0:  # the first before any step: rows can always be taken back
                saved.save(number - 1)
            if rank == 1 and number == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(batch)
            loss.backward()
            for group in dense.param_groups:
                for weight in group["params"]:
                    distributed.all_reduce(weight.grad)
                    weight.grad /= WORLD
            rows.step()
            dense.step()
            dense.zero_grad()
            told = loss.detach().clone()
            distributed.all_reduce(told)
            if rank == 0 and (number % args.every == 0 or number == args.steps):
                print(f"step {number}: loss {told.item() / WORLD:.9g}", flush=True)


class Saved:
    """Checkpoints of all that a run has learned: rows by kvemb, and dense weights in one file, which says the step of its rows."""

    def __init__(self, model: nn.Module, dense: torch.optim.Optimizer, folder: Path) -> None:
        self._model, self._dense, self._path = model, dense, folder / "dense.pt"
        self._rows = RowCheckpoints(model, str(folder / "rows"), keep=2)

    def begin(self) -> int:
        """Take back what was saved last; return the number of steps that it had seen."""
        if not self._path.exists():
            return 0
        found = torch.load(self._path, weights_only=True)
        self._model.load_state_dict(found["model"])
        self._dense.load_state_dict(found["optimizer"])
        self._rows.follow()
        return int(found["step"])

    def save(self, step: int) -> None:
        """Save on all ranks, between two steps."""
        self._rows.save()
        if distributed.get_rank() == 0:
            new = self._path.with_suffix(".new")
            torch.save({"step": step, "model": self._model.state_dict(), "optimizer": self._dense.state_dict()}, new)
            new.replace(self._path)


def _in_cluster(stack: ExitStack, url: str, n_rows: int) -> Embedding:
    cluster = stack.enter_context(connect_rank(url))
    return Embedding(
        cluster.create_table("ngram", dim=ROW_DIM, optimizer=RULE, initializer=FIRST, reduce="mean", num_ids=n_rows, exist_ok=True)
    )


def start(url: str, folder: Path, args: argparse.Namespace) -> Any:
    """Start the ranks; return torch's handle on their processes. Without a URL rows are in memory, and nothing is saved in the folder."""
    return multiprocessing.start_processes(train, (url, folder, free_ports(1)[0], args), nprocs=WORLD, join=False, start_method="spawn")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program."""
    args = arguments(argv)
    with ExitStack() as stack:
        url = "" if args.local else stack.enter_context(kvemb.local(args.store, nodes=2, shards=2, mode="sync", trainers=WORLD))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        while True:
            ranks = start(url, folder, args)
            try:
                while not ranks.join():
                    pass
                return 0
            except multiprocessing.ProcessExitedException as died:  # torch ends the others
                if args.kill_at is None:
                    raise
                print(f"{died}: all start again", flush=True)
                args.kill_at = None


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with an n-gram memory that lives in key-value storage.")
    where = parser.add_mutually_exclusive_group()
    kinds = ("valkey", "redis", "memcached")
    where.add_argument("--store", choices=kinds, default="valkey", help="of a cluster for this run (default valkey)")
    where.add_argument("--local", action="store_true", help="keep the rows in each rank's memory instead, for comparison")
    for name, default, what in (
        ("rows", 1_000_000, "of the table"), ("steps", 200, "of training"), ("context", 128, "bytes of a stretch"),
        ("batch-size", 16, "stretches per step and rank"), ("layers", 2, "of the model"), ("text-mb", 8, "MB of text"),
        ("every", 10, "steps from one line to the next"), ("save-every", 50, "steps from one checkpoint to the next, of rows in a cluster"),
        ("seed", 0, "of everything drawn"), ("kill-at", None, "step before which rank 1 is killed, once"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=what if default is None else f"{what} (default {default})")
    parser.add_argument("--lr", type=float, default=0.003, help="of the dense weights' AdamW (default 0.003)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
