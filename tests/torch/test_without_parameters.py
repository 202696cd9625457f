"""A model of large embeddings only, after distribute: it has a parameter of no elements, which tells its device and dtype."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from making_cluster import MakingCluster
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from kvemb import init
from kvemb.errors import InvalidInputError
from trainer.torch import Embedding, SparseOptimizer, clip_grad_norm_, distribute, materialize

IDS = torch.tensor([1, 2, 3])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entity, self.relation = nn.Embedding(40, 4), nn.Embedding(30, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.entity(ids) + self.relation(ids)).square().sum()


def taken(**options: Any) -> tuple[Model, torch.optim.Optimizer, MakingCluster]:
    model, cluster = Model(), MakingCluster()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True, **options)
    return model, optimizer, cluster


def test_it_says_where_it_is_and_of_which_type() -> None:
    model, *_ = taken()
    parameter, _ = model.parameters()
    assert (parameter.device.type, parameter.dtype, parameter.requires_grad) == ("cpu", torch.float32, True)
    assert [name for name, _ in model.named_parameters()] == ["entity.rows_in_cluster", "relation.rows_in_cluster"]
    assert model.get_parameter("entity.rows_in_cluster") is parameter
    assert sum(param.numel() for param in model.parameters()) == 0
    assert next(model.bfloat16().parameters()).dtype == torch.bfloat16
    assert next(model.parameters()) is parameter, "whoever holds it goes on with it"
    assert model(IDS).dtype == torch.bfloat16
    assert next(model.to("meta").parameters()).device.type == "cpu", "where rows are looked up"


def test_weights_from_the_meta_device_leave_it_on_the_cpu() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(20_000, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distribute(model, MakingCluster(), optimizer=optimizer, names={"0": "t"}, initializer=init.zeros(), quiet=True)
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad], ids=lambda kind: kind.__name__)
def test_an_optimizer_can_be_made_of_it_and_hears_who_pushes(kind: type) -> None:
    model, *_ = taken()
    new = kind(model.parameters(), lr=0.1)
    model(IDS).backward()
    new.step()
    model(IDS).backward()
    with pytest.raises(InvalidInputError, match="Make the optimizer first"):
        new.step()


def test_training_is_torchs() -> None:
    model, optimizer, cluster = taken(carry_weights=True)
    theirs = Model()
    beside = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for _ in range(5):
        norms = []
        for one, steps in ((model, optimizer), (theirs, beside)):
            steps.zero_grad()
            one(IDS).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0))
            steps.step()
        torch.testing.assert_close(*norms)
    torch.testing.assert_close(torch.from_numpy(cluster.tables["entity"].pull(IDS.numpy())), theirs.entity.weight.detach()[IDS])
    assert optimizer.state_dict()["param_groups"][0]["params"] == []
    assert optimizer.state_dict()["state"] == {}


def test_a_loop_over_the_parameters_of_a_part_freezes_its_rows() -> None:
    model, optimizer, cluster = taken(carry_weights=True)
    before = {name: table.pull(IDS.numpy()).copy() for name, table in cluster.tables.items()}
    for parameter in model.entity.parameters():
        parameter.requires_grad = False
    twin = copy.deepcopy(model)
    SparseOptimizer(twin)
    assert (twin.entity.recording, twin.relation.recording) == (False, True)
    model(IDS).backward()
    optimizer.step()
    assert (cluster.tables["entity"].pull(IDS.numpy()) == before["entity"]).all()
    assert (cluster.tables["relation"].pull(IDS.numpy()) != before["relation"]).all()
    model.requires_grad_(True)
    model(IDS).backward()
    optimizer.step()
    assert (cluster.tables["entity"].pull(IDS.numpy()) != before["entity"]).all()


def test_without_a_gradient_clipping_finds_nothing() -> None:
    model, *_ = taken()
    assert clip_grad_norm_(model, 1.0) == torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_states_have_nothing_of_it() -> None:
    model, *_ = taken()
    state = model.state_dict()
    assert list(state) == ["entity._extra_state", "relation._extra_state"]
    model.load_state_dict(state)
    fresh, *_ = taken()
    assert fresh.load_state_dict(state).missing_keys == []


def test_copies_have_one_of_their_own_and_plain_copies_have_weights() -> None:
    model, *_ = taken()
    twin = copy.deepcopy(model)
    (mine, _), (its, _) = model.parameters(), twin.parameters()
    assert mine is not its
    SparseOptimizer(twin)
    assert [name for name, _ in twin.named_parameters()] == ["entity.rows_in_cluster", "relation.rows_in_cluster"]
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    restored = pickle.loads(pickle.dumps(its))
    assert restored.shape == (0, 4)


def test_a_plain_copy_has_its_weights_and_no_more() -> None:
    model, *_ = taken()
    assert [name for name, _ in materialize(model).named_parameters()] == ["entity.weight", "relation.weight"]


def test_only_parts_that_have_no_other_have_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Embedding(20, 4)), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distribute(model, MakingCluster(), min_rows=10, optimizer=optimizer, names={"0.0": "t"}, quiet=True)
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert next(model[0].parameters()).shape == (0, 4), "libraries ask a part of a model where it is"
    one_by_one = [name for part in model.modules() for name, _ in part.named_parameters(recurse=False)]
    assert one_by_one == ["weight", "bias"], "who collects them module by module collects what the model has"
    assert next(torch.compile(nn.Sequential(model[0]), backend="eager").parameters()).shape == (0, 4)


def test_what_is_opened_for_evaluation_has_it_too() -> None:
    _, _, cluster = taken()
    model = Model()
    distribute(model, cluster, min_rows=10, quiet=True)
    assert next(model.parameters()).device.type == "cpu"
    assert not list(Embedding(cluster.tables["entity"]).parameters()), "a module that somebody makes has no parameter, as before"


def main(folder: Path) -> None:
    """A rank: part of a model, without parameters of its own, inside of one that DistributedDataParallel trains."""
    distributed.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=0, world_size=1)
    part, *_ = taken()
    model = nn.ModuleDict({"part": part, "top": nn.Linear(1, 1)})
    model.forward = lambda ids: model["top"](part(ids).view(1, 1)).sum()
    parallel = DistributedDataParallel(model)
    for _ in range(3):
        parallel(IDS).backward()
    assert next(part.parameters()).device.type == "cpu"
    assert not next(part.parameters()).requires_grad
    assert part.entity.recording, "its rows are trained all the same"
    assert copy.deepcopy(part).entity.recording
    distributed.destroy_process_group()


@pytest.mark.full
def test_distributed_data_parallel_does_not_wait_for_its_gradient(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (root, Path(__file__).parent, Path(__file__).parents[1]))),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
