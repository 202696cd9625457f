"""torch.compile of a model over tables: lookups run as they are, and training has the same result as without it."""

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from making_cluster import MakingCluster
from torch import nn

import kvemb
from trainer.torch import SparseOptimizer, clip_grad_norm_, distribute


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


def stepped(*, compiled: bool, joined: bool) -> tuple[list[float], MakingCluster]:
    """Train with a whole step in one function, as tutorials compile it: backward, clipping and the optimizers' steps."""
    model, cluster = Model(), MakingCluster()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adagrad(model.parameters(), lr=0.1)]
    rule = optimizers[0] if joined else kvemb.optim.adagrad(lr=0.1)
    distribute(model, cluster, min_rows=10, optimizer=rule, carry_weights=True, quiet=True)
    if not joined:
        optimizers = [SparseOptimizer(model), torch.optim.Adagrad(model.top.parameters(), lr=0.1)]

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    run, generator = torch.compile(step, backend="eager") if compiled else step, torch.Generator().manual_seed(0)
    return [run(torch.randint(0, 100, (8, 3), generator=generator)).item() for _ in range(5)], cluster


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*is deprecated:DeprecationWarning")  # torch's compiler, of torch
@pytest.mark.parametrize("joined", [True, False])
def test_a_step_that_is_compiled_pushes_what_it_pushed(joined: bool) -> None:
    expected, _ = stepped(compiled=False, joined=joined)
    losses, cluster = stepped(compiled=True, joined=joined)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(cluster.pushes) == 5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_weight_that_is_read_whole_is_pulled_outside_of_what_is_compiled() -> None:
    def losses(backend: str | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4), nn.Linear(4, 100))
        model[2].weight = model[0].weight
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        distribute(model, MakingCluster(), min_rows=10, optimizer=optimizer, quiet=True)
        run = torch.compile(model, backend=backend) if backend else model
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = run(torch.arange(8 + step)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses("aot_eager") == pytest.approx(losses(None), rel=1e-6)


def test_a_full_graph_is_refused_with_what_to_do_instead() -> None:
    model = Model()
    distribute(model, MakingCluster(), min_rows=10, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    torch._dynamo.reset()  # what other tests compiled with graph breaks would be used
    run = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Leave fullgraph=True out.*kvemb\.torch\.materialize\(model\)"):
        run(torch.randint(0, 100, (8, 3)))
