"""Models that read an embedding's weight whole, or hold it beside the tree of modules, train as in torch, or are refused."""

import copy
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
import torch.nn.functional as F
from making_cluster import MakingCluster
from torch import nn

from kvemb import init, optim
from kvemb.errors import InvalidInputError
from trainer.torch import Embedding, distribute, materialize

N, DIM = 40, 3


class ScoresAll(nn.Module):
    """Items scored by the embedding that is looked up, as BERT4Rec, SASRec and GRU4Rec do."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(N, DIM, padding_idx=0)
        self.middle = nn.Linear(DIM, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.middle(self.item(ids)) @ self.item.weight.t(), ids.flip(0))


class TiedHead(ScoresAll):
    """A head whose parameter is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, N)
        self.head.weight = self.item.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.middle(self.item(ids))), ids.flip(0))


class Penalised(ScoresAll):
    """Weights in a list, whose squares are part of the loss, as in deepctr-torch."""

    def __init__(self) -> None:
        super().__init__()
        self.penalised = [([self.item.weight, *self.middle.parameters()], 0.1)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.middle(self.item(ids)).square().mean()
        for weights, factor in self.penalised:
            loss = loss + factor * sum(torch.sum(torch.square(weight)) for weight in weights)
        return loss


class HeldInAList(ScoresAll):
    """Looked up by an object that holds the module, and by a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.features = [{"embed": self.item}]
        self.look_up = self.item.forward

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.middle(self.features[0]["embed"](ids) * self.look_up(ids.flip(0))).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(torch.randint(N, (8,), generator=generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
}


READS_WHOLE = [ScoresAll, TiedHead, Penalised]  # so every row is in every step, and Adam's numbers are torch's


@pytest.mark.parametrize(("kind", "rule"), [*((kind, rule) for kind in READS_WHOLE for rule in MAKE), (HeldInAList, "sgd")])
def test_losses_and_rows_are_those_of_torch(kind: type[ScoresAll], rule: str) -> None:
    torch.manual_seed(1)
    theirs = kind()
    ours = copy.deepcopy(theirs)
    optimizer = MAKE[rule](ours.parameters())
    cluster = MakingCluster("sync")
    distribute(ours, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    assert len(list(ours.parameters())) == len(list(theirs.parameters())) - 1
    expected = train(theirs, MAKE[rule](theirs.parameters()))
    torch.testing.assert_close(torch.tensor(train(ours, optimizer)), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.item.weight.detach(), theirs.item.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(cluster.tables["item"].pull(range(N))), theirs.item.weight.detach(), rtol=1e-4, atol=1e-5)


def distributed(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return distribute(model, MakingCluster(), min_rows=10, optimizer=optimizer, quiet=True, **options)


def test_the_text_names_who_else_holds_a_weight_with_the_whole_path() -> None:
    text = str(distributed(HeldInAList()))
    assert "note: the replaced module is also held at features[0]['embed'], look_up.__self__; calls there look the table up" in text
    assert "held at head.weight; calls there look the table up, and a read of a weight pulls all rows" in str(distributed(TiedHead()))


def test_a_table_too_large_to_be_read_whole_says_so_where_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("trainer.torch.lookup.table_weight"), "WEIGHT_BYTES", 4 * N * DIM - 1)
    model = Penalised()
    text = str(distributed(model))
    assert "held at penalised[0][0][0]; calls there look the table up, and a read of a weight raises an error" in text
    with pytest.raises(InvalidInputError, match=r"rows of table 'item' are in a cluster.*up to 0 MiB are pulled whole"):
        model(torch.tensor([1]))
    assert not hasattr(model.item, "weight")


def test_shape_and_the_like_are_known_without_a_pull() -> None:
    model = ScoresAll()
    weight = model.item.weight
    (table,) = distributed(model).tables
    before = table.n_pulls
    assert (weight.shape, weight.dtype, weight.device.type, weight.size(0), len(weight), weight.dim(), weight.numel()) == (
        *(torch.Size([N, DIM]), torch.float32, "cpu", N, N, 2),
        N * DIM,
    )
    assert weight.requires_grad
    assert weight.grad is None
    assert repr(weight) == "TableWeight('item', shape=(40, 3))"
    assert weight in {weight}
    assert table.n_pulls == before


WRITES: dict[str, Callable[[Any], Any]] = {
    "set an item": lambda w: w.__setitem__(0, 0.0),
    "in place": lambda w: w.mul_(2),
    "+=": lambda w: w.__iadd__(1),
    "init": nn.init.zeros_,
    "data": lambda w: w.data,
    "set data": lambda w: setattr(w, "data", torch.zeros(N, DIM)),
    "freeze": lambda w: setattr(w, "requires_grad", False),
    "hook": lambda w: w.register_hook(lambda grad: grad),
    "out": lambda w: torch.add(torch.zeros(N, DIM), 1, out=w),
    "memory": lambda w: w.data_ptr(),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("write", WRITES)
def test_what_would_be_lost_is_refused(write: str) -> None:
    model = ScoresAll()
    held = model.item.weight
    distributed(model)
    for weight in (held, model.item.weight):
        with torch.no_grad(), pytest.raises(InvalidInputError, match=r"of table 'item' (is read-only|cannot be pickled)"):
            WRITES[write](weight)


def test_without_training_nothing_waits_for_a_step() -> None:
    model = ScoresAll()
    distributed(model)
    with torch.no_grad():
        assert not (model.item.weight * 1).requires_grad
    model.eval()
    assert not (model.item.weight * 1).requires_grad
    assert model.item.pending.lookups == []


@pytest.mark.parametrize("kind", [*READS_WHOLE, HeldInAList])
def test_a_plain_copy_is_the_original_again(kind: type[ScoresAll]) -> None:
    torch.manual_seed(1)
    theirs = kind()
    ours = copy.deepcopy(theirs)
    distributed(ours)
    plain = materialize(ours)
    assert [*plain.state_dict()] == [*theirs.state_dict()]
    assert len(list(plain.parameters())) == len(list(theirs.parameters()))
    make = MAKE["sgd"]
    assert train(plain, make(plain.parameters())) == train(theirs, make(theirs.parameters()))
    if kind is TiedHead:
        with pytest.raises(InvalidInputError, match="table 'item' is read whole by this model"):
            materialize(ours, {"item": [1, 2]})


def test_a_failure_gives_everybody_the_weight_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(import_module("trainer.torch.conversion.distribute"), "JoinedStep", failing)
    torch.manual_seed(1)
    model = TiedHead()
    twin = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="told to fail"):
        distributed(model)
    assert type(model.item.weight) is nn.Parameter
    assert [*model.state_dict()] == [*twin.state_dict()]
    make = MAKE["sgd"]
    assert train(model, make(model.parameters())) == train(twin, make(twin.parameters()))


def test_a_module_over_a_dense_table_of_ones_own_has_a_weight_too() -> None:
    cluster = MakingCluster()
    options = {"optimizer": optim.sgd(0.5), "initializer": init.constant(0.5), "exist_ok": False}
    module = Embedding(cluster.create_table("t", dim=2, num_ids=9, **options))
    assert module.weight.sum().item() == 9.0
    assert torch.equal(F.linear(torch.ones(1, 2), module.weight), torch.ones(1, 9))


@pytest.mark.parametrize("kind", [*READS_WHOLE, HeldInAList])
def test_a_model_in_16_bits_reads_its_weights_so_and_a_copy_reads_the_same_rows(kind: type[ScoresAll]) -> None:
    model, ids = kind(), torch.tensor([1, 2, 3])
    distributed(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied.eval()(ids), model(ids))
    with pytest.raises(InvalidInputError, match="is a copy"):
        (copied.train().item.weight * 1).sum()
    model.bfloat16()
    assert model.item.weight.dtype == (model.item.weight * 1).dtype == torch.bfloat16
    model(ids).backward()
    assert {leaf.grad.dtype for leaf in model.item.pending.leaves} == {torch.float32}
