"""The two-tower program in Keras: it learns what torch's program learns, on each backend."""

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("keras", exc_type=ImportError)
pytest.importorskip("torch.nn")

import keras
import numpy as np
import torch
import two_tower_keras
import two_tower_torch
from keras_models import names_of
from two_tower.interests import draw, log_shares

import kvemb
from kvemb.keras import distribute

N_USERS, N_ITEMS, DIM, BATCH, LR, ROW_LR = 600, 400, 8, 256, 0.01, 0.2
SMALL = ["--store", "redis", "--users", "600", "--items", "400", "--batch-size", "256", "--dim", "8", "--k", "40", "--epochs", "8"]


@pytest.mark.timeout(480)
def test_it_finds_more_than_the_popular_items(capsys: pytest.CaptureFixture[str], require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    assert two_tower_keras.main([*SMALL, "--lr", str(LR), "--row-lr", str(ROW_LR)]) == 0
    told = capsys.readouterr().out
    found = [float(x) for x in re.findall(r"^epoch \d+: .*@40 ([\d.]+)$", told, re.MULTILINE)]
    assert len(found) == 8
    assert found[-1] > float(re.search(r"popular items: ([\d.]+)", told)[1])
    assert found[-1] > 2 * 40 / 400, "twice what guessing finds"


def test_its_losses_are_those_of_torchs_program(cluster: kvemb.Cluster, name: str) -> None:
    """From the same weights, on the same batches, where every step has the rows of the one before."""
    keras.utils.set_random_seed(0)
    pairs, _ = draw(N_USERS, N_ITEMS, np.random.default_rng(0))
    shares = log_shares(pairs)
    ours = two_tower_keras.TwoTower(N_USERS, N_ITEMS, DIM, LR)
    theirs = torchs(ours)
    towers = torch.optim.Adam([*theirs.user_tower.parameters(), *theirs.item_tower.parameters()], lr=LR)
    rows = torch.optim.Adagrad([*theirs.users.parameters(), *theirs.items.parameters()], lr=ROW_LR)
    distribute(ours.model, cluster, min_rows=1, optimizer=kvemb.optim.adagrad(lr=ROW_LR), names=names_of(name), quiet=True)
    losses: list[tuple[float, float]] = []
    for batch in np.random.default_rng(1).permutation(len(pairs))[: 12 * BATCH].reshape(12, BATCH):
        user, item = pairs[batch].T
        loss = theirs({"user": torch.tensor(user), "item": torch.tensor(item), "log_q": torch.tensor(shares[item])})
        towers.zero_grad()
        rows.zero_grad()
        loss.backward()
        towers.step()
        rows.step()
        ours.model.reset_metrics()  # Keras would give the mean of all steps so far
        losses.append((float(ours.model.train_on_batch([user, item, shares[item]], np.zeros(BATCH, np.int32))), loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), rtol=2e-3)
    assert losses[-1][0] < losses[0][0] - 0.2


def torchs(ours: two_tower_keras.TwoTower) -> Any:
    """Torch's model with the weights of a Keras one, which is not distributed yet."""
    embeddings, towers = [], []
    for tower in (ours.users, ours.items):
        embedding, *dense = (layer.get_weights() for layer in tower.layers if layer.get_weights())
        embeddings.append(torch.nn.Embedding.from_pretrained(torch.tensor(embedding[0]), freeze=False))
        towers.append(
            {
                f"{2 * at}.{name}": torch.tensor(value.T)
                for at, one in enumerate(dense)
                for name, value in zip(("weight", "bias"), one, strict=True)
            }
        )
    model = two_tower_torch.TwoTower(*embeddings, DIM)
    model.user_tower.load_state_dict(towers[0])
    model.item_tower.load_state_dict(towers[1])
    return model


def test_the_right_answer_once_more_in_a_batch_is_no_wrong_one() -> None:
    towers = two_tower_keras.TwoTower(2, 4, 8, lr=0.01)
    x, y = [np.array([0, 1]), np.array([2, 2]), np.zeros(2, np.float32)], np.zeros(2, np.int32)
    assert towers.model.evaluate(x, y, verbose=0) == pytest.approx(0.0, abs=1e-6)
    towers.model.train_on_batch(x, y)
    assert all(np.isfinite(keras.ops.convert_to_numpy(weight)).all() for weight in towers.model.weights)
