"""`make peers PEERS=FOLDER`, or `python -m tests.peers FOLDER`: peers' own tests, run with our classes in place of theirs.

FOLDER holds their test files, as deep as you like: a checkout of their repository will do. Nothing is fetched, and none of their files is
kept here. Their package has to be installed. A test may fail for what ours leaves out on purpose (docs/coming-from.md): read the reasons,
which are counted. `--theirs` runs the same files without ours, to see what fails on this machine anyway.
"""

import argparse
import os
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Suite:
    """Test files of a peer, by the ends of their paths, and what takes whose place in them: both as "module:name"."""

    name: str
    files: tuple[str, ...]
    places: dict[str, str]


SUITES = (
    Suite(
        "TorchRec's features",
        ("test_jagged_tensor.py", "test_keyed_jagged_tensor.py", "test_keyed_tensor.py"),
        {f"torchrec.sparse.jagged_tensor:{name}": f"trainer.torch:{name}" for name in ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor")},
    ),
    Suite(
        "TorchRec's collections",
        ("modules/tests/test_embedding_modules.py",),
        {
            f"torchrec.modules.embedding_modules:{name}": f"tests.peers.stand_ins:{name}"
            for name in ("EmbeddingBagCollection", "EmbeddingCollection")
        },
    ),
)


@dataclass
class Count:
    """A plugin of pytest that counts how tests end, and why they fail."""

    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test where it ends: in its call, or before it was called."""
        if report.when == "call" or not report.passed:
            self.ends[report.outcome] += 1
            self._why(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that could not be read as one failure."""
        if report.failed:
            self.ends["failed"] += 1
            self._why(report)

    def _why(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            said = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E  ")]
            self.reasons[(said or report.longreprtext.splitlines()[-1:] or ["?"])[0][:110]] += 1


def run(suite: Suite, files: list[Path], *, theirs: bool) -> Count:
    """Run a suite's files in this process, and count."""
    count = Count()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside = {str(file.parent.parent) for file in files}
        for place, taker in suite.places.items():
            (module, name), (our_module, our_name) = place.split(":"), taker.split(":")
            if not theirs:
                patch.setattr(import_module(module), name, getattr(import_module(our_module), our_name))
            package = import_module(module.rpartition(".")[0])  # whose tests import each other, and no wheel has them
            patch.setattr(package, "__path__", list(dict.fromkeys([*package.__path__, *beside])))
        options = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib"]
        options.append("--continue-on-collection-errors")
        pytest.main([*options, "-c", os.devnull, "--rootdir", str(files[0].parent), *map(str, files)], plugins=[count])
    return count


def main(argv: list[str] | None = None) -> int:
    """Run the suites that FOLDER has; return 1 where it has none."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description="Peers' own tests, with our classes in place of theirs.")
    parser.add_argument("folder", type=Path, help="with their test files")
    parser.add_argument("--theirs", action="store_true", help="without ours: what fails here anyway")
    args = parser.parse_args(argv)
    sys.path[:0] = [str(TESTS), str(TESTS / "torch")]
    every = sorted(args.folder.resolve().rglob("*.py"))
    lines = []
    for suite in SUITES:
        if files := [file for file in every if any(file.as_posix().endswith(f"/{end}") for end in suite.files)]:
            count = run(suite, files, theirs=args.theirs)
            lines.append(f"{suite.name}: " + (", ".join(f"{n} {end}" for end, n in sorted(count.ends.items())) or "no test ran"))
            lines += [f"  {n} x {reason}" for reason, n in count.reasons.most_common()]
    print("\n".join(lines or [f"{args.folder} has no test files of a peer: {', '.join(end for suite in SUITES for end in suite.files)}"]))
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
