"""The lines that the DeepFM example trains and validates on, from a file or a planted model."""

from typing import Any

import numpy as np

from deepfm import metrics, synthetic
from deepfm.clicks import Clicks, hashed, split
from deepfm.readers import format_of, read_clicks
from kvemb.errors import InvalidInputError

SYNTHETIC = "synthetic"
SYNTHETIC_LINES = 400_000


def load(data: str, valid: str | float, n_ids: int, seed: int) -> tuple[Clicks, Clicks]:
    """Return lines to train on and lines to validate on, and print what they are.

    Args:
        data: a file, or "synthetic".
        valid: another file, or a fraction of `data`.
        n_ids: features are hashed to ids from 0 to n_ids - 1.
        seed: of what is drawn.

    Raises:
        InvalidInputError: files that cannot be read, have no ids in common, or no lines to train on.
    """
    truth = None
    if isinstance(valid, str):
        formats = [SYNTHETIC if data == SYNTHETIC else format_of(data), format_of(valid)]
        if formats[0] != formats[1]:
            raise InvalidInputError(f"--data {data} is {formats[0]} and --valid {valid} {formats[1]}: they have no ids in common")
    if data == SYNTHETIC:
        clicks, truth = synthetic.draw(SYNTHETIC_LINES, seed)
    else:
        clicks = read_clicks(data)
    if isinstance(valid, str):
        log = clicks, read_clicks(valid)
    else:
        train_lines, valid_lines = split(len(clicks), valid, seed)
        log = clicks.take(train_lines), clicks.take(valid_lines)
    if not len(log[0]):
        raise InvalidInputError(f"{data}: --valid {valid} takes all of its {len(clicks)} line(s); none is left to train on")
    fields = f"{clicks.n_fields} fields" if clicks.n_fields else f"{len(clicks.ids) / len(clicks):.1f} features per line"
    print(f"data: {len(log[0]):,} lines to train on, {len(log[1]):,} to validate on, {fields}")
    if truth is not None:
        print(f"the best any model can do on the latter: {_figures(log[1].labels, truth[valid_lines])}")
    return hashed(log[0], n_ids), hashed(log[1], n_ids)


def _figures(labels: np.ndarray[Any, Any], p: np.ndarray[Any, Any]) -> str:
    best = metrics.log_loss(labels, p), metrics.auc(labels, p), metrics.rmse(labels, p)
    return "logloss {:.4f}, Bayes-optimal AUC {:.4f}, RMSE {:.4f}".format(*best)
