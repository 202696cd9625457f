"""`python -m tests.peers`: a peer's tests meet our class, its endings and reasons are counted, and an unreadable file hides no other."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEER_TEST = """
from peer.shapes import Shape

def test_holds(): assert Shape().side() == 1
def test_lacks(): Shape().corner()
"""
COMMAND = """
import sys
from pathlib import Path
from tests.peers.__main__ import Suite, run
suite = Suite("a peer", (), {"peer.shapes:Shape": "ours:Shape"})
for theirs in (False, True):
    count = run(suite, [Path(file) for file in sys.argv[1:]], theirs=theirs)
    print("ends", theirs, sorted(count.ends.items()), sorted(count.reasons))
    for name in [name for name in sys.modules if "test_" in name]:
        del sys.modules[name]
"""


def test_a_peers_tests_meet_ours_in_its_classs_place(tmp_path: Path) -> None:
    tests = tmp_path / "checkout" / "peer" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_shapes.py").write_text(PEER_TEST)
    (tests / "test_broken.py").write_text("import absent_module\n")
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "__init__.py").touch()
    (tmp_path / "peer" / "shapes.py").write_text("class Shape:\n    def side(self): return 1\n    def corner(self): return 0\n")
    (tmp_path / "ours.py").write_text("class Shape:\n    def side(self): return 1\n")
    files = sorted(str(file) for file in tests.glob("*.py"))
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    ran = subprocess.run([sys.executable, "-c", COMMAND, *files], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    ours, theirs = [line for line in ran.stdout.splitlines() if line.startswith("ends")]
    absent, lacks = "ModuleNotFoundError: No module named 'absent_module'", "AttributeError: 'Shape' object has no attribute 'corner'"
    assert ours == f"ends False {[('failed', 2), ('passed', 1)]} {[lacks, absent]}"
    assert theirs == f"ends True {[('failed', 1), ('passed', 2)]} {[absent]}"


def test_a_folder_without_a_peers_tests_is_said(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "tests.peers", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "has no test files of a peer: test_jagged_tensor.py" in ran.stdout
