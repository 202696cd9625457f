"""Lookups stay outside of what torch.compile compiles.

What must not live here: lookups. They fetch rows over the network and count in unsigned 64-bit integers, which compilers of tensor programs
cannot do. A compiled model runs them as they are, and is compiled before and behind them.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_WHY = (
    "kvemb: rows come over the network, so lookups and pushes run outside of what torch.compile compiles. Leave fullgraph=True out; or "
    "compile with it the parts of the model that have no tables; or, to serve, a copy of plain modules: kvemb.torch.materialize(model)"
)
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def eager(forward: _Forward) -> _Forward:
    """Keep a function, and all that it calls, out of torch.compile.

    As torch.compiler.disable, whose import of the compiler takes seconds and is put off until something has imported it.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # true where this line is traced: here a full graph is refused
            torch._dynamo.graph_break(msg=_WHY)
        if not disabled:
            if "torch._dynamo" not in sys.modules:  # nothing is compiled in this process, so far
                return forward(*args, **kwargs)
            disabled.append(torch.compiler.disable(forward))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return run  # type: ignore[return-value]
