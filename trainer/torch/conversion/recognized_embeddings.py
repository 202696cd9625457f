"""Embeddings whose forward multiplies by a number of theirs: Hugging Face's BartScaledWordEmbedding, Gemma's, and two dozen like them.

They share no class, but their forward is one of two lines. Strategy: the compiled code of a class's forward is compared with that of these
lines, so nothing else can pass for them.
"""

from types import FunctionType
from typing import Any

import torch
from torch import nn


class _ByNumber(nn.Embedding):
    embed_scale: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale  # type: ignore[no-any-return]


class _ByBuffer(nn.Embedding):
    embed_scale: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)  # type: ignore[no-any-return]


def _code(forward: Any) -> Any:
    """Return a function's instructions, and the names and constants they refer to by number, but for a docstring."""
    if not isinstance(forward, FunctionType):
        return None
    code = forward.__code__
    constants = tuple(one for one in code.co_consts if one != forward.__doc__)
    return code.co_code, code.co_names, code.co_freevars, code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0x0C, constants


_LINES = tuple(_code(kind.forward) for kind in (_ByNumber, _ByBuffer))


def is_scaled(module: nn.Module) -> bool:
    """Return whether a module is torch's Embedding but for a factor of its results, `embed_scale`: a number or a buffer of no axes."""
    kinds = [kind for kind in type(module).__mro__ if "forward" in vars(kind)]
    if len(kinds) < 2 or kinds[1] is not nn.Embedding or _code(vars(kinds[0])["forward"]) not in _LINES:
        return False
    scale = getattr(module, "embed_scale", None)
    if "embed_scale" in module._buffers:
        saved = "embed_scale" not in module._non_persistent_buffers_set
        return isinstance(scale, torch.Tensor) and scale.dim() == 0 and scale.device.type != "meta" and not saved
    return isinstance(scale, int | float)
