"""`python -m benchmarks [NAME] [options]`: run one question, or those that make up `make bench` with their defaults; or draw pictures."""

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import (
    apply,
    checkpoint,
    compare,
    deepfm,
    dlrm,
    durability,
    elastic,
    evictions,
    exchange,
    flash,
    frameworks,
    index,
    latency,
    memory,
    new_rows,
    policies,
    publish,
    pull,
    recovery,
    scale,
    serve,
    storage_optimizes,
    switch,
    train,
)
from benchmarks.report import Report, as_text, load_average, this_command, write_json
from kvemb.errors import KvembError


@dataclass(frozen=True)
class Benchmark:
    """One question: `run`'s docstring says what it asks and how to read the answer."""

    run: Callable[[argparse.Namespace], Report]
    add_arguments: Callable[[argparse.ArgumentParser], None]


BENCHMARKS: Mapping[str, Benchmark] = {
    "pull": Benchmark(pull.pull, pull.add_arguments),
    "latency": Benchmark(latency.latency, latency.add_arguments),
    "apply": Benchmark(apply.apply, apply.add_arguments),
    "train": Benchmark(train.train, train.add_arguments),
    "new_rows": Benchmark(new_rows.new_rows, new_rows.add_arguments),
    "durability": Benchmark(durability.durability, durability.add_arguments),
    "recovery": Benchmark(recovery.recovery, recovery.add_arguments),
    "checkpoint": Benchmark(checkpoint.checkpoint, checkpoint.add_arguments),
    "compare": Benchmark(compare.compare, compare.add_arguments),
    "deepfm": Benchmark(deepfm.deepfm, deepfm.add_arguments),
    "dlrm": Benchmark(dlrm.dlrm, dlrm.add_arguments),
    "memory": Benchmark(memory.memory, memory.add_arguments),
    "elastic": Benchmark(elastic.elastic, elastic.add_arguments),
    "evictions": Benchmark(evictions.evictions, evictions.add_arguments),
    "policies": Benchmark(policies.policies, policies.add_arguments),
    "publish": Benchmark(publish.publish, publish.add_arguments),
    "exchange": Benchmark(exchange.exchange, exchange.add_arguments),
    "flash": Benchmark(flash.flash, flash.add_arguments),
    "frameworks": Benchmark(frameworks.frameworks, frameworks.add_arguments),
    "index": Benchmark(index.index, index.add_arguments),
    "scale": Benchmark(scale.scale, scale.add_arguments),
    "serve": Benchmark(serve.serve, serve.add_arguments),
    "switch": Benchmark(switch.switch, switch.add_arguments),
    "storage_optimizes": Benchmark(storage_optimizes.storage_optimizes, storage_optimizes.add_arguments),
}


BY_NAME_ONLY = (
    "compare",
    "dlrm",
    "elastic",
    "evictions",
    "exchange",
    "flash",
    "frameworks",
    "index",
    "policies",
    "publish",
    "serve",
    "storage_optimizes",
    "switch",
)
"""Left out when no name is given: they take minutes of their own, and all others together are to take less than fifteen."""


PLOT = "plot"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of kvemb beside its peers, on real servers.")
    others = f"without one, all but {', '.join(BY_NAME_ONLY)} run with their defaults"
    names = parser.add_subparsers(dest="name", metavar="NAME", help=others)
    for name, benchmark in BENCHMARKS.items():
        about = inspect.getdoc(benchmark.run) or ""
        sub = names.add_parser(name, help=about.splitlines()[0], description=about)
        benchmark.add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    drawing = names.add_parser(PLOT, help="Draw the pictures of docs/benchmarks.md from reports that were written by --json.")
    drawing.add_argument("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="of reports (benchmarks/results)")
    drawing.add_argument("--out", type=Path, default=Path("docs/pictures"), metavar="DIR", help="of pictures (docs/pictures)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.name == PLOT:
        from benchmarks.plot import plot

        return plot(options)
    chosen = [options] if options.name else [parser.parse_args([name]) for name in BENCHMARKS if name not in BY_NAME_ONLY]
    for one in chosen:
        try:
            load = load_average()
            report = BENCHMARKS[one.name].run(one)
            values = report.to_dict(this_command(), load)
        except KvembError as error:
            print(f"benchmarks {one.name}: {error}", file=sys.stderr)
            return 1
        if one.json:
            write_json(one.json, values)
        print(as_text(values))
        if report.failed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
