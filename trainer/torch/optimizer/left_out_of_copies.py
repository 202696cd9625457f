"""What a plain copy of a model leaves out: optimizers that push, wherever the model holds them. In any other copy they refuse.

What must not live here: the copy (`materialize`), what an optimizer says when it refuses. Strategy: `copy` hands one memo to all that is
copied. A mark in it reaches optimizers in lists, on schedulers and on other objects; nothing needs to be searched.
"""

from typing import Any

_MARK = "kvemb: optimizers that push are left out"  # keys of copy's own are ids, integers

HELD_BY_A_MODEL = (
    "If a model that is copied holds it (model.optimizer), or a scheduler of it, take that off before (model.optimizer = None) and put it "
    "back; kvemb.torch.materialize(model) leaves it out by itself"
)
"""What to do when an optimizer refuses that somebody did not mean to copy."""


def leave_out(memo: dict[Any, Any]) -> None:
    """Let the copy that is made with this memo have None for optimizers that push."""
    memo[_MARK] = True


def are_left_out(memo: dict[Any, Any]) -> bool:
    """Return whether the copy that is made with this memo has none of them."""
    return _MARK in memo
