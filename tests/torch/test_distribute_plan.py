"""Which embeddings distribute replaces, leaves or refuses; nothing is connected, nothing is changed."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster
from torch import nn
from torch.nn.utils import parametrizations

from kvemb.errors import InvalidInputError
from trainer.bridge import convert_model
from trainer.bridge.filled_tables import Site
from trainer.torch import Embedding
from trainer.torch.conversion.distribute import TorchModel


def make_plan(model: nn.Module, *options: Any, **more: Any) -> tuple[list[Site], list[tuple[str, str]]]:
    return convert_model.make_plan(TorchModel(model), *options, **more)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(100, 4)
        self.towers = nn.ModuleDict({"item": nn.Sequential(nn.EmbeddingBag(50, 2, padding_idx=3), nn.Linear(2, 1))})
        self.small = nn.Embedding(9, 4)


def test_tables_are_named_by_path_and_small_or_frozen_or_named_embeddings_stay() -> None:
    model = Model()
    model.frozen = nn.Embedding(70, 4).requires_grad_(False)
    model.local = nn.Embedding(80, 4)
    sites, left = make_plan(model, 10, leave=["local"])
    assert [(site.table, site.n_rows, site.dim, site.padding) for site in sites] == [
        ("user", 100, 4, []),
        ("towers.item.0", 50, 2, [3]),
    ]
    assert dict(left) == {
        "small": "9 rows, fewer than min_rows=10",
        "frozen": "frozen: it is not trained",
        "local": "leave=[…] names it",
    }


def test_names_are_a_mapping_or_a_function() -> None:
    assert [site.table for site in make_plan(Model(), 10, {"user": "u"})[0]] == ["u", "towers.item.0"]
    assert [site.table for site in make_plan(Model(), 10, lambda path: f"dlrm.{path}")[0]] == ["dlrm.user", "dlrm.towers.item.0"]


def test_modules_with_one_weight_are_one_table_and_so_is_a_module_at_two_places() -> None:
    model = Model()
    model.again = model.user
    model.bag = nn.EmbeddingBag(100, 4, _weight=model.user.weight)
    model.bag.weight = model.user.weight
    sites, _ = make_plan(model, 10, {"again": "shared"})
    assert [(site.table, [place.paths[0] for place in site.places]) for site in sites] == [
        ("shared", ["user", "bag"]),
        ("towers.item.0", ["towers.item.0"]),
    ]


class OwnForward(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class ShiftedAndScaled(nn.Embedding):
    embed_scale = 2.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + 1) * self.embed_scale


def tied(model: Model) -> None:
    model.decoder = nn.Linear(4, 100, bias=False)
    model.decoder.weight = model.user.weight


def tied_to_one_that_stays(model: Model) -> None:
    model.other = nn.Embedding(100, 4, padding_idx=3, max_norm=1.0)
    model.other.weight = model.user.weight


def tied_by_memory(model: Model) -> None:
    model.decoder = nn.Linear(4, 100, bias=False)
    model.decoder.weight = nn.Parameter(model.user.weight.data)


def hooked(model: Model) -> None:
    model.user.register_forward_hook(lambda module, args, out: None)


def own_forward(model: Model) -> None:
    model.user = OwnForward(100, 4)


def nearly_scaled(model: Model) -> None:
    model.user = ShiftedAndScaled(100, 4)


def max_norm(model: Model) -> None:
    model.user = nn.Embedding(100, 4, max_norm=1.0)


def by_frequency(model: Model) -> None:
    model.user = nn.EmbeddingBag(100, 4, scale_grad_by_freq=True)


def parametrized(model: Model) -> None:
    parametrizations.weight_norm(model.user)


def half(model: Model) -> None:
    model.user = nn.Embedding(100, 4, dtype=torch.bfloat16)


def weight_hook(model: Model) -> None:
    model.user.weight.register_hook(lambda grad: grad * 0)


def post_accumulate_hook(model: Model) -> None:
    model.user.weight.register_post_accumulate_grad_hook(lambda weight: None)


def optimizer_in_backward(model: Model) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch's own
        from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    apply_optimizer_in_backward(torch.optim.SGD, model.user.parameters(), {"lr": 0.1})


def state_dict_hook(model: Model) -> None:
    model.user.register_state_dict_post_hook(lambda *args: None)


def in_a_list(model: Model) -> None:
    model.towers["item"].every = [model.user]


def in_a_dict(model: Model) -> None:
    model.by_name = {"user": model.user}


def in_a_set(model: Model) -> None:
    model.known = {model.user.weight}


def weight_in_a_tuple(model: Model) -> None:
    model.pair = (1, model.user.weight.data)


def weight_beside(model: Model) -> None:
    model.__dict__["rows"] = model.user.weight


def view_beside(model: Model) -> None:
    model.first = model.user.weight.detach()[:10]


class OwnCall(nn.Embedding):
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return super().__call__(input) * 2


def own_call(model: Model) -> None:
    model.user = OwnCall(100, 4)


def own_parameters(model: Model) -> None:
    model.user.bias = nn.Parameter(torch.zeros(4))
    model.user.register_buffer("scale", torch.ones(1))
    model.user.projection = nn.Linear(4, 4)


class Holder:
    __slots__ = ("kept",)

    def __init__(self, kept: object) -> None:
        self.kept = kept


def in_an_object(model: Model) -> None:
    model.config = SimpleNamespace(fields={"user": [Holder(model.user)]})


def in_a_dict_of_lists(model: Model) -> None:
    model.by_field = {"user": [model.user]}


def bound_method(model: Model) -> None:
    model.look_up = model.user.forward


def partial_function(model: Model) -> None:
    model.look_up = partial(torch.add, other=model.user.weight)


def closure(model: Model) -> None:
    user = model.user
    model.look_up = lambda ids: user(ids)


def default_of_a_function(model: Model) -> None:
    model.look_up = lambda ids, *, rows=model.user: rows(ids)


def in_a_module_of_its_own(model: Model) -> None:
    model.every = [nn.Sequential(nn.Sequential(model.user))]


def in_a_hook_of_another_module(model: Model) -> None:
    user = model.user
    model.small.register_forward_hook(lambda module, args, out: out + user(args[0]))


REFUSED: dict[Callable[[Model], None], str] = {
    tied_by_memory: "tied to 'decoder.weight'",
    hooked: "'user': it has hooks",
    own_forward: "'user': OwnForward has a forward of its own",
    nearly_scaled: "'user': ShiftedAndScaled has a forward of its own; compute that in the module around it",
    own_call: "'user': OwnCall has a forward of its own",
    own_parameters: "'user': it has bias, scale, projection beside its weight, which would be lost",
    max_norm: "'user': max_norm",
    by_frequency: "'user': scale_grad_by_freq",
    parametrized: "'user': its weight is computed from others",
    half: "'user': its weight is torch.bfloat16",
    weight_hook: "'user': its weight has hooks",
    post_accumulate_hook: "'user': its weight has hooks",
    optimizer_in_backward: r"'user': apply_optimizer_in_backward gave its weight an optimizer",
    state_dict_hook: "'user': it has hooks",
    weight_in_a_tuple: r"'user': attribute 'pair' \(tuple\) holds a view of its weight, at pair\[1\]",
    view_beside: r"'user': attribute 'first' \(Tensor\) holds a view of its weight, at first",
}


@pytest.mark.parametrize("spoil", list(REFUSED), ids=lambda spoil: spoil.__name__)
def test_what_no_table_can_be_is_refused_by_name_and_may_be_left(spoil: Callable[[Model], None]) -> None:
    model = Model()
    spoil(model)
    with pytest.raises(InvalidInputError, match=REFUSED[spoil]):
        make_plan(model, 10)
    assert [site.table for site in make_plan(model, 10, leave=["user"])[0]] == ["towers.item.0"]


HELD: dict[Callable[[Model], None], str] = {
    in_a_list: "towers.item.every[0]",
    in_a_dict: "by_name['user']",
    in_a_set: "known{…}",
    weight_beside: "rows",
    in_an_object: "config.fields['user'][0].kept",
    in_a_dict_of_lists: "by_field['user'][0]",
    bound_method: "look_up.__self__",
    partial_function: "look_up.keywords['other']",
    closure: "look_up (user)",
    default_of_a_function: "look_up (default)",
    in_a_module_of_its_own: "every[0]._modules['0']._modules['0']",
    in_a_hook_of_another_module: "small._forward_hooks[0] (user)",
}


@pytest.mark.parametrize("hold", list(HELD), ids=lambda hold: hold.__name__)
def test_who_else_holds_an_embedding_or_its_weight_is_found_with_the_whole_path(hold: Callable[[Model], None]) -> None:
    model = Model()
    hold(model)
    of = TorchModel(model)
    (held,) = of.held(convert_model.make_plan(of, 10)[0][0])
    assert re.sub(r"hooks\[\d+\]", "hooks[0]", held) == HELD[hold]


def test_a_head_with_the_same_parameter_is_tied_while_the_table_is_small_enough_to_be_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    tied(model)
    of = TorchModel(model)
    assert of.tied(convert_model.make_plan(of, 10)[0][0]) == [("decoder.weight", model.decoder, "weight")]
    monkeypatch.setattr(import_module("trainer.torch.lookup.table_weight"), "WEIGHT_BYTES", 4 * 100 * 4 - 1)
    with pytest.raises(InvalidInputError, match=r"'user': its weight is tied to 'decoder.weight' \(Linear\), which needs all"):
        make_plan(model, 10)


def test_who_holds_the_model_or_its_optimizer_holds_nothing_that_stays_behind() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model.trainer = SimpleNamespace(model=model, optimizers=[optimizer], schedulers=[scheduler], wrapped=nn.DataParallel(model))
    model.look_up = model.forward
    model.trainer.wrapper = SimpleNamespace(**vars(optimizer))
    model.rest = [model.small, *model.towers["item"][1:]]
    assert len(make_plan(model, 10)[0]) == 2


def test_an_embedding_that_stays_cannot_share_its_weight_with_one_that_goes() -> None:
    model = Model()
    tied_to_one_that_stays(model)
    with pytest.raises(InvalidInputError, match=r"'user': its weight is tied to 'other.weight' \(Embedding\)"):
        make_plan(model, 10, leave=["other"])


def test_a_subclass_without_a_forward_of_its_own_is_replaced() -> None:
    model = Model()
    model.user = type("Named", (nn.Embedding,), {})(100, 4)
    assert make_plan(model, 10)[0][0].table == "user"


def test_all_reasons_are_told_at_once() -> None:
    model = Model()
    max_norm(model)
    model.towers["item"][0] = OwnForward(50, 4)
    with pytest.raises(InvalidInputError, match=r"'user': max_norm.*'towers.item.0': OwnForward"):
        make_plan(model, 10)


def test_a_weight_on_the_meta_device_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"user": nn.Embedding(10**12, 16)})
    ((site,), _) = make_plan(model, 10)
    assert (site.n_rows, site.dim) == (10**12, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: nn.DataParallel(model), "wrapped by DataParallel; call distribute on the plain model first"),
        (lambda model: torch.compile(model, backend="eager"), "wrapped by OptimizedModule"),
        (lambda model: nn.Sequential(model, Embedding(MemoryCluster().table("t", 2))), "module '1' is over table 't' already"),
        (lambda model: model.user, "put it into a module"),
        (lambda model: model.small, "put it into a module"),
        (lambda model: nn.Linear(1, 1), "no nn.Embedding or nn.EmbeddingBag to replace: the model has none"),
        (lambda model: nn.Sequential(model.small), "'0' stays \\(9 rows, fewer than min_rows=10\\)"),
    ],
)
def test_models_that_cannot_be_changed_in_place_are_refused(change: Callable[[Model], nn.Module], message: str) -> None:
    model = change(Model())
    with pytest.raises(InvalidInputError, match=message):
        make_plan(model, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": {"usr": "u"}}, "names: no nn.Embedding or nn.EmbeddingBag is at 'usr'; there are: user, towers.item.0, small"),
        ({"names": lambda path: "same"}, "'user' and 'towers.item.0' would both be table 'same'"),
        ({"names": {"user": "a\tb"}}, r"module 'user': table name 'a\\tb'.*give names="),
        ({"leave": ["usr"]}, "leave: no nn.Embedding or nn.EmbeddingBag is at 'usr'"),
        ({"leave": "user"}, "give a list"),
    ],
)
def test_wrong_names_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_plan(Model(), 10, **options)


@pytest.mark.parametrize("wrap", ["inside of DDP", "fully_shard"])
def test_a_model_that_is_wrapped_or_sharded_already_is_refused(wrap: str, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Embedding(20_000, 2), nn.Linear(2, 1))
        if wrap == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            kept = fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        else:
            kept = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(InvalidInputError, match="wrapped by FSDPSequential" if wrap == "fully_shard" else "inside of a Distributed"):
            make_plan(model, 10)
        assert isinstance(kept, nn.Module)
    finally:
        torch.distributed.destroy_process_group()
