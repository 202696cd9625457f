"""The options of `kvemb plan` and `kvemb bench`. Imports nothing that the start of another verb would have to wait for."""

import argparse
import math

from kvemb.commands.config_option import takes_config

_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "rmsprop")


def add_plan(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `kvemb plan`."""
    plan = verbs.add_parser("plan", help="how many nodes and shards a table will need, from measured costs; needs no cluster")
    plan.add_argument("--ids", type=_large, required=True, metavar="N", help="rows that will exist, as 1e9")
    plan.add_argument("--dim", type=_large, required=True, metavar="N", help="weights of a row")
    plan.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of weights in storage (default float32)"
    )
    plan.add_argument("--optimizer", choices=_OPTIMIZERS, default="adam", help="without its options (default adam)")
    plan.add_argument("--step-ids", type=_large, default=100_000, metavar="N", help="distinct ids of a step, of all trainers (default 1e5)")
    plan.add_argument("--steps-per-s", type=positive, default=1.0, metavar="X", help="how many such steps a second (default 1)")
    plan.add_argument("--node-gb", type=positive, default=64.0, metavar="GB", help="memory limit of a storage node (default 64)")
    plan.add_argument("--shard-gb", type=positive, default=64.0, metavar="GB", help="memory of a shard's host (default 64)")
    plan.add_argument("--cache-mb", type=positive, default=256.0, metavar="MB", help="parameter_servers.cache_mb (default 256)")
    plan.add_argument("--json", action="store_true", help="for programs: one line of JSON")
    return plan


def add_bench(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `kvemb bench`."""
    bench = verbs.add_parser("bench", help="how fast this cluster's rows are read, node by node; changes nothing, a reader may run it")
    takes_config(bench)
    bench.add_argument("--seconds", type=positive, default=30.0, metavar="S", help="how long to pull, in all (default 30)")
    bench.add_argument("--table", default="", help="whose rows (default: the table with the most)")
    bench.add_argument("--batch", type=_large, default=10_000, metavar="N", help="ids of a pull (default 10000)")
    bench.add_argument("--json", action="store_true", help="for programs: one line of JSON")
    return bench


def positive(text: str) -> float:
    """Read a number above 0, which need not be whole."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _large(text: str) -> int:
    number = positive(text)
    if number != int(number) or number > 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1e18")
    return int(number)
