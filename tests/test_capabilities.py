"""A capability has rooms of its own: what is left without it runs, and the kernel names it nowhere."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_architecture import CAPABILITIES as LISTED_BY_SHARDS
from tests.test_architecture import PACKAGES, ROOT, SOURCES, imported, is_in

CAPABILITIES = sorted({*LISTED_BY_SHARDS, "foreign", "projection", "serve"} - {"operate"})  # with that, `cluster.status` would go
LISTED = (ROOT / "kvemb" / "capabilities.py", ROOT / "paramserver" / "capabilities.py")
MOST_FILES = 6
USE = """
import numpy as np, kvemb
with kvemb.local(store="redis", nodes=1, shards=2) as url, kvemb.connect(url) as cluster:
    table = cluster.create_table("user", dim=4, optimizer=kvemb.optim.adagrad(lr=1.0), initializer=kvemb.init.zeros())
    ids = np.arange(100)
    for _ in range(3):
        table.push(ids, np.ones((100, 4))).wait_applied(60)
    assert (table.pull(ids) < -1).all()
    table.assign(ids[:5], np.ones((5, 4)))
    assert (table.pull(ids[:5]) == 1).all() and table.erase(ids[:5]) == 5 and len(table) == 95
    assert all(shard.reply is not None and not shard.reply.failure for shard in cluster.status().shards)
    assert cluster.drop_table("user") == 95
"""


def folders(name: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for package in ("kvemb", "paramserver"))


def without(name: str, to: Path) -> Path:
    """Copy the product without a capability: its folders, and what names them in the lists of capabilities."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, to / package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in folders(name):
        shutil.rmtree(to / folder.replace(".", "/"), ignore_errors=True)
    for listed in LISTED:
        copy = to / listed.relative_to(ROOT)
        text = copy.read_text(encoding="utf-8")
        text = re.sub(rf"    # --- {name} -+\n.*?(?=    # --- |\Z)", "", text, flags=re.DOTALL)
        for line in re.findall(rf"^ *from (?:\.|kvemb\.){name}\..* import .*\n", text, flags=re.MULTILINE):
            text = text.replace(line, "")
            for one in line.rpartition(" import ")[2].split(","):
                text = re.sub(rf"^    {one.strip()},\n", "", text, flags=re.MULTILINE)
        copy.write_text(text, encoding="utf-8")
    return to


@pytest.mark.parametrize("name", CAPABILITIES)
def test_without_a_capability_the_rest_trains(name: str, tmp_path: Path, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    folder = without(name, tmp_path / "product")
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    code = f"import kvemb; assert kvemb.__file__.startswith({str(folder)!r})\n{USE}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CAPABILITIES)
def test_few_files_outside_of_its_folders_import_a_capability(name: str) -> None:
    own = folders(name)
    others = tuple(one for other in CAPABILITIES if other != name for one in folders(other))
    users = {user for user, targets in imported().items() if any(is_in(target, own) for target in targets) and not is_in(user, own)}
    assert len({user for user in users if not is_in(user, others)}) <= MOST_FILES
    assert own[0] in {".".join(source.split(".")[:2]) for source in SOURCES}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_kernel_imports_no_capability(name: str) -> None:
    """What may: the lists, the commands, what opens a cluster, and what only uses it (an examination, the trainers)."""
    kernel = [
        module
        for module in SOURCES
        if not is_in(module, tuple(one for other in CAPABILITIES for one in folders(other)))
        and not is_in(
            module, ("kvemb.capabilities", "paramserver.capabilities", "kvemb.commands", "kvemb.operate", "kvemb.demo", "trainer")
        )
        and module not in ("kvemb", "kvemb.api.connector")
    ]
    assert {module for module in kernel if any(is_in(target, folders(name)) for target in imported()[module])} == set()
