"""Samples by which PyTorch tests its own embeddings, which ship inside its wheel: our modules compute and train the same.

Left out are the samples with max_norm and scale_grad_by_freq, which distribute refuses by name.
"""

import importlib
import sys
import types
import unittest
from typing import Any

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import numpy as np
import torch
from making_cluster import MakingCluster
from memory_cluster import MemoryCluster
from torch.nn import functional as F

from kvemb.errors import InvalidInputError
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer, distribute

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
REFUSED = ("max_norm", "scale_grad_by_freq")


def torchs(name: str) -> Any:
    """Import a module of those by which torch tests itself."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("expecttest") is None:  # torch's module imports it, for tests that are not run here
            stand_in: Any = types.ModuleType("expecttest")
            stand_in.TestCase, stand_in.assert_expected_inline = unittest.TestCase, None
            patch.setitem(sys.modules, "expecttest", stand_in)
        return importlib.import_module(f"torch.testing._internal.{name}")


@pytest.fixture(scope="module")
def samples() -> Any:
    """Return torch's own samples by the name of an operator: (weight [n, dim], ids, keyword arguments)."""
    operators = torchs("common_methods_invocations").op_db

    def of(name: str) -> list[tuple[Any, Any, dict[str, Any]]]:
        (operator,) = (one for one in operators if one.name == name)
        every = list(operator.sample_inputs("cpu", torch.float32, requires_grad=True))
        return [(one.input, one.args[0], one.kwargs) for one in every if not any(one.kwargs.get(option) for option in REFUSED)]

    return of


def trained(make: Any, weight: torch.Tensor, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a module over these rows computes, and the gradient [n, dim] that its step pushes."""
    cluster = MemoryCluster("sync")
    table = cluster.table("t", weight.shape[1])
    nothing = table.optimizer.initial_state(1, table.dim)[0]
    table.rows = {at: (row, nothing, 1) for at, row in enumerate(weight.detach().numpy().copy())}
    module = make(table)
    optimizer, out = SparseOptimizer(module), call(module)
    out.square().sum().backward()
    optimizer.step()
    ids, grads = cluster.pushes[0]["t"]
    whole = torch.zeros_like(weight)
    whole[torch.from_numpy(ids)] = torch.from_numpy(grads)
    return out, whole


def check(got: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor, weight: torch.Tensor) -> None:
    (theirs,) = torch.autograd.grad(expected.square().sum(), weight)
    np.testing.assert_allclose(got[0].detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], theirs.to_dense() if theirs.is_sparse else theirs, rtol=1e-5, atol=1e-5)


def positive(padding_idx: int | None, weight: torch.Tensor) -> int | None:
    return padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx


def test_embedding_computes_torchs_samples(samples: Any) -> None:
    taken = samples("nn.functional.embedding")
    for weight, ids, options in taken:
        padding = positive(options.get("padding_idx"), weight)
        got = trained(lambda table, padding=padding: Embedding(table, padding), weight, lambda module, ids=ids: module(ids))
        check(got, F.embedding(ids, weight, **options), weight)
    assert taken


def test_embedding_bag_computes_torchs_samples(samples: Any) -> None:
    taken = samples("nn.functional.embedding_bag")
    for weight, ids, options in taken:
        given = {name: options[name] for name in ("mode", "include_last_offset") if name in options}
        given["padding_idx"] = positive(options.get("padding_idx"), weight)
        more = {name: options[name] for name in ("offsets", "per_sample_weights") if name in options}
        got = trained(
            lambda table, given=given: EmbeddingBag(table, **given), weight, lambda module, ids=ids, more=more: module(ids, **more)
        )
        check(got, F.embedding_bag(ids, weight, **options), weight)
    assert len(taken) >= 10


def test_a_module_computes_torchs_samples_of_modules_and_refuses_what_they_refuse() -> None:
    (info,) = (one for one in torchs("common_modules").module_db if one.module_cls is torch.nn.Embedding)
    about = {"module_info": info, "device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": True}
    taken = info.module_inputs_func(**about)
    for one in taken:
        theirs, (ids,) = torch.nn.Embedding(**one.constructor_input.kwargs), one.forward_input.args
        check(trained(Embedding, theirs.weight, lambda module, ids=ids: module(ids)), theirs(ids), theirs.weight)
    assert taken
    wrong = info.module_error_inputs_func(**about)
    for one in [one.module_error_input for one in wrong if one.error_on.name == "FORWARD_ERROR"]:  # the others are torch's constructor's
        with pytest.raises(InvalidInputError):
            distribute(torch.nn.Sequential(torch.nn.Embedding(**one.constructor_input.kwargs)), MakingCluster())(*one.forward_input.args)
