"""Jagged features: made in every way, found by whatever walks a batch, and through a DataLoader's workers."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from kvemb.errors import InvalidInputError
from trainer.torch.collections.jagged_tensors import JaggedTensor, KeyedJaggedTensor, KeyedTensor

BAGS = [[1, 2], [], [3]]


def lists(feature: JaggedTensor) -> list[list[int]]:
    return [bag.tolist() for bag in feature.to_dense()]


def keyed() -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lists({"a": BAGS, "b": [[4], [5, 6], []]})


def test_lengths_offsets_lists_and_padding_say_the_same() -> None:
    made = [
        JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1])),
        JaggedTensor(torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 2, 2, 3])),
        JaggedTensor.from_lists(BAGS),
        JaggedTensor.from_lists([torch.tensor(bag) for bag in BAGS]),
        KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))["a"],
        KeyedJaggedTensor.from_offsets_sync(["a"], torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3]))["a"],
    ]
    for feature in made:
        assert lists(feature) == BAGS
        assert feature.offsets().tolist() == [0, 2, 2, 3]
        assert feature.lengths().tolist() == [2, 0, 1]
        assert feature.weights_or_none() is None


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_move_hands_on_whether_it_may_go_on_before_the_copy_has_ended(non_blocking: bool) -> None:
    moves: list[Any] = []

    class Moves(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is Tensor.to and "meta" in args:
                moves.append(kwargs)
            return function(*args, **(kwargs or {}))

    with Moves():
        moved = [features.to("meta", non_blocking=non_blocking) for features in (JaggedTensor.from_lists(BAGS), keyed())]
    assert moves == [{"non_blocking": non_blocking}] * len(moves)
    assert len(moves) >= 4, "values and lengths of both"
    assert {features.values().device.type for features in moved} == {"meta"}


def test_padding_cuts_what_is_longer_and_keeps_rows_and_gradients() -> None:
    feature = JaggedTensor.from_lists(BAGS)
    assert feature.to_padded_dense().tolist() == [[1, 2], [0, 0], [3, 0]]
    assert feature.to_padded_dense(1, padding_value=-1).tolist() == [[1], [-1], [3]]
    assert JaggedTensor.from_lists([]).to_padded_dense().shape == (0, 0)
    rows = torch.ones(3, 2, requires_grad=True)
    JaggedTensor(rows, lengths=feature.lengths()).to_padded_dense(1).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1, 1], [0, 0], [1, 1]]


def test_keys_take_their_part_of_values_and_weights() -> None:
    features = keyed()
    assert features.keys() == ["a", "b"]
    assert features.stride() == 3
    assert features.offsets().tolist() == [0, 2, 2, 3, 4, 6, 6]
    assert lists(features["b"]) == [[4], [5, 6], []]
    weights = torch.arange(6.0)
    weighted = KeyedJaggedTensor(["a", "b"], features.values(), weights, lengths=features.lengths())
    assert weighted["b"].weights().tolist() == [3, 4, 5]


def test_a_pytree_has_the_tensors_as_leaves_and_comes_back() -> None:
    batch = {"x": torch.ones(2), "features": keyed(), "one": JaggedTensor.from_lists(BAGS)}
    leaves, spec = pytree.tree_flatten(batch)
    assert [type(leaf) for leaf in leaves if leaf is not None] == [torch.Tensor] * 5
    again = pytree.tree_unflatten([None if leaf is None else leaf.clone() for leaf in leaves], spec)
    assert again["features"].keys() == ["a", "b"]
    assert lists(again["features"]["b"]) == [[4], [5, 6], []]
    assert lists(again["one"]) == BAGS
    assert again["one"].values() is not batch["one"].values()
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(keyed())[0]]
    assert paths == [".values", ".lengths", ".weights"]
    pooled = pytree.tree_map(lambda x: x + 1, KeyedTensor(["k"], [2], torch.zeros(1, 2)))
    assert pooled["k"].tolist() == [[1, 1]]


def collate(samples: list[int]) -> dict[str, object]:
    """Makes jagged features where it is called: in a worker, if there is one."""
    return {"features": KeyedJaggedTensor.from_lists({"a": [[s] * s for s in samples]}), "label": torch.tensor(samples)}


@pytest.mark.parametrize("method", [None, "fork"])
def test_a_data_loader_hands_them_on_from_its_workers(method: str | None) -> None:
    loader = DataLoader([0, 1, 2, 3], batch_size=2, collate_fn=collate, num_workers=method is not None, multiprocessing_context=method)
    batches = list(loader)
    assert [lists(batch["features"]["a"]) for batch in batches] == [[[], [1]], [[2, 2], [3, 3, 3]]]


def test_they_move_between_devices_with_keys_and_weights() -> None:
    moved = KeyedJaggedTensor(["a"], torch.tensor([1]), torch.ones(1), torch.tensor([1])).to("meta")
    assert moved.keys() == ["a"]
    assert {tensor.device.type for tensor in (moved.values(), moved.lengths(), moved.weights())} == {"meta"}
    assert JaggedTensor.from_lists(BAGS).to("meta").values().device.type == "meta"


def test_pinning_pins_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    keyed().pin_memory()
    JaggedTensor(torch.tensor([1]), torch.ones(1), torch.tensor([1])).pin_memory()
    assert len(pinned) == 5


VALUES = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    "make",
    [
        lambda: JaggedTensor(VALUES),
        lambda: JaggedTensor(VALUES, lengths=torch.tensor([3]), offsets=torch.tensor([0, 3])),
        lambda: JaggedTensor(VALUES, lengths=torch.tensor([3.0])),
        lambda: JaggedTensor(VALUES, lengths=torch.tensor([[3]])),
        lambda: JaggedTensor(VALUES, offsets=torch.tensor([1, 3])),
        lambda: JaggedTensor(VALUES, offsets=torch.tensor([], dtype=torch.int64)),
        lambda: JaggedTensor(VALUES, torch.ones(2), torch.tensor([3])),
        lambda: JaggedTensor(VALUES, torch.ones(3, 1), torch.tensor([3])),
        lambda: JaggedTensor(VALUES, lengths=torch.tensor([3])).weights(),
        lambda: KeyedJaggedTensor([], VALUES[:0], lengths=VALUES[:0]),
        lambda: KeyedJaggedTensor(["a", "a"], VALUES, lengths=torch.tensor([1, 2])),
        lambda: KeyedJaggedTensor(["a", "b"], VALUES, lengths=torch.tensor([1, 1, 1])),
        lambda: KeyedJaggedTensor.from_lists({}),
        lambda: KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[1], [2]]}),
        lambda: keyed()["c"],
        lambda: KeyedTensor(["k"], [1], torch.zeros(1, 1))["c"],
    ],
)
def test_what_does_not_fit_is_refused(make: object) -> None:
    with pytest.raises(InvalidInputError):
        make()


@pytest.mark.parametrize("lengths", [[2, 0], [3, 1], [4, -1], [-1, 4]])
def test_bags_that_are_not_the_values_are_refused_where_they_are_told_apart(lengths: list[int]) -> None:
    feature = JaggedTensor(VALUES, lengths=torch.tensor(lengths))
    keyed = KeyedJaggedTensor(["a"], VALUES, lengths=torch.tensor(lengths))
    for read in (feature.to_dense, feature.to_padded_dense, lambda: feature.to_padded_dense(1), keyed.to_dict, lambda: keyed["a"]):
        with pytest.raises(InvalidInputError, match=r"lengths add up to .* there are 3 values"):
            read()


def test_lists_of_floats_are_not_cut_off() -> None:
    for make in (lambda: JaggedTensor.from_lists([[1, 2], [0.5]]), lambda: KeyedJaggedTensor.from_lists({"a": [[], torch.tensor([1.5])]})):
        with pytest.raises(InvalidInputError, match=r"are floats, and torch.int64 would cut them off; give dtype=torch.float32"):
            make()
    assert JaggedTensor.from_lists([[0.5, 2], []], torch.float32).values().tolist() == [0.5, 2.0]
    assert JaggedTensor.from_lists([[], np.array([2**40])]).values().tolist() == [2**40]
