"""The folder tree is the architecture: every import is walked, an arrow not in the picture fails.

    trainer ──► kvemb ◄── paramserver
    inside kvemb: table → stores → {wire, net} → {record, errors};   nothing imports upward

Lazy imports, imports for type checkers and `import_module("…")` with a literal count as arrows too. The rules are data
(below); `arrows` and `violations` are pure, so that the test can be tested on sources with a bad arrow. tests/,
examples/ and benchmarks/ may import all three packages.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvemb", "paramserver", "trainer")
MAY_IMPORT = {"kvemb": {"kvemb"}, "paramserver": {"paramserver", "kvemb"}, "trainer": {"trainer", "kvemb"}}

# The one upward arrow: a facade hands on a package that is found under no other name where kvemb is installed (kvemb/own).
FACADES = {
    "kvemb.torch": "trainer.torch",
    "kvemb.columns": "trainer.columns",
    "kvemb.jax": "trainer.jax",
    "kvemb.keras": "trainer.keras",
    "kvemb.tensorflow": "trainer.tensorflow",
    "kvemb.trainer": "trainer",
    "kvemb.commands.shard_program": "paramserver.__main__",
}

# The rooms of each package, lowest first. A room is a folder's own files, or a file that lies directly in the package; the longest name
# that fits is a module's. A room imports rooms of the lines before its own, and itself. Every module is in one: none is on top by default.
# docs/architecture.md has a line for each.
ROOMS = {
    "kvemb": (
        {"kvemb.cached_property", "kvemb.errors", "kvemb.own", "kvemb.process"},
        {"kvemb.columns", "kvemb.jax", "kvemb.keras", "kvemb.tensorflow", "kvemb.torch", "kvemb.trainer"},
        {"kvemb.arrays", "kvemb.metrics"},
        {"kvemb.specs"},
        {"kvemb.init", "kvemb.optim"},
        {"kvemb.schema"},
        {"kvemb.checkpoint.format", "kvemb.coordination", "kvemb.protocol", "kvemb.wire"},
        {"kvemb.net", "kvemb.wire.memcached", "kvemb.wire.resp"},
        {"kvemb.config", "kvemb.interrupts"},
        {"kvemb.stores"},
        {"kvemb.datapath", "kvemb.local_cluster", "kvemb.stores.redis_server"},
        {"kvemb.client", "kvemb.stores.redis_cluster", "kvemb.stores.standalone"},
        {"kvemb.checkpoint", "kvemb.operate", "kvemb.stores.redis_cluster.scaling", "kvemb.testing"},
        {"kvemb.api"},
        {"kvemb", "kvemb.commands"},
        {"kvemb.demo"},
        {"kvemb.cli"},
    ),
    "paramserver": (
        {"paramserver", "paramserver.optim", "paramserver.shard_process"},
        {"paramserver.model"},
        {"paramserver.engine", "paramserver.ingest", "paramserver.journal"},
        {"paramserver.snapshot"},
        {"paramserver.repair"},
        {"paramserver.recovery", "paramserver.moves"},
        {"paramserver.apply", "paramserver.checkpoint"},
        {"paramserver.rpc"},
        {"paramserver.lifecycle"},
        {"paramserver.__main__"},
    ),
    "trainer": (
        {"trainer.report"},
        {"trainer.lookahead"},
        {"trainer", "trainer.bridge"},
        {"trainer.columns", "trainer.jax", "trainer.keras.layers", "trainer.torch.lookup"},
        {"trainer.keras.steps", "trainer.tensorflow", "trainer.torch.checkpoints", "trainer.torch.modules", "trainer.torch.optimizer"},
        {"trainer.keras.distributing", "trainer.torch.collections", "trainer.torch.conversion", "trainer.torch.loaders"},
        {"trainer.torch.export"},
        {"trainer.keras", "trainer.torch"},
    ),
}

PURE = (
    "kvemb.cached_property", "kvemb.errors", "kvemb.arrays", "kvemb.arrays", "kvemb.specs", "kvemb.init", "kvemb.optim",
    "kvemb.schema.keys", "kvemb.schema.buckets", "kvemb.schema.pages", "kvemb.schema.slots", "kvemb.schema.record",
    "kvemb.wire", "paramserver.optim",
)  # fmt: skip
PURE_THIRD_PARTY = {"numpy", "xxhash"}
# Sockets, threads, processes, clocks and other sources of surprise.
IMPURE_STDLIB = {
    "asyncio", "concurrent", "datetime", "http", "multiprocessing", "queue", "random", "sched", "secrets", "select",
    "selectors", "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "_thread", "time", "urllib",
}  # fmt: skip
SOCKETS = {"socket", "socketserver", "select", "selectors", "ssl"}
MAY_TOUCH_SOCKETS = ("kvemb.net", "kvemb.local")  # local: looks for free ports, nothing else
FRAMEWORKS = ("torch", "tensorflow", "jax", "keras")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Whether the module is one of these, or inside one of them."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def arrows(module: str, source: str, *, known: frozenset[str], is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Yield (imported module, line). `from a import b` is an arrow to a.b where that is a module, otherwise to a."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                up = package[: len(package) - node.level + 1]
                base = ".".join([*up, base]) if base else ".".join(up)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in known else base), node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__", "import_own", "facade"} and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def room(module: str) -> tuple[int, str]:
    """The height and the name of a module's room; -1 and "" where it has none."""
    heights = {name: height for height, names in enumerate(ROOMS[module.split(".")[0]]) for name in names}
    inside = [name for name in heights if is_in(module, (name,))]
    # The package itself is a room of one file: a new file beside it gets a room of its own.
    name = max((name for name in inside if "." in name or name == module), key=len, default="")
    return heights.get(name, -1), name


def may_enter(module: str, target: str) -> bool:
    (height, name), (to_height, to_name) = room(module), room(target)
    return name == to_name or to_height < height


def fault(module: str, target: str) -> str | None:
    """Say what is wrong with one arrow, or None."""
    top, to = module.split(".")[0], target.split(".")[0]
    if module in FACADES and is_in(target, (FACADES[module],)):
        return None
    if to in PACKAGES and to not in MAY_IMPORT[top]:
        return f"{top} must not import {to}"
    if top == to and not may_enter(module, target):
        return "imports a room that is not below its own (ROOMS)"
    if is_in(module, PURE) and not is_pure(target):
        return "is pure: NumPy and the standard library without sockets, threads, processes and clocks"
    if to in SOCKETS and not (is_in(module, MAY_TOUCH_SOCKETS) or module.startswith("kvemb.local")):
        return "sockets are touched in kvemb.net only"
    if to in FRAMEWORKS and not module.startswith(f"trainer.{to}"):
        return f"{to} is imported in trainer/{to} only"
    return None


def is_pure(target: str) -> bool:
    top = target.split(".")[0]
    if top in PACKAGES:
        return is_in(target, PURE)
    return top in PURE_THIRD_PARTY or (top in sys.stdlib_module_names and top not in IMPURE_STDLIB)


def violations(module: str, source: str, *, known: frozenset[str], is_package: bool = False) -> list[str]:
    """One line per arrow that is not in the picture."""
    found = arrows(module, source, known=known, is_package=is_package)
    faults = ((target, line, fault(module, target)) for target, line in found)
    return [f"{module}:{line} imports {target}: {why}" for target, line, why in faults if why]


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_every_import_is_an_arrow_of_the_picture(module: str) -> None:
    path = SOURCES[module]
    bad = violations(module, path.read_text(encoding="utf-8"), known=frozenset(SOURCES), is_package=path.name == "__init__.py")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("module", sorted(name for name in SOURCES if not is_in(name, ("kvemb",))))
def test_trainer_and_paramserver_name_their_own_modules_relatively(module: str) -> None:
    """They are installed inside of kvemb, so that a program's own `trainer.py` is not in their way: see kvemb/own."""
    lines = SOURCES[module].read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.match(r"\s*(from|import) (trainer|paramserver)\b", line)]


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_no_module_takes_the_cached_property_that_hangs_in_a_forked_child(module: str) -> None:
    """In Python 3.11 it has one lock for all instances; kvemb.cached_property has none."""
    named = [node for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    assert "cached_property" not in {alias.name for node in named if node.module == "functools" for alias in node.names}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_every_module_is_in_a_room(module: str) -> None:
    assert room(module)[0] >= 0, f"{module} is in no room: see ROOMS"


def test_no_module_imports_itself_by_a_detour() -> None:
    known = frozenset(SOURCES)
    to = {
        name: {
            t for t, _ in arrows(name, path.read_text(encoding="utf-8"), known=known, is_package=path.name == "__init__.py") if t in known
        }
        for name, path in SOURCES.items()
    }
    circles = TopologicalSorter({name: targets & to.keys() - {name} for name, targets in to.items()})
    circles.prepare()  # raises CycleError, which names them


def test_a_module_of_at_most_sixty_lines_has_more_than_one_importer() -> None:
    """Facades are the one exception: each is a public name, and imports what it hands on at first use."""
    known = frozenset(SOURCES)
    importers: dict[str, set[str]] = {}
    for name, path in SOURCES.items():
        for target, _ in arrows(name, path.read_text(encoding="utf-8"), known=known, is_package=path.name == "__init__.py"):
            importers.setdefault(target, set()).add(name)
    small = {name for name, path in SOURCES.items() if len(path.read_text(encoding="utf-8").splitlines()) <= 60}
    rooms = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    alone = {name for name in small - rooms - FACADES.keys() if len(importers.get(name, ())) == 1}
    assert alone == set(), "it belongs into the module that imports it"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_class_of_more_than_twenty_methods_says_why_it_is_one(module: str) -> None:
    classes = [node for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]
    large = [node for node in classes if sum(isinstance(inner, ast.FunctionDef) for inner in node.body) > 20]
    assert not [node.name for node in large if not re.search(r"One class|methods", ast.get_docstring(node) or "")], "split it, or say why"


def test_the_three_packages_are_there() -> None:
    assert {"kvemb", "paramserver", "trainer"} <= set(SOURCES)


@pytest.mark.parametrize("facade", sorted(FACADES.keys() & SOURCES.keys()))
def test_a_facade_imports_its_bridge_and_nothing_else_of_the_project(facade: str) -> None:
    source = SOURCES[facade].read_text(encoding="utf-8")
    found = {target for target, _ in arrows(facade, source, known=frozenset(SOURCES))}
    assert {target for target in found if target.split(".")[0] in PACKAGES} == {FACADES[facade], "kvemb.own"}


KNOWN = frozenset(
    {"kvemb", "kvemb.errors", "kvemb.net", "kvemb.net.deadline", "kvemb.schema.record", "kvemb.stores.store", "kvemb.api.table"},
)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvemb.api.table", "import paramserver"),
        ("kvemb.api.table", "def f():\n    from trainer.torch import Embedding"),
        ("kvemb.api.table", "import importlib\nimportlib.import_module('trainer.torch')"),
        ("kvemb.torch", "import paramserver.rpc.service"),
        ("paramserver.rpc.service", "from trainer import columns"),
        ("trainer.columns", "import paramserver.optim"),
        ("kvemb.stores.store", "from kvemb.api.table import Table"),
        ("kvemb.stores.store", "from kvemb.api import table"),
        ("kvemb.stores.store", "from ..api.table import Table"),
        ("kvemb.stores.store", "import kvemb"),
        ("kvemb.net.deadline", "from kvemb.stores.store import Store"),
        ("kvemb.schema.record", "import kvemb.net.deadline"),
        ("kvemb.wire.resp.resp_codec", "from kvemb.net.deadline import Deadline"),
        ("kvemb.wire.resp.resp_codec", "import socket"),
        ("kvemb.schema.record", "from time import monotonic"),
        ("kvemb.arrays.hashing", "import msgpack"),
        ("paramserver.optim.kernels", "import threading"),
        ("paramserver.optim.kernels", "import grpc"),
        ("paramserver.optim.kernels", "from paramserver import service"),
        ("kvemb.stores.standalone.redis_store", "import socket"),
        ("paramserver.engine.engine", "from ..ingest.ingest import Intake"),
        ("paramserver.journal.entry", "from ..engine import engine"),
        ("paramserver.rpc.service", "import select"),
        ("kvemb.api.table", "import torch"),
        ("kvemb.torch", "import torch"),
        ("trainer.columns", "import torch.nn"),
        ("trainer.torch.bag", "import tensorflow as tf"),
    ],
)
def test_a_bad_arrow_is_caught(module: str, source: str) -> None:
    assert len(violations(module, source, known=KNOWN)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvemb.api.table", "from kvemb.stores.store import Store\nfrom kvemb.errors import KvembError"),
        ("kvemb.stores.store", "from kvemb.net.deadline import Deadline\nimport redis, time, threading"),
        ("kvemb.wire.resp.resp_codec", "import numpy as np\nfrom kvemb.schema.record import RecordFormat\nfrom kvemb import errors"),
        ("kvemb.net.deadline", "import socket, selectors, time"),
        ("kvemb.local_ports", "import socket"),
        ("kvemb.torch", "from trainer.torch import Embedding"),
        ("trainer.torch.bag", "import torch\nfrom trainer.columns import Columns\nimport kvemb"),
        ("paramserver.optim.kernels", "from kvemb.errors import InvalidInputError\nfrom dataclasses import dataclass"),
        ("paramserver.rpc.service", "import grpc\nfrom paramserver.optim import kernels"),
    ],
)
def test_a_good_arrow_passes(module: str, source: str) -> None:
    assert violations(module, source, known=KNOWN) == []


def test_no_framework_is_imported_unless_its_bridge_is() -> None:
    bridges = tuple(f"trainer.{name}" for name in FRAMEWORKS)
    modules = [m for m in SOURCES if not (is_in(m, bridges) or m in FACADES or m.endswith("__main__"))]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(set({FRAMEWORKS!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
