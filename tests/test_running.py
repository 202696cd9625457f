"""What every run of the tests keeps, its workers included: interrupts reach, hangs are told, warnings are errors."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, test: str, *options: str, shell: str = "") -> "subprocess.CompletedProcess[str]":
    """Run one test file with this project's settings, in a shell that has done that first."""
    (folder / "test_it.py").write_text(test, encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    return subprocess.run(
        ["sh", "-c", f'{shell}exec "$@"', "sh", *words, *options, str(folder / "test_it.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


INTERRUPT = """
import signal, subprocess, sys, pytest

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_it(number):
    child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"], stdout=subprocess.PIPE)
    assert child.stdout.readline()
    child.send_signal(number)
    assert child.wait(60) == -number
    child.stdout.close()
"""


def test_a_run_in_the_background_of_a_script_can_interrupt_what_it_starts(tmp_path: Path) -> None:
    done = run(tmp_path, INTERRUPT, "-n", "1", shell="trap '' INT HUP; ")
    assert done.returncode == 0, done.stdout


HANG = """
import threading

def test_it():
    threading.Thread(target=beside, daemon=True).start()
    {wait}

def beside():
    threading.Event().wait()
"""
IN_PYTHON = "threading.Event().wait()"
IN_C = "import ctypes; ctypes.PyDLL(None).pause()"


@pytest.mark.parametrize(("wait", "told"), [(IN_PYTHON, "Failed: Timeout"), (IN_C, "Timeout")])
def test_a_hang_shows_all_stacks_and_fails(tmp_path: Path, wait: str, told: str) -> None:
    done = run(tmp_path, HANG.format(wait=wait), "-n", "1", "--timeout=2", "-o", "faulthandler_timeout=5")
    output = done.stdout + done.stderr
    assert done.returncode not in (0, None), output
    assert "beside" in output
    assert told in output


def test_warnings_are_errors(tmp_path: Path) -> None:
    done = run(tmp_path, "import warnings\ndef test_it():\n    warnings.warn('mind this')\n", "-n", "1")
    assert done.returncode == 1
    assert "UserWarning: mind this" in done.stdout
