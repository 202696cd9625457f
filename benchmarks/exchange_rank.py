"""One rank of `exchange`, a process of its own (`WorkerProcess`): trains when it is told to, with rows exchanged or without."""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import kvemb
from benchmarks.exchange import ALONE, EXCHANGED
from benchmarks.ids import sampler
from trainer.torch import EmbeddingBag, SparseOptimizer, prepare

_SEED, _LR, _IDS_PER_LINE = 3, 0.01, 8


class _SumOfBags(nn.Module):
    """Logits of lines: the sum of all weights of their rows. It costs next to nothing."""

    def __init__(self, tables: list[kvemb.Table]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(EmbeddingBag(table, mode="sum") for table in tables)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """From ids int64 [tables, b, n] to logits float32 [b]."""
        return torch.stack([bag(of) for bag, of in zip(self.bags, ids, strict=True)]).sum(dim=(0, 2))


class Rank:
    """This rank: a connection, and a model with a loader for either way.

    Args:
        url: of the cluster.
        rank, world: of the job.
        rendezvous: URL of a file where the ranks meet.
        options: n_tables, n_lines of each rank's batch, dim, n_rows, n_batches.
    """

    def __init__(self, url: str, rank: int, world: int, rendezvous: str, options: Mapping[str, int]) -> None:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
        self._rank, self._options = rank, options
        self._cluster = kvemb.connect(url, trainer=f"trainer-{rank}", timeout_s=60)
        self._batches = self._draw(world)
        self._turn: list[Any] = []
        self._counts = Counter[str]()
        self._ways: dict[str, tuple[_SumOfBags, SparseOptimizer, Any]] = {}

    def enter(self) -> dict[str, object]:
        """Take this rank's place: a first step without rows. In turn, the trainers' order is that of the ranks, and so are sums."""
        self._cluster.push({})
        return {}

    def open(self) -> dict[str, object]:
        """Make the tables, with equal rows, and the models."""
        self._count()
        for way in (ALONE, EXCHANGED):
            dim, adam = self._options["dim"], kvemb.optim.adam(_LR)
            names = [f"{at}: {way}" for at in range(self._options["n_tables"])]
            tables = [self._cluster.create_table(name, dim=dim, optimizer=adam, reduce="mean", exist_ok=True) for name in names]
            ids = np.arange(self._options["n_rows"])
            for at, table in enumerate(tables):
                if at % distributed.get_world_size() == self._rank:
                    table.assign(ids, np.random.default_rng(at).uniform(-0.01, 0.01, (len(ids), table.dim)))
            distributed.barrier()
            model = _SumOfBags(tables)
            group = None if way == ALONE else distributed.group.WORLD
            features = {f"bags.{at}": lambda batch, at=at: batch[0][at] for at in range(len(tables))}
            self._ways[way] = (
                model,
                SparseOptimizer(model),
                prepare(model, self._turn, features=features, exchange=group, consistency="exact"),
            )
        return {"torch": torch.__version__}

    def turn(self, way: str, first: int, n_steps: int) -> dict[str, object]:
        """Train on some batches."""
        model, optimizer, loader = self._ways[way]
        self._turn[:] = [self._batches[step % len(self._batches)] for step in range(first, first + n_steps)]
        self._counts.clear()
        distributed.barrier()
        losses, waited_s, began_s, cpu_s = [], loader.waited.working_s, time.perf_counter(), time.process_time()
        for ids, labels in loader:
            loss = binary_cross_entropy_with_logits(model(ids), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()).hex())
        spent = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}
        spent["waited_s"] = loader.waited.working_s - waited_s
        self._cluster.flush()
        return {"losses": losses, **spent, **self._counts}

    def _draw(self, world: int) -> list[Any]:
        """This rank's share of every batch: Zipf ids, and labels."""
        o, rng = self._options, np.random.default_rng(_SEED)
        draws = [sampler("zipf", o["n_rows"], seed) for seed in range(o["n_tables"])]
        mine = slice(self._rank * o["n_lines"], (self._rank + 1) * o["n_lines"])
        batches = []
        for _ in range(o["n_batches"]):
            ids = np.stack([draw(world * o["n_lines"] * _IDS_PER_LINE).reshape(-1, _IDS_PER_LINE) for draw in draws])
            labels = (rng.random(world * o["n_lines"]) < 0.3).astype(np.float32)
            batches.append((torch.from_numpy(np.ascontiguousarray(ids[:, mine])), torch.from_numpy(labels[mine])))
        return batches

    def _count(self) -> None:
        """Count the rows that this process reads from storage and pushes."""
        pull, push = self._cluster.pull_versions, self._cluster.push

        def counting_pull(ids: Mapping[str, Any], **options: Any) -> Any:
            self._counts["n_read"] += sum(len(of) for of in ids.values())
            return pull(ids, **options)

        def counting_push(tables: Mapping[str, Any], **options: Any) -> Any:
            self._counts["n_pushed"] += sum(len(ids) for ids, _ in tables.values())
            return push(tables, **options)

        self._cluster.pull_versions, self._cluster.push = counting_pull, counting_push  # type: ignore[method-assign]


def main() -> None:
    """Answer requests until standard input ends."""
    rank: Rank | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if rank is None:
                rank, reply = Rank(**request), {}
            else:
                reply = getattr(rank, request.pop("do"))(**request)
        except Exception as error:  # reported to the parent, which decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
