"""torch.compile of a model over tables: lookups run as they are, and training is what it is without it."""

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from making_cluster import MakingCluster
from torch import nn

from trainer.torch import distribute


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row, self.bag, self.top = nn.Embedding(100, 4), nn.EmbeddingBag(100, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.relu(self.row(ids[:, 0]) * self.bag(ids))).sum()


def trained(backend: str | None) -> tuple[list[float], MakingCluster]:
    model, cluster = Model(), MakingCluster()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, carry_weights=True, quiet=True)
    run = torch.compile(model, backend=backend) if backend else model
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(6):
        loss = run(torch.randint(0, 100, (8 + step, 3), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, cluster


# torch.compile looks at every tensor's .grad, and hides the warning unless warnings are errors, as here.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_learns_what_the_model_learns(backend: str) -> None:
    expected, _ = trained(None)
    losses, cluster = trained(backend)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(cluster.pushes) == 6
