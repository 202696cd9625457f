"""Saving and restoring a model with Keras: dense weights with the rows of their step, or an error where they are mixed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)
pytest.importorskip("pyarrow")

import keras
from keras_models import CLOSE, both, functional, names_of, pairs

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import MixedStepsWarning, RowCheckpoints, distribute, materialize


def connected(cluster: kvemb.Cluster, name: str) -> Any:
    ours = both(functional)[1]
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    return ours


class After(keras.callbacks.Callback):
    """What the model predicts after each epoch, from `materialize`: a step of `predict` would say more."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.x, self.predicted = x, list[Any]()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.predicted.append(materialize(self.model).predict(self.x, verbose=0))


def stopping() -> Any:
    """Keeps the first epoch: later ones are not better by so much."""
    return keras.callbacks.EarlyStopping("loss", patience=1, min_delta=100.0, restore_best_weights=True)


def test_the_best_epoch_comes_back_rows_and_all(cluster: kvemb.Cluster, name: str, tmp_path: Path) -> None:
    ours, (x, y) = connected(cluster, name), pairs(60)
    RowCheckpoints(ours, str(tmp_path / "rows"), keep=1)
    after = After(x)
    ours.fit(x, y, batch_size=20, shuffle=False, epochs=3, callbacks=[after, stopping()], verbose=0)
    assert len(after.predicted) == 2
    assert np.abs(after.predicted[1] - after.predicted[0]).max() > 1e-3
    np.testing.assert_allclose(ours.predict(x, verbose=0), after.predicted[0], **CLOSE)


def test_a_file_of_weights_brings_its_rows_back(cluster: kvemb.Cluster, name: str, tmp_path: Path) -> None:
    ours, (x, y), best = connected(cluster, name), pairs(60), tmp_path / "best.weights.h5"
    rows = RowCheckpoints(ours, str(tmp_path / "rows"))
    keeping = keras.callbacks.ModelCheckpoint(best, monitor="loss", mode="max", save_best_only=True, save_weights_only=True)
    after = After(x)
    ours.fit(x, y, batch_size=20, shuffle=False, epochs=2, callbacks=[after, keeping], verbose=0)
    ours.load_weights(best)
    np.testing.assert_allclose(ours.predict(x, verbose=0), after.predicted[0], **CLOSE)
    ours.save(tmp_path / "model.keras")
    ours.fit(x, y, verbose=0)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    distribute(loaded, cluster, quiet=True)
    with pytest.warns(MixedStepsWarning, match="Bring the rows back that belong to them"):
        loaded.predict(x, verbose=0)
    del rows
    assert RowCheckpoints(loaded, str(tmp_path / "rows")).follow()
    np.testing.assert_allclose(loaded.predict(x, verbose=0), after.predicted[0], **CLOSE)


LOOKS = {
    "predict": lambda model, x: model.predict(x, verbose=0),
    "call": lambda model, x: model(x),
    "materialize": lambda model, x: materialize(model),
}


@pytest.mark.parametrize("look", LOOKS)
def test_dense_weights_that_come_back_alone_are_told(cluster: kvemb.Cluster, name: str, look: str) -> None:
    ours, (x, y) = connected(cluster, name), pairs(60)
    ours.fit(x, y, batch_size=20, shuffle=False, epochs=3, callbacks=[stopping()], verbose=0)
    with pytest.warns(MixedStepsWarning, match="with cluster.load"):
        LOOKS[look](ours, x)


def test_a_plain_models_weights_are_refused_and_change_nothing(cluster: kvemb.Cluster, name: str, tmp_path: Path) -> None:
    ours, plain, (x, y) = connected(cluster, name), both(functional)[0], pairs(60)
    for model in (ours, plain):
        model.fit(x, y, batch_size=10, verbose=0)
    plain.fit(x, y, verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    before = ours.predict(x, verbose=0)
    for skip_mismatch in (False, True):
        with pytest.raises(InvalidInputError, match=r"nothing was changed.*Load such a file before distribute"):
            ours.load_weights(tmp_path / "plain.weights.h5", skip_mismatch=skip_mismatch)
    np.testing.assert_allclose(ours.predict(x, verbose=0), before, **CLOSE)


@pytest.mark.parametrize("kind", ["onnx", "tf_saved_model"])
def test_a_model_over_tables_is_exported_as_its_plain_copy(cluster: kvemb.Cluster, name: str, tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidInputError, match=r"materialize\(model\).export"):
        connected(cluster, f"{name}.{kind}"[-40:]).export(tmp_path / "file", format=kind)
    assert not list(tmp_path.iterdir())


def test_what_is_not_connected_keeps_no_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"call kvemb.keras.distribute"):
        RowCheckpoints(both(functional)[1], str(tmp_path))
