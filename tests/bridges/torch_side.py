"""The contract's model in PyTorch: on tables, and on torch's own embeddings."""

from typing import Any

import torch

from kvemb import optim
from kvemb.torch import Embedding, SparseOptimizer, prepare

RULES = {"sgd": optim.sgd(0.5), "adagrad": optim.adagrad(0.1), "adam": optim.adamw(0.01, weight_decay=0.0)}
PLAIN = {"sgd": (torch.optim.SGD, 0.5), "adagrad": (torch.optim.Adagrad, 0.1), "adam": (torch.optim.Adam, 0.01)}


class Model(torch.nn.Module):
    def __init__(self, user: Any, item: Any) -> None:
        super().__init__()
        self.user, self.item = user, item

    def forward(self, batch: Any) -> Any:
        logits = (self.user(batch["user"]) * self.item(batch["item"])).sum(1)
        return ((logits - batch["label"]) ** 2).mean()


def on_tables(tables: dict[str, Any], data: list[dict[str, Any]], ahead: str | None = None) -> list[float]:
    model = Model(Embedding(tables["user"]), Embedding(tables["item"]))
    optimizer = SparseOptimizer(model)
    batches: Any = [{name: torch.from_numpy(of) for name, of in batch.items()} for batch in data]
    losses = []
    for batch in batches if ahead is None else prepare(model, batches, consistency=ahead, threads_num=1, capacity=2):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_its_own(rows: dict[str, Any], data: list[dict[str, Any]], kind: str) -> list[float]:
    model = Model(*(torch.nn.Embedding.from_pretrained(torch.from_numpy(rows[name]), freeze=False) for name in ("user", "item")))
    rule, rate = PLAIN[kind]
    optimizer, losses = rule(model.parameters(), lr=rate), []
    for batch in data:
        loss = model({name: torch.from_numpy(of) for name, of in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluated(tables: dict[str, Any], batch: dict[str, Any]) -> float:
    model = Model(Embedding(tables["user"]), Embedding(tables["item"])).eval()
    with torch.no_grad():
        return float(model({name: torch.from_numpy(of) for name, of in batch.items()}))
