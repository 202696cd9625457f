"""optax's optimizers under their names and with their arguments, as a table's update rule. Pure.

A transformation is a pair of closures, which do not tell their rule, so it is named once more here. Rows that are in no batch stay as they
are; optax with dense gradients moves them (momentum, decay). Of a transformation for dense parameters, the names of the functions in its
closures tell whether it would have to see the gradients of rows, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvemb import optim
from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

_OF_ALL_GRADIENTS = {
    *("clip", "clip_by_global_norm", "clip_by_block_rms", "adaptive_grad_clip", "zero_nans", "apply_if_finite", "skip_not_finite"),
    *("skip_large_updates", "centralize", "add_noise", "MultiSteps"),
}
_OF_RATES = {"scale_by_schedule", "inject_hyperparams", "inject_stateful_hyperparams", "reduce_on_plateau"}
_NONE = 1e-30  # the least that a parameter server takes behind the root


def sgd(learning_rate: float, momentum: float | None = None, nesterov: bool = False) -> OptimizerSpec:
    """optax.sgd.

    Example:
        >>> sgd(0.1, momentum=0.9).defaults()["momentum"]
        0.9
    """
    return optim.sgd(_rate(learning_rate), momentum=momentum or 0.0, nesterov=nesterov)


def adagrad(learning_rate: float, initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> OptimizerSpec:
    """optax.adagrad, whose eps stands under the root: with an accumulator that begins at 0.1 that is the same to 5e-7.

    Raises:
        InvalidInputError: an accumulator that begins so low that it would not be.
    """
    if eps > 1e-5 * initial_accumulator_value:
        raise InvalidInputError(
            f"adagrad: optax adds eps={eps:g} under the root, a parameter server behind it; with initial_accumulator_value="
            f"{initial_accumulator_value:g} these differ. Give at least {1e5 * eps:g}, or kvemb.optim.adagrad, which says what it does"
        )
    return optim.adagrad(_rate(learning_rate), eps=_NONE, initial_accumulator_value=initial_accumulator_value)


def adam(learning_rate: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0) -> OptimizerSpec:
    """optax.adam."""
    return adamw(learning_rate, b1, b2, eps, eps_root, weight_decay=0.0)


def adamw(
    learning_rate: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0, *, weight_decay: float = 1e-4
) -> OptimizerSpec:
    """optax.adamw."""
    if eps_root:
        raise InvalidInputError(f"adam: eps_root={eps_root:g} has no counterpart in the parameter servers; leave it 0")
    return optim.adamw(_rate(learning_rate), betas=(b1, b2), eps=eps, weight_decay=weight_decay)


def rmsprop(
    learning_rate: float,
    decay: float = 0.9,
    eps: float = 1e-8,
    *,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
) -> OptimizerSpec:
    """optax.rmsprop, its eps under the root or after it."""
    behind, under = (_NONE, eps) if eps_in_sqrt else (eps, 0.0)
    rate = _rate(learning_rate)
    return optim.rmsprop(rate, alpha=decay, eps=behind, eps_root=under, momentum=momentum or 0.0, centered=centered)


def _rate(learning_rate: object) -> float:
    if callable(learning_rate):
        raise InvalidInputError("learning_rate is a schedule; give its first value here, and set step.hyper[table]['lr'] before each step")
    return float(learning_rate)  # type: ignore[arg-type]


def of_all_gradients(optimizer: Any) -> list[str]:
    """Return the parts of a transformation that act on a model's gradients as a whole, or, within others, on those of several steps."""
    gathering = gathering_of(optimizer)
    return sorted(_OF_ALL_GRADIENTS & set(_names(optimizer if gathering is None else gathering.inner_opt, set())))


def gathering_of(optimizer: Any) -> Any:
    """Return the optax.MultiSteps that a transformation is, itself or its `gradient_transformation()`; None: it is another."""
    found: Any = optimizer if hasattr(optimizer, "inner_opt") else getattr(getattr(optimizer, "update", None), "__self__", None)
    if type(found).__name__ != "MultiSteps" or not type(found).__module__.startswith("optax"):
        return None
    if not found._should_skip_update_fn.__qualname__.startswith("MultiSteps.__init__."):  # optax's own, which skips none
        raise InvalidInputError(
            "the optimizer is optax.MultiSteps with should_skip_update_fn, which judges the gradients of the parameters without those of "
            "rows, once these are on their way. Leave it out, and give row_grads= a function that sets both to zero where a batch is bad"
        )
    return found


def step_under_way(gathering: Any, state: Any) -> tuple[int, int, int]:
    """Return how many batches a MultiSteps has gathered for its step, how many it gathers, and by what their sum is divided."""
    n_batches = int(gathering._every_k_schedule(state.gradient_step))
    return int(state.mini_step), n_batches, n_batches if gathering._use_grad_mean else 1


def follows_schedule(optimizer: Any) -> bool:
    """Whether a transformation's rate changes from step to step."""
    return not _OF_RATES.isdisjoint(_names(optimizer, set()))


def _names(of: Any, seen: set[int]) -> Iterator[str]:
    """The names of optax's functions that made a transformation, and those within it."""
    if id(of) in seen:
        return
    seen.add(id(of))
    module = getattr(of, "__module__", None) or ""
    if callable(of) and hasattr(of, "__qualname__"):
        of = getattr(of, "__func__", of)
        if module.startswith("optax"):
            yield of.__qualname__.partition(".")[0]
        inside = [cell.cell_contents for cell in getattr(of, "__closure__", None) or () if _filled(cell)]
    elif isinstance(of, Mapping):
        inside = list(of.values())
    elif isinstance(of, list | tuple):
        inside = list(of)
    elif type(of).__module__.startswith("optax"):
        yield type(of).__name__
        inside = list(vars(of).values()) if hasattr(of, "__dict__") else []
    else:
        return
    for one in inside:
        yield from _names(one, seen)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
