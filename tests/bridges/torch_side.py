"""The contract's models in PyTorch: on tables, and on torch's own embeddings."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from kvemb import optim
from kvemb.torch import Embedding, EmbeddingBag, SparseOptimizer, materialize, prepare

RULES = {"sgd": optim.sgd(0.5), "adagrad": optim.adagrad(0.1), "adam": optim.adamw(0.01, weight_decay=0.0)}
PLAIN = {"sgd": (torch.optim.SGD, 0.5), "adagrad": (torch.optim.Adagrad, 0.1), "adam": (torch.optim.Adam, 0.01)}
REPEATS = True


class Model(torch.nn.Module):
    def __init__(self, user: Any, item: Any) -> None:
        super().__init__()
        self.user, self.item = user, item

    def forward(self, batch: Any) -> Any:
        logits = (self.user(batch["user"]) * self.item(batch["item"])).sum(1)
        return ((logits - batch["label"]) ** 2).mean()


class Bags(torch.nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.word = EmbeddingBag(table, mode="sum", padding_idx=0)

    def forward(self, batch: Any) -> Any:
        bags = self.word(batch["word"], per_sample_weights=batch["weight"])
        return ((bags.sum(1) - batch["label"]) ** 2).mean()


class Steps:
    """A model and the optimizer of its tables."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._optimizer = model, SparseOptimizer(model)

    def step(self, batch: Any) -> float:
        loss = self._model(tensors(batch))
        loss.backward()
        self._optimizer.step()
        return float(loss)


class Trained(Steps):
    """Two tables, and a step over them."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        super().__init__(Model(Embedding(tables["user"]), Embedding(tables["item"])))

    def forget(self) -> None:
        self._optimizer.zero_grad()

    def evaluated(self, batch: Any) -> float:
        self._model.eval()
        with torch.no_grad():
            return float(self._model(tensors(batch)))

    def ahead(self, data: Iterable[Any], **options: Any) -> Iterable[Any]:
        return prepare(self._model, [tensors(batch) for batch in data], threads_num=1, capacity=2, **options)

    def exported(self, tables: Mapping[str, Any], batch: Any) -> float:
        return float(materialize(self._model)(tensors(batch)))


class TrainedBags(Steps):
    """A table of bags: ids [b, n] that 0 fills up, and a weight for each."""

    def __init__(self, table: Any) -> None:
        super().__init__(Bags(table))


def tensors(batch: Any) -> dict[str, Any]:
    return {name: torch.from_numpy(of) if isinstance(of, np.ndarray) else of for name, of in batch.items()}


def on_its_own(rows: Mapping[str, Any], data: list[dict[str, Any]], kind: str) -> list[float]:
    made = {id(of): torch.nn.Embedding.from_pretrained(torch.tensor(of), freeze=False) for of in rows.values()}
    model = Model(*(made[id(rows[name])] for name in ("user", "item")))
    rule, rate = PLAIN[kind]
    optimizer, losses = rule(model.parameters(), lr=rate), []
    for batch in data:
        loss = model(tensors(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def turned(towers: Mapping[str, Any], optimizer_of: Any, data: list[Any]) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict(towers)
    optimizer = optimizer_of(model)
    for tower, batch in data:
        optimizer.zero_grad()
        ((model[tower](torch.from_numpy(batch[tower])).sum(1) - torch.from_numpy(batch["label"])) ** 2).mean().backward()
        optimizer.step()
    return model


def turns(tables: Mapping[str, Any], data: list[Any]) -> None:
    turned({name: Embedding(table) for name, table in tables.items()}, SparseOptimizer, data)


def turns_alone(rows: Mapping[str, Any], data: list[Any]) -> dict[str, Any]:
    towers = {name: torch.nn.Embedding.from_pretrained(torch.tensor(of), freeze=False) for name, of in rows.items()}
    model = turned(towers, lambda model: torch.optim.Adam(model.parameters(), lr=0.01), data)
    return {name: model[name].weight.detach().numpy() for name in rows}
