"""Where rows enter a model's step and gradients leave it: around its compiled functions, so that fit stays Keras's own.

Strategy: `fit`, `train_on_batch`, `evaluate`, `predict` of every backend call `model.train_function` (test, predict) with a source of
batches, a step at a time. A `StepSeam` takes its place: it takes the batch out of the source, looks its rows up, hands both to the
function, and then pushes the shadows' gradients. So a step's rows are pulled after the push of the step before, however far Keras reads
ahead, unless `fed_batches` has them. Inside, `train_step` (test, predict), the model's own where it has one, is called with the batch
alone, while the rows are at hand.

prepare: `fit` with rows that are pulled while the steps before theirs run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, Unpack

import keras
import numpy as np

from ...bridge.batches_ahead import AheadOptions, BatchesAhead, checked_ahead
from ...bridge.pushed_steps import GatheredBatches, PushedSteps, merge_parts
from ...bridge.shared_lookups import LookupResult, SharedLookups
from ...bridge.step_tables import OwnProcess
from ...lookahead.cluster_ports import GradientPart
from ..layers.rows_at_hand import RowsAtHand
from .fed_batches import AskedByLayers, FitAhead, capacity_of, fed_of, keep_integers, look_up, wanted_of
from .ids_plan import Feature, IdsPlan, layers_over_tables
from .kept_weights import Handing, KeptWeights, blank, hand_over_each_batch, not_connected, shadow_of
from .model_state import GradientScale, ModelState, StepValues, in_place, leave_with, n_batches_of, n_per_step, rule_of, ruled

StepHyper = Callable[[ModelState], Mapping[str, StepValues]]
"""The values for the coming step, by table."""
STEPS = ("train", "test", "predict")
_CONNECTED = "_rows_connected"


class ConnectedModel:
    """A model whose steps look rows up and push their gradients."""

    def __init__(
        self,
        model: Any,
        tables: Mapping[str, Any],
        steps: PushedSteps,
        shared: SharedLookups,
        values: StepHyper,
        optimizer: Callable[[], Any],
        features: Mapping[str, Feature | Sequence[Feature]],
    ) -> None:
        self.model, self.tables, self.steps, self.shared, self._values, self._features = model, tables, steps, shared, values, features
        self.at_hand = RowsAtHand()
        self._plans: dict[bool, IdsPlan] = {}  # by whether a batch has a y
        self._capacities: dict[str, int] = {}
        self._optimizer, self._gathered = optimizer, GatheredBatches[dict[str, GradientPart]]()
        self._scale, self._handing = GradientScale(optimizer), Handing(self.at_hand.shadows, optimizer)
        self._state: list[Any] = []  # of the call under way: on JAX what its next step takes before the batch, empty elsewhere
        self.fit_ahead = FitAhead(self.plan, self._plans, shared)
        for layer in layers_over_tables(model):
            layer.feed_from(self.at_hand)
            if layer.table.name not in self.at_hand.shadows:
                self.at_hand.shadows[layer.table.name] = shadow_of(layer, layer.table.dim)

    def install(self) -> None:
        """Stand around the model's steps from now on."""
        for kind in STEPS:
            make = self._around(getattr(self.model, f"make_{kind}_function"), getattr(self.model, f"{kind}_step"), kind)
            object.__setattr__(self.model, f"make_{kind}_function", make)
            setattr(self.model, f"{kind}_function", None)
        self.fit_ahead.install(self.model)
        keep_integers()
        for name in ("predict", "predict_on_batch"):
            object.__setattr__(self.model, name, self._building(getattr(self.model, name)))
        object.__setattr__(self.model, _CONNECTED, self)
        KeptWeights(self.model).install()

    def _building(self, predict: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            self.at_hand.building = not all(layer.built for layer in self.model._flatten_layers())
            try:
                return predict(*args, **kwargs)
            finally:
                self.at_hand.building = False

        return around

    def _with_rows(self, step: Callable[..., Any], training: bool) -> Callable[..., Any]:
        def with_rows(*args: Any) -> Any:
            *state, (data, fed) = args
            with self.at_hand.of_step(fed, training), self._handing.noting() if training else nullcontext():
                return step(*state, data)

        return with_rows

    def _around(self, make: Callable[..., Any], step: Callable[..., Any], kind: str) -> Callable[..., Any]:
        name, training = f"{kind}_function", kind == "train"

        def made(force: bool = False) -> Any:
            if force or getattr(self.model, name) is None:
                # Another function each time: jax.jit keeps what it has compiled by it, with the loss and the optimizer of then.
                object.__setattr__(self.model, f"{kind}_step", self._with_rows(step, training))
                setattr(self.model, name, None)
                make(force)
                setattr(self.model, name, StepSeam(self, getattr(self.model, name), training))
                if training:
                    self._handing.forget()
            return getattr(self.model, name)

        return made

    def plan(self, batch: Any) -> IdsPlan:
        """Return how a batch's ids are computed; found from the first one, by calling the model, which may read its variables."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        if (y is not None) not in self._plans:
            with in_place(self.model, self._state):
                self._plans[y is not None] = IdsPlan(self.model, x, y, self._features)
        return self._plans[y is not None]

    def wanted(self, batch: Any) -> AskedByLayers:
        """Return the ids that a batch asks for."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        plan = self.plan(batch)
        with in_place(self.model, self._state) if plan.weighs else nullcontext():
            return wanted_of(plan.ids(x, y))

    @contextmanager
    def of_call(self, state: list[Any]) -> Iterator[None]:
        """Keep the state that a function was called with. If the function fails, the model gets the state of its last step."""
        self._state = state
        try:
            yield
        except BaseException:
            leave_with(self.model, self._state)
            raise
        finally:
            self._state = []

    def fed(self, batch: Any, training: bool) -> tuple[Any, dict[str, LookupResult]]:
        """Return a batch with its rows, and the results of its lookups."""
        for layer in layers_over_tables(self.model):
            layer.mark.before_lookup(training)
        wanted = self.wanted(batch)
        found = look_up(wanted, self.shared, training)
        for name, one in found.items():
            self._capacities[name] = capacity_of(len(one.ids) + 1, self._capacities.get(name, 0))  # the last row stays free
        return (batch, fed_of(wanted, found, self._capacities)), found

    def train(self, inner: Callable[..., Any], batch: Any) -> Any:
        """Take one step of training."""
        before = ModelState(self.model, self._state)
        self._scale.begin(before)
        values, n_gathered = self._values(before), self._begin_batch(before)
        data, found = self.fed(batch, True)
        for name in found:
            before.put(self.at_hand.shadows[name], blank(self._capacities[name], self.tables[name].dim))
        result = inner(*before.given(), [data] if keras.backend.backend() == "torch" else iter([data]))
        self._state = [result[1]] if self._state else []  # the memory of the one before was given away to the step
        after = ModelState(self.model, self._state)
        if (n := n_per_step(self._optimizer())) > 1 and not self._gather(after, found, n_gathered, n):
            return result
        self.steps.take(
            [self.shared],
            lambda: self._parts(after, found, values, n),
            lambda: {name: one.hyper for name, one in values.items()},
            use_up=_nothing,
        )
        return result

    def _begin_batch(self, before: ModelState) -> int:
        """Return how many batches of its step the optimizer has gathered."""
        optimizer = self._optimizer()
        if (n := n_per_step(optimizer)) == 1:
            return 0
        hand_over_each_batch(rule_of(optimizer))
        n_gathered = n_batches_of(optimizer, before) % n
        self._gathered.begin(n_gathered)
        return n_gathered

    def _gather(self, after: ModelState, found: Mapping[str, LookupResult], n_gathered: int, n: int) -> bool:
        """Keep a batch's gradients; return whether it was the last of its step. One that overflowed is none of them."""
        n_after = n_batches_of(self._optimizer(), after) % n
        if n_after != n_gathered:
            self._gathered.add(self._batch_parts(after, found))
        return n_after == 0 != n_gathered

    def _parts(
        self, after: ModelState, found: Mapping[str, LookupResult], values: Mapping[str, StepValues], n: int
    ) -> dict[str, GradientPart]:
        if n == 1:
            return {name: ruled(part, values[name]) for name, part in self._batch_parts(after, found).items()}
        batches = self._gathered.batches
        self._gathered.clear()
        parts = {}
        for name in self.at_hand.shadows:
            ids, grads, versions = merge_parts([of[name] for of in batches if len(of[name][0])], self.tables[name].dim)
            parts[name] = ruled((ids, grads / np.float32(n), versions), values[name])
        return parts

    def _batch_parts(self, after: ModelState, found: Mapping[str, LookupResult]) -> dict[str, GradientPart]:
        return {name: self._scale.unscaled(self._part(after, name, found.get(name))) for name in self.at_hand.shadows}

    def _part(self, after: ModelState, name: str, found: LookupResult | None) -> GradientPart:
        shadow, gradient = self.at_hand.shadows[name], None
        if found is not None and after.trains(shadow):
            gradient = self._handing.gradient(name, after.value(shadow), len(found.ids))
        if found is None or gradient is None:
            return merge_parts([], self.tables[name].dim)
        # In memory of its own: the next step gives the shadow's away, and an async push may still be on its way.
        return found.ids, np.array(gradient, np.float32), found.versions


def is_connected(model: Any) -> bool:
    """Whether rows come to a model's steps."""
    return _CONNECTED in vars(model)


def connected_of(model: Any) -> ConnectedModel:
    """Return the object that stands around a model's steps."""
    connected = vars(model).get(_CONNECTED) if isinstance(model, keras.Model) else None
    if not isinstance(connected, ConnectedModel):
        raise not_connected(model)
    return connected


class StepSeam:
    """Stands in the place of a model's compiled function: every batch comes with its rows."""

    def __init__(self, connected: ConnectedModel, inner: Callable[..., Any], training: bool) -> None:
        self._connected, self._inner, self._training = connected, inner, training
        self._process = OwnProcess(f"Keras on {keras.backend.backend()}")

    def __call__(self, *args: Any) -> Any:
        """Run as many steps as Keras asks for at a time."""
        self._process.check()
        *state, source = args
        with self._connected.of_call(state):
            return self._run(state, source)

    def _run(self, state: list[Any], source: Any) -> Any:
        batches, result = self._batches(source), None
        if not self._training:
            fed = (self._connected.fed(batch, False)[0] for batch in batches)
            return self._inner(*state, list(fed) if isinstance(source, list) else fed)
        for batch in batches:
            result = self._connected.train(self._inner, batch)
        return result

    def _batches(self, source: Any) -> Iterator[Any]:
        """The batches of one call: the first is read here, for the end of the source is told by StopIteration."""
        if isinstance(source, list):
            return iter(source)
        return chain([next(source)], islice(source, self._connected.model.steps_per_execution - 1))


def _nothing() -> None:
    """Do nothing: gradients need not be used up, since each step overwrites them."""


def prepare(model: Any, **options: Unpack[AheadOptions]) -> BatchesAhead:
    """Pull the rows of batches before `fit` comes to them; data, callbacks and the call of `fit` stay as they are.

    It holds for every later `fit` of this model; called again, for the next one. Other steps (`train_on_batch`, `evaluate`, `predict`) pull
    when they are taken. `fit` reads up to `capacity` batches more of its data then: of a generator that outlives `fit` they are gone.

    Args:
        model: that `distribute` has connected.
        options: `AheadOptions`: consistency, k, threads_num, capacity, executor, report.

    Returns:
        The object that pulls: its `report` has the sizes chosen and the times measured, its `staleness` how old rows were.

    Raises:
        InvalidInputError: the model is not connected, or an option is wrong. In `fit`: any error of the data or a pull, at the batch
            concerned.

    Example:
        distribute(model, cluster)
        ahead = prepare(model, threads_num=4, capacity=8)
        model.fit(x, y, batch_size=4096, epochs=3)
        print(ahead.report)
    """
    connected = connected_of(model)
    ahead = checked_ahead(connected.shared.cluster, **options)
    return connected.fit_ahead.prepare(ahead)
