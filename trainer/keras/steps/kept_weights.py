"""A connected model's weights as Keras hands them out and takes them back: dense ones, which say at which step their rows were.

What must not live here: what they say (`trainer.bridge.step_mark`), saving and loading rows (`trainer.bridge.saved_rows`). Strategy:
callbacks (EarlyStopping, ModelCheckpoint, BackupAndRestore) keep weights with a few methods of a model. These are wrapped. With
`RowCheckpoints` they keep the rows, too; without, whoever uses dense weights of one step with rows of another is warned.
"""

from collections.abc import Callable, Iterable
from typing import Any

from kvemb.errors import InvalidInputError

from ...bridge.saved_rows import SavedRows
from .ids_plan import layers_over_tables
from .shadows import is_shadow

_KEPT = "_weights_kept"


def not_connected(model: Any) -> InvalidInputError:
    """What is said where a model's steps have no rows yet."""
    return InvalidInputError(f"{type(model).__name__} is no model over tables yet: call kvemb.keras.distribute(model, cluster) first")


class WeightsList(list[Any]):
    """What `get_weights` returns: arrays, and by layer's name what its mark says of the rows then."""

    def __init__(self, arrays: Iterable[Any], said: dict[str, dict[str, int]]) -> None:
        super().__init__(arrays)
        self.said = said


class KeptWeights:
    """Stands around the methods that hand a model's weights out and take them back.

    Args:
        model: whose.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._originals = {name: getattr(model, name) for name in ("save", "save_weights", "load_weights")}
        self.rows: SavedRows | None = None
        """Keeps the rows beside the weights; None: nobody does."""

    def install(self) -> None:
        """Stand there from now on."""
        own = {"get_weights": self._get, "set_weights": self._set, "load_weights": self._load, "export": self._refuse_export}
        for name, method in {**own, "save": self._saving("save"), "save_weights": self._saving("save_weights")}.items():
            object.__setattr__(self._model, name, method)
        object.__setattr__(self._model, _KEPT, self)

    def _dense(self) -> list[Any]:
        """Weights as EarlyStopping and others keep them: a shadow is none, and changes its shape."""
        return [variable for variable in self._model.weights if not is_shadow(variable)]

    def _get(self) -> WeightsList:
        if self.rows is not None:
            self.rows.save()
        said = {layer.name: layer.mark.state() for layer in layers_over_tables(self._model)}
        return WeightsList([variable.numpy() for variable in self._dense()], said)

    def _set(self, weights: list[Any]) -> None:
        dense = self._dense()
        if len(weights) != len(dense):
            raise InvalidInputError(f"the model has {len(dense)} weights beside its tables, got {len(weights)}")
        for variable, value in zip(dense, weights, strict=True):
            variable.assign(value)
        said = weights.said if isinstance(weights, WeightsList) else {}
        for layer in layers_over_tables(self._model):
            layer.mark.load(said.get(layer.name, {}))
        self._follow()

    def _saving(self, name: str) -> Callable[..., Any]:
        def saving(*args: Any, **kwargs: Any) -> Any:
            if self.rows is not None:
                self.rows.save()
            return self._originals[name](*args, **kwargs)

        return saving

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        """Load a file of dense weights; one that holds a plain model's embeddings is refused, and changes nothing."""
        variables = self._dense() + list(self._model.optimizer.variables if getattr(self._model, "optimizer", None) else [])
        before, layers = [variable.numpy() for variable in variables], layers_over_tables(self._model)
        try:
            result = self._originals["load_weights"](*args, **kwargs)
        except ValueError:
            self._refuse_plain(layers, variables, before)
            raise
        self._refuse_plain(layers, variables, before)
        self._follow()
        return result

    def _refuse_plain(self, layers: list[Any], variables: list[Any], before: list[Any]) -> None:
        errors = [error for layer in layers if (error := layer.take_refusal()) is not None]
        if errors:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            raise errors[0]

    def _follow(self) -> None:
        if self.rows is not None:
            self.rows.follow()

    def _refuse_export(self, *args: Any, **kwargs: Any) -> None:
        raise InvalidInputError(
            f"model {self._model.name!r} has rows in a cluster, which an exported file cannot ask: export its copy of plain layers, "
            "kvemb.keras.materialize(model).export(…)"
        )


class KerasRowCheckpoints(SavedRows):
    """`kvemb.keras.RowCheckpoints`: save the rows of a model's cluster beside its dense weights, and bring them back.

    From then on `get_weights`, `save_weights` and `save` of the model save the rows of that step, too (once for a step), and `set_weights`
    and `load_weights` load those of the weights that they take. So EarlyStopping, ModelCheckpoint and BackupAndRestore keep whole models.
    After `keras.saving.load_model` and `distribute` call `follow()`. All tables of the cluster are saved and loaded: in a job of several
    trainers let one do it, while no other trains.

    Args:
        model: that `distribute` has connected.
        url: folder of the checkpoints, as for `Cluster.save`: a path, or a URL that all shards reach.
        keep: how many of the newest checkpoints are kept after a save; all unless given.

    Raises:
        InvalidInputError: the model is not connected, or `keep` is below 1.

    Example: the model of the best epoch, rows and all.
        kvemb.keras.RowCheckpoints(model, "/data/run/rows", keep=1)
        model.fit(x, y, validation_data=held_out, callbacks=[keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)])
    """

    def __init__(self, model: Any, url: str, *, keep: int | None = None) -> None:
        kept = getattr(model, _KEPT, None)
        if not isinstance(kept, KeptWeights):
            raise not_connected(model)
        marks: dict[str, list[Any]] = {}
        for layer in layers_over_tables(model):
            marks.setdefault(layer.table.name, []).append(layer.mark)
        super().__init__(marks, url, keep=keep)
        kept.rows = self
