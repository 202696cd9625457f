"""Checkpoints of a DeepFM run, and going on from the newest: rows by the cluster, dense weights in a file beside them.

    <url>/step-0000000300/                  what Cluster.save wrote; its `extra` says where the run was and names the file below
    <url>/step-0000000300.9f2c61d0.npz      dense weights, their optimizer's state, torch's random state: plain arrays, no pickle

The manifest of Cluster.save comes last, so a checkpoint that is listed has its dense file. There is one before the first step:
rows that are ahead of the newest checkpoint can always be taken back to it. What must not live here: training, the command line.
"""

import hashlib
import io
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deepfm.clicks import Clicks
from deepfm.training import Progress
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage, absolute_url
from kvemb.checkpoint.listing import list_checkpoints, prune
from kvemb.errors import CheckpointError, InvalidInputError

TRAINER = "deepfm-0"
"""The trainer's name in the cluster: a process that is started again takes the place of the one before, and fences it."""
FORMAT = 1
MAX_DENSE_BYTES = 1 << 32
INCREMENTS = 4  # in a row; more would make loads longer and keep old files needed


@dataclass(frozen=True)
class Found:
    """A checkpoint of a run.

    Args:
        url, folder: of the checkpoint, and of all of them.
        extra: what `Checkpoints.save` put into its manifest.
    """

    url: str
    folder: str
    extra: Mapping[str, Any]

    @property
    def progress(self) -> Progress:
        """Where the run was."""
        return Progress(**self.extra["progress"])

    def require_same(self, run: Mapping[str, Any]) -> None:
        """Refuse to go on with other data or settings.

        Raises:
            InvalidInputError: naming them.
        """
        saved = self.extra["run"]
        if other := [f"{name} {saved.get(name)!r}, now {run.get(name)!r}" for name in run if saved.get(name) != run.get(name)]:
            raise InvalidInputError(f"{self.url}: saved by another run: {'; '.join(other)}. Give the same, or another folder")


def describe(log: Clicks, **settings: object) -> dict[str, Any]:
    """Return what a run and its continuation must have in common: the settings, and a digest of the lines to train on."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (log.labels, log.offsets, log.ids, log.values):
        digest.update(np.ascontiguousarray(array).data)
    return {**settings, "data": digest.hexdigest()}


def newest(url: str) -> Found | None:
    """Return the checkpoint with the highest step below a URL; None without any. Unfinished and foreign ones do not count."""
    complete = [(one.url, one.manifest.extra) for one in list_checkpoints(url) if one.manifest is not None]
    ours = [Found(where, absolute_url(url), extra) for where, extra in complete if extra.get("deepfm") == FORMAT]
    return max(ours, key=lambda found: found.progress.step, default=None)


def take_place(cluster: Any) -> None:
    """Fence the process that had this trainer's name before: from here on nothing of it is applied.

    It is an empty step of the sync job: each of its trainers must take part.

    Raises:
        FencedError: a newer process has this trainer's place.
    """
    cluster.push({}).wait_applied()


class Checkpoints:
    """Saves the run of one trainer between its steps.

    Args:
        cluster: an open kvemb.Cluster.
        url: the folder for all checkpoints of this run: a path or an fsspec URL that the shards reach too.
        run: see `describe`.
        every: steps from one checkpoint to the next.
        keep: how many to keep; those that they are built on stay as well.
    """

    def __init__(self, cluster: Any, url: str, run: Mapping[str, Any], *, every: int, keep: int) -> None:
        self._cluster, self._folder, self._run, self._every, self._keep = cluster, absolute_url(url), run, every, keep
        self._storage = CheckpointStorage(url)
        self._base: str | None = None
        self._n_increments = 0
        self._saved_step = -1

    def begin(self, model: nn.Module, dense: torch.optim.Optimizer, *, resume: bool) -> Progress:
        """Bring the cluster, the dense weights and their optimizer to the newest checkpoint; without one, save the first.

        Returns:
            Where to go on.

        Raises:
            InvalidInputError: there are checkpoints and `resume` is not wanted, or they are of another run, or the cluster is not in sync
                mode; nothing has changed.
            CheckpointError: the newest cannot be loaded: rows and dense weights are as they were.
        """
        if self._cluster.mode != "sync":  # an empty push reaches no shard there, so nobody would hear that he is fenced
            raise InvalidInputError("checkpoints of a run need a cluster in sync mode: parameter_servers.mode in kvemb.yaml")
        found = newest(self._folder)
        if found is not None and not resume:
            raise InvalidInputError(f"{self._folder} holds checkpoints, the newest is {found.url}: resume, or give another folder")
        if found is not None:
            found.require_same(self._run)
        take_place(self._cluster)  # before the load: a process that was only stopped must not push into the loaded rows
        if found is None:
            self.save(Progress(), model, dense)
            return Progress()
        arrays = read_dense(found)
        done = self._cluster.load(found.url)
        restore_dense(arrays, model, dense)
        self._saved_step = found.progress.step
        print(f"resumed: step {found.progress.step:,}, {done.n_rows:,} rows from {found.url}", flush=True)
        return found.progress

    def after_step(self, progress: Progress, model: nn.Module, dense: torch.optim.Optimizer) -> None:
        """Save if it is time."""
        if progress.step % self._every == 0:
            self.save(progress, model, dense)

    def save(self, progress: Progress, model: nn.Module, dense: torch.optim.Optimizer) -> None:
        """Save between two steps, unless this very step is saved; then delete what is too old.

        Raises:
            FencedError: another process has taken over; nothing was saved.
            CheckpointError: the save failed, and the checkpoints before it are as they were.
        """
        if progress.step == self._saved_step:
            return
        take_place(self._cluster)  # still ours? The rows of another process must not be saved as this one's
        self._cluster.flush()
        name = f"step-{progress.step:010d}"
        file = f"{name}.{secrets.token_hex(4)}.npz"  # of this save alone: whoever else saves this step does not write over it
        data = _packed(dense_arrays(model, dense))
        self._storage.write(file, data)
        extra = {
            "deepfm": FORMAT, "step": progress.step, "progress": asdict(progress), "run": dict(self._run),
            "dense": file, "dense_sha256": hashlib.sha256(data).hexdigest(),
        }  # fmt: skip
        done = self._cluster.save(f"{self._folder}/{name}", base=self._base, extra=extra)
        print(f"saved: step {progress.step:,}, {done.manifest.n_rows:,} rows in {done.seconds:.1f} s to {done.url}", flush=True)
        self._saved_step = progress.step
        self._n_increments = 0 if self._base is None else self._n_increments + 1
        # The first one is whole, also after a load, which gives all rows new versions.
        self._base = done.url if self._n_increments < INCREMENTS else None
        self._prune()

    def _prune(self) -> None:
        listed = {one.name: one.manifest for one in list_checkpoints(self._folder)}
        for name in prune(self._folder, keep=self._keep):
            manifest = listed[name]
            if manifest is not None and "dense" in manifest.extra:
                self._storage.delete(manifest.extra["dense"])


def dense_arrays(model: nn.Module, dense: torch.optim.Optimizer) -> dict[str, NDArray[Any]]:
    """Return what must be saved beside the rows: weights, the optimizer's state, torch's random state."""
    weights = {f"model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    state = {
        f"optimizer.{number}.{key}": tensor.numpy()
        for number, values in dense.state_dict()["state"].items()
        for key, tensor in values.items()
        if isinstance(tensor, torch.Tensor)
    }
    return {**weights, **state, "random": torch.get_rng_state().numpy()}


def restore_dense(arrays: Mapping[str, NDArray[Any]], model: nn.Module, dense: torch.optim.Optimizer) -> None:
    """The reverse of `dense_arrays`."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            weights[rest] = torch.from_numpy(array)
        elif kind == "optimizer":
            number, _, key = rest.partition(".")
            state.setdefault(int(number), {})[key] = torch.from_numpy(array)
    model.load_state_dict(weights)
    dense.load_state_dict({"state": state, "param_groups": dense.state_dict()["param_groups"]})
    torch.set_rng_state(torch.from_numpy(arrays["random"]))


def read_dense(found: Found) -> dict[str, NDArray[Any]]:
    """Read the arrays that lie beside a checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    storage = CheckpointStorage(found.folder)
    file = found.extra["dense"]
    data = storage.read(file, MAX_DENSE_BYTES)
    if hashlib.sha256(data).hexdigest() != found.extra["dense_sha256"]:
        raise CheckpointError(f"{storage.where(file)}: damaged, it is not what was saved with {found.url}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()
