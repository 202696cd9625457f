"""A later release, for tests: `python next_release.py FORMAT… -- ARGUMENTS` is `kvemb ARGUMENTS` that writes and reads other formats."""

import sys
from collections.abc import Callable
from types import ModuleType

from kvemb.coordination import markers
from kvemb.schema import cluster_map
from paramserver.journal import segment
from paramserver.recovery import state_file
from paramserver.snapshot import run_manifest, sorted_run

NAMES: dict[str, tuple[ModuleType, dict[str, object]]] = {
    "marker": (markers, {"_VERSION": 7, "_REPAIRED_VERSION": 8}),
    "map": (cluster_map, {"FORMAT_VERSION": 4, "_FIELDS": {4: 12}}),
    "state": (state_file, {"FORMAT_VERSION": 4, "_READS": (4,)}),
    "segment": (segment, {"FORMAT_VERSION": 2}),
    "manifest": (run_manifest, {"FORMAT_VERSION": 2}),
    "run": (sorted_run, {"FORMAT_VERSION": 2}),
}


def apply(name: str, assign: Callable[[object, str, object], None] = setattr) -> None:
    """Have this process write and read another format of one kind of data."""
    module, values = NAMES[name]
    for constant, value in values.items():
        assert hasattr(module, constant)
        assign(module, constant, value)


if __name__ == "__main__":
    from kvemb.cli import main

    end = sys.argv.index("--")
    for given in sys.argv[1:end]:
        apply(given)
    sys.exit(main(sys.argv[end + 1 :]))
