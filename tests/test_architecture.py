"""The folder tree is the architecture: every import is walked, an arrow not in the picture fails.

    trainer ──► kvemb ◄── paramserver
    inside kvemb: table → stores → {wire, net} → {record, errors};   nothing imports upward

Lazy imports, imports for type checkers and `import_module("…")` with a literal count as arrows too. The rules are data
(below); `arrows` and `violations` are pure, so that the test can be tested on sources with a bad arrow. tests/ and
benchmarks/ may import all three packages; examples/ only kvemb, the one name that there is where it is installed.
"""

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
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

# Of what a shard lists in paramserver/capabilities.py each has a folder; the client's end has one of the same name.
CAPABILITIES = frozenset(
    re.findall(r"^from \.(?!rpc)(\w+)\.", (ROOT / "paramserver/capabilities.py").read_text(encoding="utf-8"), re.MULTILINE)
)

# The rooms of each package, lowest first. A room is a folder's own files, or a file that lies directly in the package; the longest name
# that fits is a module's. A room imports rooms of the lines before its own, and itself. Every module is in one: none is on top by default.
# docs/architecture.md has a line for each.
ROOMS = {
    "kvemb": (
        {"kvemb.errors", "kvemb.own"},
        {"kvemb.process"},
        {"kvemb.columns", "kvemb.jax", "kvemb.keras", "kvemb.tensorflow", "kvemb.torch", "kvemb.trainer"},
        {"kvemb.arrays"},
        {"kvemb.admit", "kvemb.evict", "kvemb.init", "kvemb.optim"},
        {"kvemb.schema"},
        {"kvemb.checkpoint.format", "kvemb.coordination", "kvemb.protocol", "kvemb.wire"},
        {"kvemb.net", "kvemb.wire.memcached", "kvemb.wire.resp"},
        {"kvemb.config", "kvemb.process.interrupts"},
        {"kvemb.stores"},
        {"kvemb.datapath", "kvemb.local_cluster", "kvemb.stores.redis_server"},
        {"kvemb.client", "kvemb.stores.redis_cluster", "kvemb.stores.standalone"},
        {"kvemb.connection"},
        {f"kvemb.{name}" for name in CAPABILITIES - {"operate"}},
        {"kvemb.operate", "kvemb.testing"},
        {"kvemb.foreign"},
        {"kvemb.capabilities"},
        {"kvemb.api"},
        {"kvemb.projection"},
        {"kvemb.serve"},
        {"kvemb", "kvemb.commands"},
        {"kvemb.demo"},
        {"kvemb.cli"},
    ),
    "paramserver": (
        {"paramserver", "paramserver.optim", "paramserver.shard_process"},
        {"paramserver.model"},
        {"paramserver.engine", "paramserver.ingest", "paramserver.journal"},
        {"paramserver.row_log"},
        {"paramserver.repair"},
        {"paramserver.recovery"},
        {"paramserver.apply"},
        {"paramserver.capability"},
        {"paramserver.rpc"},
        {f"paramserver.{name}" for name in CAPABILITIES},
        {"paramserver.capabilities"},
        {"paramserver.lifecycle"},
        {"paramserver.__main__"},
    ),
    "trainer": (
        {"trainer.report"},
        {"trainer.lookahead"},
        {"trainer", "trainer.bridge", "trainer.columns"},
        {"trainer.jax", "trainer.keras.layers", "trainer.torch.lookup"},
        {"trainer.keras.steps", "trainer.torch.checkpoints", "trainer.torch.modules", "trainer.torch.optimizer"},
        {"trainer.keras.distributing", "trainer.torch.collections", "trainer.torch.conversion", "trainer.torch.loaders"},
        {"trainer.tensorflow", "trainer.torch.export"},
        {"trainer.keras", "trainer.torch"},
    ),
}

PURE = (
    "kvemb.process.cached_property", "kvemb.errors", "kvemb.arrays", "kvemb.admit", "kvemb.evict", "kvemb.init", "kvemb.optim",
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


@pytest.fixture(scope="module", autouse=True)
def without_collection() -> Iterator[None]:
    """All sources as trees are millions of objects, and none is garbage: to look for it takes three times as long as to read them."""
    gc.disable()
    yield
    gc.enable()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


parsed = cache(ast.parse)


@cache
def read(module: str) -> str:
    return SOURCES[module].read_text(encoding="utf-8")


def is_package(module: str) -> bool:
    return SOURCES[module].name == "__init__.py"


@cache
def imported() -> dict[str, set[str]]:
    """The modules of ours that each of ours imports; those that are imported for annotations alone too."""
    known = frozenset(SOURCES)
    return {name: {to for to, _ in arrows(name, read(name), known=known, is_package=is_package(name))} & known for name in SOURCES}


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(parsed(source)))


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Whether the module is one of these, or inside one of them."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def arrows(module: str, source: str, *, known: frozenset[str], is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Yield (imported module, line). `from a import b` is an arrow to a.b where that is a module, otherwise to a."""
    for node in nodes(source):
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


@cache
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


def test_every_import_is_an_arrow_of_the_picture() -> None:
    known = frozenset(SOURCES)
    bad = [line for name in SOURCES for line in violations(name, read(name), known=known, is_package=is_package(name))]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_where_kvemb_is_installed(example: Path) -> None:
    """Not only in a checkout on Python's path."""
    assert not re.findall(r"^\s*(?:from|import) (?:paramserver|trainer)\b.*", example.read_text(), re.MULTILINE)


def test_trainer_and_paramserver_name_their_own_modules_relatively() -> None:
    """They are installed inside of kvemb, so that a program's own `trainer.py` is not in their way: see kvemb/own."""
    names = [name for name in SOURCES if not is_in(name, ("kvemb",))]
    assert not [name for name in names if re.search(r"^\s*(from|import) (trainer|paramserver)\b", read(name), re.MULTILINE)]


def test_no_module_takes_the_cached_property_that_hangs_in_a_forked_child() -> None:
    """In Python 3.11 it has one lock for all instances; kvemb.process.cached_property has none."""
    assert not [name for name in SOURCES if re.search(r"from functools import (\([^)]*|.*)\bcached_property\b", read(name))]


def test_every_module_is_in_a_room() -> None:
    assert [name for name in SOURCES if room(name)[0] < 0] == [], "in no room: see ROOMS"


def test_no_module_imports_itself_by_a_detour() -> None:
    circles = TopologicalSorter({name: targets - {name} for name, targets in imported().items()})
    circles.prepare()  # raises CycleError, which names them


def test_a_module_of_at_most_sixty_lines_has_more_than_one_importer() -> None:
    """Facades are the one exception: each is a public name, and imports what it hands on at first use."""
    importers = Counter(target for targets in imported().values() for target in targets)
    small = {name for name in SOURCES if len(read(name).splitlines()) <= 60 and not is_package(name)}
    listed = imported()["paramserver.capabilities"]  # what a capability brings to a shard
    assert {name for name in small - FACADES.keys() - listed if importers[name] == 1} == set(), "it belongs into the module that imports it"


def test_a_class_of_more_than_twenty_methods_says_why_it_is_one() -> None:
    classes = [(name, node) for name in SOURCES for node in nodes(read(name)) if isinstance(node, ast.ClassDef)]
    large = [(name, node) for name, node in classes if sum(isinstance(inner, ast.FunctionDef) for inner in node.body) > 20]
    silent = [f"{name}.{node.name}" for name, node in large if not re.search(r"One class|methods", ast.get_docstring(node) or "")]
    assert not silent, "split it, or say why"


@pytest.mark.parametrize("facade", sorted(FACADES.keys() & SOURCES.keys()))
def test_a_facade_imports_its_bridge_and_nothing_else_of_the_project(facade: str) -> None:
    assert imported()[facade] == {FACADES[facade], "kvemb.own"}


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


def own_attributes(source: str) -> set[str]:
    """The attributes that classes of a module declare, or set on themselves."""
    names = set()
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            names |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def set_from_outside(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, attribute) of what a module sets on objects of other modules' classes."""
    own = own_attributes(source)
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not is_self(node.value) and node.attr not in own:
            yield node.lineno, node.attr


def test_no_attribute_is_set_from_another_module_than_that_of_its_class() -> None:
    """Objects are whole when they are constructed."""
    found = {name: list(set_from_outside(read(name))) for name in SOURCES if is_in(name, ("paramserver",))}
    assert {name: where for name, where in found.items() if where} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("engine.witness = self", [(1, "witness")]),
        ("a.b = c.d = 1", [(1, "b"), (1, "d")]),
        ("one.n += 1", [(1, "n")]),
        ("x, y.z = 1, 2", [(1, "z")]),
        ("class A:\n    n: int = 0\n\ndef f(one: A) -> None:\n    one.n = 1", []),
        ("class A:\n    def f(self) -> None:\n        self.n = 1", []),
    ],
)
def test_what_is_set_from_outside_is_found(source: str, found: list[tuple[int, str]]) -> None:
    assert list(set_from_outside(source)) == found
