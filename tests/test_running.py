"""What every run of the tests keeps, its workers included: interrupts reach, hangs are told, warnings are errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

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


PROMISES = """
import pytest

def test_a_promise():
    pass

@pytest.mark.full
def test_the_same_on_another_storage_kind():
    pass
"""


def test_each_turn_has_what_make_test_runs_and_three_have_the_rest_once(tmp_path: Path) -> None:
    ran = [run(tmp_path, PROMISES, "-n", "0", "--turn", turn).stdout.splitlines()[-1] for turn in "012"]
    assert sorted(re.findall(r"\d+ passed(?:, \d+ deselected)?", " ".join(ran))) == ["1 passed, 1 deselected"] * 2 + ["2 passed"]


def test_what_make_test_runs_is_run_when_the_time_of_the_rest_is_up(tmp_path: Path) -> None:
    done = run(tmp_path, PROMISES, "-n", "0", "-rs", "--full-for", "0")
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]
    assert "the tests marked full have had their 0 s" in done.stdout


def test_a_failure_is_named_with_its_reason_before_the_run_ends(tmp_path: Path) -> None:
    lines = run(tmp_path, "def test_it():\n    raise ValueError('no')\ndef test_on():\n    print(1)\n", "-n", "1").stdout.splitlines()
    named = [number for number, line in enumerate(lines) if line.startswith("FAILED ")]
    assert len(named) == 2
    assert lines[named[0]].endswith("::test_it - ValueError: no")
    assert named[0] < lines.index("=================================== FAILURES ===================================") < named[1]


def test_a_run_that_starts_more_processes_than_it_may_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "import subprocess\ndef test_it():\n    subprocess.run(['true'], check=True)\n", "-n", "0", "--most-starts", "0")
    assert done.returncode == 1
    assert "tests started 1 processes: FAILED, 0 at most" in done.stdout


def test_all_pages_say_the_same_time_of_make_test() -> None:
    lines = [line for name in ("README.md", "Makefile", "CONTRIBUTING.md") for line in (ROOT / name).read_text().splitlines()]
    times = [found[1] for line in lines if (found := re.search(r"make test\b.*every promise.*\((.*? on two .*?cores)\)", line))]
    assert len(times) == 3
    assert len(set(times)) == 1, times
