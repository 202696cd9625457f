"""Models over tables in 16 bits: results are of the model's type, as of torch's own modules, of rows that stay float32."""

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from creating_cluster import CreatingCluster
from making_cluster import MakingCluster
from torch import nn

from kvemb.errors import InvalidInputError
from trainer.torch import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    distribute,
    materialize,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row, self.bag, self.top = nn.Embedding(100, 4, padding_idx=0), nn.EmbeddingBag(100, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.row(ids[:, 0]) * self.bag(ids)).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_may_be_converted_after_distribute(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 100, (8, 3), generator=torch.Generator().manual_seed(1))
    model, cluster, twin = Model(), MakingCluster(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    model.to(dtype)
    loss, expected = model(ids), twin.to(dtype)(ids)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0.05)
    loss.backward()
    optimizer.step()
    ids_pushed, grads = cluster.pushes[0]["bag"]
    assert grads.dtype == "float32"
    expected.backward()
    torch.testing.assert_close(torch.from_numpy(grads), twin.bag.weight.grad[torch.from_numpy(ids_pushed)].float(), rtol=0.05, atol=0.05)
    assert materialize(model).bag.weight.dtype == dtype
    model.float()
    assert model(ids).dtype == torch.float32


def test_collections_follow_the_models_type() -> None:
    features = KeyedJaggedTensor.from_lists({"page": [[1, 2], [3]]})
    bags = EmbeddingBagCollection([EmbeddingBagConfig(name="page", embedding_dim=4, num_embeddings=9)], CreatingCluster())
    rows = EmbeddingCollection([EmbeddingConfig(name="page", embedding_dim=4, num_embeddings=9)], CreatingCluster())
    assert bags.bfloat16()(features).values().dtype == torch.bfloat16
    assert rows.half()(features)["page"].values().dtype == torch.float16


def test_momentum_that_a_scheduler_sets_on_a_table_without_is_refused_by_name() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distribute(model, MakingCluster(), min_rows=10, optimizer=optimizer, quiet=True)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    model(torch.ones(2, 3, dtype=torch.int64)).backward()
    with pytest.raises(InvalidInputError, match=r"table 'row'.*momentum of SGD is 0\.95 now.*OneCycleLR.*cycle_momentum=False"):
        optimizer.step()


def test_momentum_cycles_where_the_table_has_it() -> None:
    model, cluster = Model(), MakingCluster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.85, max_momentum=0.95)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=torch.int64)).backward()
        optimizer.step()
        scheduler.step()
    sent = [hyper["row"]["momentum"] for hyper in cluster.hyper]
    assert sent[0] == 0.95
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == 3
