"""Rows saved beside the checkpoints of torch models, and beside those of Lightning and Hugging Face.

RowCheckpoints saves rows beside the dense weights of a state_dict, and brings them back to the step of a loaded one. The callbacks do so
for Lightning's and Hugging Face's trainers. Their base classes are imported when a callback is asked for, and every hook is one call; both
trainers call these hooks on every rank.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import distributed, nn

from kvemb.errors import CheckpointError, InvalidInputError, KvembError

from ..bridge.saved_rows import SavedRows
from .lookup.parameter_walks import n_ranks
from .lookup.table_module import modules_by_table


class RowCheckpoints(SavedRows):
    """Save the rows of a model's cluster beside its dense weights, under the step in its state_dict, and bring them back.

    In a job of several ranks (torch.distributed) every rank calls `save` and `follow`; rank 0 does the work, and the others wait for it.

    Args:
        model: over tables of one cluster, which must not be read-only. All tables of the cluster are saved and loaded.
        url: folder of the checkpoints, as for `Cluster.save`: a path, or a URL that all shards reach.
        keep: how many of the newest checkpoints are kept after a save; all unless given.

    Raises:
        InvalidInputError: the model has no tables, or `keep` is below 1.

    Example: rows and dense weights of the best epoch.
        rows = RowCheckpoints(model, "/data/run/rows", keep=1)
        for epoch in range(n_epochs):
            train(model)
            if (auc := evaluate(model)) > best_auc:
                best_auc, best = auc, copy.deepcopy(model.state_dict())
                rows.save()
        model.load_state_dict(best)
        rows.follow()
    """

    def __init__(self, model: nn.Module, url: str, *, keep: int | None = None) -> None:
        marks = {name: [module.mark for module in modules] for name, modules in modules_by_table(model).items()}
        super().__init__(marks, url, keep=keep)

    def _once(self, action: Callable[[], bool]) -> bool:
        return _on_rank_0(action)


def _on_rank_0(action: Callable[[], bool]) -> bool:
    """Run the action in one process of the job, once all have come here; return its result, or raise its error, in all of them."""
    if n_ranks() == 1:
        return action()
    distributed.barrier()
    said: list[bool | str] = [False]
    error: KvembError | None = None
    if distributed.get_rank() == 0:
        try:
            said = [action()]
        except KvembError as raised:
            error, said = raised, [f"{type(raised).__name__}: {raised}"]
    distributed.broadcast_object_list(said, src=0)
    if error is not None:
        raise error
    if isinstance(said[0], str):
        raise CheckpointError(f"rank 0 failed: {said[0]}")
    return said[0]


def lightning_callback(url: str, *, keep: int | None = None) -> Any:
    """Make a callback that saves rows whenever Lightning saves a checkpoint, and brings them back when it has loaded one: to resume, and
    for `ckpt_path="best"`.

    Args:
        url: folder of the rows' checkpoints, see `RowCheckpoints`.
        keep: how many of the newest are kept; all unless given. 1 where ModelCheckpoint(save_top_k=1) alone saves.

    Raises:
        InvalidInputError: Lightning is not installed.

    Example:
        trainer = Trainer(callbacks=[ModelCheckpoint(monitor="auc", mode="max"), lightning_callback("/data/run/rows")])
        trainer.fit(model)
        trainer.test(model, ckpt_path="best")
    """
    base = _class("Callback", "lightning.pytorch", "pytorch_lightning")

    def follow(self: Any, trainer: Any, pl_module: Any) -> None:
        RowCheckpoints(pl_module, url, keep=keep).follow()

    def save(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        RowCheckpoints(pl_module, url, keep=keep).save()

    follows = {f"on_{what}_start": follow for what in ("train", "validation", "test", "predict")}
    return type("SaveRows", (base,), {"on_save_checkpoint": save, **follows})()


def hugging_face_callback(url: str, *, keep: int | None = None) -> Any:
    """Make a callback that saves rows whenever Hugging Face's Trainer saves a checkpoint, and brings them back when it loads one.

    It loads one to resume, and the best one at the end (`load_best_model_at_end`).

    Args:
        url: folder of the rows' checkpoints, see `RowCheckpoints`.
        keep: how many of the newest are kept; all unless given. 1 with save_strategy="best".

    Raises:
        InvalidInputError: transformers is not installed.

    Example:
        trainer = Trainer(model, args, callbacks=[hugging_face_callback("/data/run/rows")])
        trainer.train()
    """
    base = _class("TrainerCallback", "transformers")

    def follow(self: Any, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        RowCheckpoints(model, url, keep=keep).follow()

    def save(self: Any, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        RowCheckpoints(model, url, keep=keep).save()

    return type("SaveRows", (base,), {"on_save": save, "on_train_begin": follow, "on_train_end": follow})()


def _class(name: str, *modules: str) -> Any:
    """Find a class in the first of these modules that the program has imported, or that can be."""
    for module in sorted(modules, key=lambda module: module not in sys.modules):
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            continue
    raise InvalidInputError(f"{' or '.join(modules)} is not installed, whose trainer this callback is for")
