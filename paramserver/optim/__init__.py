"""The maths of the optimizers: pure functions on NumPy arrays. No I/O, threads, clocks or gRPC.

`build_optimizer(spec)` turns a `kvemb.optim.OptimizerSpec` into an `Optimizer`: `initial_state` and `update`. `kernels` has one kernel for
each rule, which works in place. `update_rule` cuts a batch into blocks, gives the kernel copies of them, and so keeps `update` pure.
"""

from .kernels import build_optimizer
from .update_rule import Optimizer

__all__ = ["Optimizer", "build_optimizer"]
