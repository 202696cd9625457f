"""The inputs of a module are found by watching one batch, in many styles of models; where they are not, the reason is told."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer, prepare
from trainer.torch.loaders.feeds import without_move

N_BATCHES = 6


class Styled(nn.Module):
    """Two tables; `forward` as given."""

    def __init__(self, cluster: MemoryCluster, forward: Callable[["Styled", Any], Tensor]) -> None:
        super().__init__()
        self.one = Embedding(cluster.table("one", 2))
        self.bag = EmbeddingBag(cluster.table("two", 2), mode="sum")
        self.register_buffer("offsets", torch.tensor([0, 100, 200]))
        self.dense = nn.Linear(2, 1)
        self.style = forward

    def forward(self, batch: Any) -> Tensor:
        return self.style(self, batch)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Data:
    x: Tensor
    labels: tuple[Tensor, ...]


class Own:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.me = self


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 90, (4, 3), generator=generator)


BATCHES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "dict": lambda x: {"x": x, "label": x[:, 0].float()},
    "tuple": lambda x: (x, x[:, 0].float()),
    "nested": lambda x: [{"features": (x, "text")}, None],
    "namedtuple": lambda x: Named(x, x[:, 0]),
    "dataclass": lambda x: Data(x, (x,)),
    "object": Own,
    "slots": Slotted,
}
GET: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda b: b,
    "dict": lambda b: b["x"],
    "tuple": lambda b: b[0],
    "nested": lambda b: b[0]["features"][0],
    "namedtuple": lambda b: b.x,
    "dataclass": lambda b: b.x,
    "object": lambda b: b.x,
    "slots": lambda b: b.x,
}
USES: dict[str, Callable[[Styled, Tensor], Tensor]] = {
    "whole": lambda m, x: m.one(x).sum(dim=(1, 2)) + m.bag(x).sum(dim=1),
    "columns": lambda m, x: sum((m.one(x[:, i]) for i in range(3)), m.bag(x[:, 1:])).sum(dim=1),
    "offsets added": lambda m, x: m.one(x + m.offsets).sum(dim=(1, 2)) + m.bag((x + m.offsets) % 70).sum(dim=1),
    "keywords": lambda m, x: m.one(input=x).sum(dim=(1, 2)) + m.bag(x.reshape(-1), offsets=torch.arange(4) * 3).sum(dim=1),
    "weights": lambda m, x: m.bag(input=x, per_sample_weights=m.one(x).sum(dim=2)).sum(dim=1),
    "casts": lambda m, x: m.one(x.int().long().contiguous()).sum(dim=(1, 2)) + m.bag(x.to("cpu").to(torch.int32)).sum(dim=1),
    "parts": lambda m, x: sum(m.one(part) for part in x.unbind(1)).sum(dim=1) + m.bag(torch.cat([*x.split(1, dim=1), x], 1)).sum(dim=1),
    "masked": lambda m, x: m.one(torch.where(x > 50, x, torch.zeros_like(x))).sum(dim=(1, 2)) + m.bag(x.clamp(max=80)).sum(dim=1),
    "from floats": lambda m, x: m.one(torch.bucketize(x.float() / 9, torch.arange(9.0))).sum(dim=(1, 2)) + m.bag(x.T.T).sum(dim=1),
    "twice": lambda m, x: (m.one(x) + m.one(x + 1)).sum(dim=(1, 2)) + m.bag(x).sum(dim=1),
}


def draw(shape: str = "dict", n: int = N_BATCHES) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [BATCHES[shape](ids(generator)) for _ in range(n)]


def train(model: Styled, loader: Any) -> list[Tensor]:
    optimizer = SparseOptimizer(model)
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def check(style: Callable[[Styled, Any], Tensor], batches: list[Any]) -> Any:
    """Train with and without; every lookup but those of the first batch must have been foreseen. Returns the prepared loader."""
    plain, model = (Styled(MemoryCluster(), style) for _ in range(2))
    expected = train(plain, batches)
    n_pulled = plain.one.shared.n_pulled
    loader = prepare(model, batches, threads_num=1, capacity=1)
    got = train(model, loader)
    assert torch.equal(got[0], expected[0]), "the watched step is a step as any other"
    assert model.one.shared.n_pulled * len(batches) == n_pulled, loader.report
    assert not _get_current_function_mode_stack()
    return loader


@pytest.mark.parametrize("shape", list(BATCHES))
def test_batches_of_many_shapes(shape: str) -> None:
    check(lambda m, batch: USES["whole"](m, GET[shape](batch)), draw(shape))


@pytest.mark.parametrize("use", list(USES))
def test_models_of_many_styles(use: str) -> None:
    check(lambda m, batch: USES[use](m, batch["x"]), draw())


def test_what_the_loop_does_with_a_batch_is_part_of_it() -> None:
    cluster = MemoryCluster()
    model = Styled(cluster, lambda m, x: USES["whole"](m, x))
    optimizer = SparseOptimizer(model)
    loader = prepare(model, draw())
    for batch in loader:
        moved = {name: value.to("cpu", non_blocking=True) for name, value in batch.items()}
        model(moved["x"] * 2).sum().backward()
        optimizer.step()
    assert (model.one.shared.n_ahead, model.one.shared.n_pulled) == (2 * (N_BATCHES - 1), 2)


def test_bags_with_offsets_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for n in range(5, 5 + N_BATCHES):  # every batch has another length
        lengths = torch.randint(0, 4, (n,), generator=generator)
        batches.append({"ids": torch.randint(0, 50, (int(lengths.sum()),), generator=generator), "lengths": lengths})

    def style(m: Styled, batch: Any) -> Tensor:
        offsets = batch["lengths"].cumsum(0) - batch["lengths"]
        return m.bag(batch["ids"], offsets, per_sample_weights=torch.rand(len(batch["ids"])).abs() * 0 + 1).sum(dim=1)

    check(style, batches)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_a_compiled_model_computes_as_ever_while_it_is_watched() -> None:
    plain, model = (Styled(MemoryCluster(), lambda m, batch: USES["offsets added"](m, batch["x"])) for _ in range(2))
    compiled = torch.compile(model, backend="eager")
    for batch in prepare(compiled, draw()):
        assert torch.equal(compiled(batch), plain(batch))


def test_the_plan_is_kept_over_epochs() -> None:
    model = Styled(MemoryCluster(), lambda m, batch: USES["whole"](m, batch["x"]))
    loader = prepare(model, draw())
    for epoch in range(3):
        train(model, loader)
        assert model.one.shared.n_pulled == 2, epoch


def test_batches_that_the_loop_skips_are_no_reason_to_give_up() -> None:
    model = Styled(MemoryCluster(), lambda m, batch: USES["whole"](m, batch["x"]))
    optimizer = SparseOptimizer(model)
    for i, batch in enumerate(prepare(model, draw())):
        if i >= 2:
            model(batch).sum().backward()
            optimizer.step()
    assert (model.one.shared.n_ahead, model.one.shared.n_pulled) == (2 * (N_BATCHES - 3), 2)


def test_a_model_whose_modules_are_never_called_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Styled(MemoryCluster(), lambda m, batch: m.one.forward(batch["x"]).sum(dim=(1, 2)))
    with caplog.at_level(logging.WARNING, "kvemb"):
        train(model, prepare(model, draw(n=10)))
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "not their forward()" in line] == said
    assert len(said) == 1
    assert model.one.shared.n_pulled == 10


def test_modules_inside_other_models_are_told_by_their_path() -> None:
    inner = Styled(MemoryCluster(), lambda m, batch: USES["whole"](m, batch["x"]))
    model = nn.Sequential(inner)
    loader = prepare(model, draw())
    for batch in loader:
        model(batch)
    assert "looked up ahead: 0.one: batch['x']" in loader.report


def by_numbers(m: Styled, x: Tensor) -> Tensor:
    return m.one(torch.tensor(x.tolist())).sum(dim=(1, 2))


def in_place(m: Styled, x: Tensor) -> Tensor:
    filled = torch.zeros_like(x)
    filled[:] = x
    return m.one(filled).sum(dim=(1, 2))


def filled_behind_torch(m: Styled, x: Tensor) -> Tensor:
    filled = torch.empty_like(x)
    filled.numpy()[:] = x.numpy()
    return m.one(filled).sum(dim=(1, 2))


@torch.library.custom_op("kvemb_tests::exchanged", mutates_args=())
def exchanged(x: Tensor) -> Tensor:
    """Stand for a collective: pure as far as its schema says."""
    assert threading.current_thread() is threading.main_thread()
    return x.clone()


CANNOT_TELL: dict[str, tuple[Callable[[Styled, Tensor], Tensor], str]] = {
    "numbers": (by_numbers, "not made from the batch by torch functions .parts of it were read out by tolist."),
    "in place": (in_place, "changed in place by __setitem__"),
    "random": (lambda m, x: m.one(x + torch.randint(0, 2, (4, 3))).sum(dim=(1, 2)), "randint draws random numbers"),
    "of the model": (lambda m, x: m.one(m.dense(x[:, :2].float()).repeat(1, 3).topk(2).indices).sum(dim=(1, 2)), "computed by the model"),
    "without values": (filled_behind_torch, "empty_like makes them without values"),
    "of others": (lambda m, x: m.one(exchanged(x)).sum(dim=(1, 2)), "exchanged.* is no function of torch's own"),
    "constant": (lambda m, x: m.one(torch.tensor([1, 2])).sum() + 0 * x.float().sum(dim=1), "not made from the batch"),
}


@pytest.mark.parametrize("case", list(CANNOT_TELL))
def test_a_module_that_cannot_be_foreseen_is_named_with_the_reason_and_pulled_as_before(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    use, reason = CANNOT_TELL[case]
    model = Styled(MemoryCluster(), lambda m, batch: use(m, batch["x"]) + m.bag(batch["x"]).sum(dim=1))
    loader = prepare(model, draw())
    with caplog.at_level(logging.WARNING, "kvemb"):
        torch.manual_seed(0)
        losses = train(model, loader)
    assert any("rows of one are pulled" in record.getMessage() for record in caplog.records)
    assert re.search(f"pulled when called: one: .*{reason}.*features", loader.report), loader.report
    assert "looked up ahead: bag" in loader.report
    assert (model.one.shared.n_ahead, len(losses)) == (N_BATCHES - 1, N_BATCHES)


def test_a_module_that_the_first_batch_does_not_use_is_told() -> None:
    model = Styled(MemoryCluster(), lambda m, batch: m.one(batch["x"]).sum(dim=(1, 2)))
    loader = prepare(model, draw())
    train(model, loader)
    assert "pulled when called: bag: it was not called with the first batch" in loader.report


def test_a_wrong_forecast_costs_time_and_no_rows() -> None:
    """The loop branches on data: the trace of the first batch is wrong for others."""
    seen = []

    def style(m: Styled, batch: Any) -> Tensor:
        x = batch["x"] + 7 if int(batch["x"].sum()) % 2 else batch["x"]
        rows = m.one(x)
        seen.append((x.clone(), rows.detach().clone()))
        return rows.sum(dim=(1, 2))

    cluster = MemoryCluster()
    model = Styled(cluster, style)
    loader = prepare(model, draw(n=12), capacity=1)
    with torch.no_grad():
        for batch in loader:
            model(batch)
    table = cluster.tables["one"]
    assert all(np.array_equal(rows.numpy(), table.pull(x.numpy())) for x, rows in seen)
    n = model.one.shared.n_pulled - 1
    assert 0 < n < 11
    assert f"table 'one': {n} of 11 lookups were not foreseen, and pulled when they were made (one)" in loader.report


def test_a_forecast_that_never_comes_true_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    def style(m: Styled, batch: Any) -> Tensor:
        x = torch.zeros_like(batch["x"])
        x.numpy()[:] = batch["x"].numpy()  # behind torch's back
        return m.one(x).sum(dim=(1, 2)) + m.bag(batch["x"]).sum(dim=1)

    cluster = MemoryCluster()
    model = Styled(cluster, style)
    loader = prepare(model, draw(n=30), capacity=1)
    with caplog.at_level(logging.WARNING, "kvemb"):
        losses = train(model, loader)
    assert len(losses) == 30
    assert "table 'one' are no longer looked up ahead: 16 batches in a row" in caplog.text
    assert "looked up ahead: one" not in loader.report
    assert "pulled when called: one: what it was asked for was not what the first batch made expect" in loader.report
    assert model.one.shared.n_ahead == 29, "of the bag"
    assert cluster.tables["one"].n_pulls < 2 * 30 - 10


def test_validation_in_the_middle_of_the_watched_batch_is_told_as_what_it_is() -> None:
    model = Styled(MemoryCluster(), lambda m, batch: m.one(batch["x"]).sum(dim=(1, 2)))
    loader = prepare(model, draw())
    for i, batch in enumerate(loader):
        if i == 0:
            with torch.no_grad():
                model({"x": torch.tensor([[1, 2, 3]])})
        model(batch).sum().backward()
    assert "looked up ahead: one: batch['x']" in loader.report
    assert "pulled when called: one: only in some calls: cannot tell" in loader.report


def test_a_batch_that_does_not_fit_the_plan_is_pulled_when_it_is_used() -> None:
    batches = draw()
    batches[3]["x"] = batches[3]["x"][:2]  # the last batch of an epoch, say
    check_style: Callable[[Styled, Any], Tensor] = lambda m, b: m.one(b["x"].reshape(len(b["x"]), 3)).sum(dim=(1, 2))  # noqa: E731
    model = Styled(MemoryCluster(), check_style)
    train(model, prepare(model, batches))
    assert (model.one.shared.n_ahead, model.one.shared.n_pulled) == (N_BATCHES - 2, 2)


def test_modes_of_the_loop_come_and_go_while_a_batch_is_watched() -> None:
    class Other(TorchFunctionMode):
        n = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Other.n += 1
            return func(*args, **(kwargs or {}))

    model = Styled(MemoryCluster(), lambda m, batch: USES["whole"](m, batch["x"]))
    run: Iterator[Any] = iter(prepare(model, draw()))
    first = next(run)
    other = Other()
    other.__enter__()
    model(first)
    next(run)
    assert _get_current_function_mode_stack() == [other]
    other.__exit__(None, None, None)
    assert Other.n


def test_an_error_in_the_watched_step_leaves_no_mode_and_no_hook() -> None:
    model = Styled(MemoryCluster(), lambda m, batch: USES["whole"](m, batch["x"]))

    def fail() -> None:
        for batch in prepare(model, draw()):
            model(batch)
            raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        fail()
    assert not _get_current_function_mode_stack()
    assert not model.one._forward_pre_hooks


@pytest.mark.parametrize(
    ("args", "kwargs", "left"),
    [
        (("cuda:1",), {}, None),
        ((torch.device("cuda"),), {"non_blocking": True}, None),
        (("cuda", torch.int32), {}, (torch.int32,)),
        ((), {"device": "cuda", "dtype": torch.int16}, (torch.int16,)),
        ((torch.zeros(1, dtype=torch.uint8),), {}, (torch.uint8,)),
        ((torch.int8,), {"copy": True}, (torch.int8,)),
    ],
)
def test_a_move_to_a_device_is_left_out_and_a_cast_with_it_is_not(args: Any, kwargs: Any, left: Any) -> None:
    kept = without_move(Tensor.to, (torch.tensor([1]), *args), kwargs)
    assert (None if kept is None else kept[0][1:]) == left
    assert without_move(Tensor.cuda, (torch.tensor([1]), 0), {}) is None
