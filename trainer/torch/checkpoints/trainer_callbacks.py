"""Callbacks that keep rows beside the checkpoints of other trainers: Lightning's and Hugging Face's.

What must not live here: what is saved and loaded (`row_checkpoints`). Strategy: their base classes are imported when a callback is asked
for, and every hook is one call; both trainers call these hooks on every rank.
"""

import importlib
import sys
from typing import Any

from kvemb.errors import InvalidInputError

from .row_checkpoints import RowCheckpoints


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
