"""The DeepFM example in torch: its own embeddings with dense gradients, the faster of its two ways at this size, and kvemb tables."""

from typing import Any

import torch

import kvemb
from benchmarks.deepfm import example
from benchmarks.in_frameworks.problem import EPSILON, Contender, Loop, Problem
from benchmarks.in_frameworks.stored_tables import AHEAD, MAX_UNAPPLIED, stored_tables
from kvemb.torch import Embedding, EmbeddingBag, SparseOptimizer, prepare

VERSIONS = {"torch": str(torch.__version__)}


def contenders(problem: Problem, where: str) -> dict[str, Contender]:
    """torch's own, ours, and ours with rows pulled ahead; `where` is the cluster's URL."""
    torch.set_num_threads(1)
    cluster = kvemb.connect(where)
    return {"own": _own(problem), "ours": _ours(problem, cluster, ""), "ours, ahead": _ours(problem, cluster, ".ahead")}


def _own(problem: Problem) -> Loop:
    weights = {name: torch.from_numpy(rows.copy()) for name, rows in problem.rows.items()}
    linear = torch.nn.EmbeddingBag.from_pretrained(weights["linear"], freeze=False, mode="sum")
    factors = torch.nn.Embedding.from_pretrained(weights["factors"], freeze=False)
    adam = torch.optim.Adam([linear.weight, factors.weight], lr=float(problem.lr), eps=EPSILON)
    _, train = _trained(problem, linear, factors, adam)
    batches = _batches(problem, problem.positions)
    return Loop(lambda indices: [batches[i] for i in indices], train, lambda: None)


def _ours(problem: Problem, cluster: Any, suffix: str) -> Loop:
    tables = stored_tables(cluster, problem, f"torch{suffix}", kvemb.optim.adam(float(problem.lr), eps=EPSILON))
    linear, factors = EmbeddingBag(tables["linear"], mode="sum"), Embedding(tables["factors"])
    optimizer = SparseOptimizer(torch.nn.ModuleList([linear, factors]), max_unapplied=MAX_UNAPPLIED)
    model, train = _trained(problem, linear, factors, optimizer)
    batches = _batches(problem, problem.ids)
    turn: list[Any] = []
    features = {"linear": lambda batch: (batch.ids, batch.offsets), "factors": lambda batch: batch.ids}
    loader = prepare(model, turn, features=features, **AHEAD) if suffix else turn

    def load(indices: Any) -> Any:
        turn[:] = [batches[i] for i in indices]
        return loader

    return Loop(load, train, cluster.flush)


def _trained(problem: Problem, linear: Any, factors: Any, optimizer: Any) -> tuple[Any, Any]:
    hidden = tuple(kernel.shape[1] for kernel in problem.kernels[:-1])
    model = example("model").DeepFM(linear, factors, dim=problem.dim, n_fields=problem.ids.shape[2], hidden=hidden)
    layers = [layer for layer in model.perceptron if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for layer, kernel in zip(layers, problem.kernels, strict=True):
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.zero_()
    # Its bias stays 0: the models in the other frameworks have none beside the perceptron's.
    optimizers = [optimizer, torch.optim.Adam(model.perceptron.parameters(), lr=float(problem.lr), eps=EPSILON)]
    return model, lambda batch: example("training").train_step(model, batch, optimizers)


def _batches(problem: Problem, ids: Any) -> list[Any]:
    n_lines, n_fields = problem.ids.shape[1:]
    offsets = torch.arange(n_lines) * n_fields
    line = torch.arange(n_lines).repeat_interleave(n_fields)
    arrays = torch.from_numpy
    return [
        example("model").Batch(arrays(ids[i]).reshape(-1), arrays(problem.values[i]).reshape(-1), offsets, line, arrays(problem.labels[i]))
        for i in range(len(ids))
    ]
