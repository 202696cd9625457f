"""What .ci/run makes of its steps: none keeps another from running, and its last lines say what failed."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = "printf 'FAILED tests/a.py::test_it[x] - KeyError: 1\\n1 failed\\n'; exit 2"


def run(folder: Path, script: str) -> tuple[int, list[str], list[str]]:
    """Its exit code, its output before the summary, and the summary's lines."""
    words = ["bash", "-uo", "pipefail", "-c", f". '{ROOT}/.ci/steps.sh'\n{script}"]
    done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False)
    before, _, summary = done.stdout.partition("\n== summary")
    assert done.stderr == ""
    return done.returncode, before.splitlines(), [line.split(" s  ", 1)[-1] for line in summary.splitlines()[1:]]


def test_a_step_that_fails_keeps_no_other_from_running_and_the_end_names_its_tests(tmp_path: Path) -> None:
    three = f'begin beside 60 sh -c "echo slow; exit 3"\nstep first 60 sh -c "{PYTEST}"\nstep last 60 echo reached\nend beside'
    code, before, summary = run(tmp_path, three)
    assert code == 1
    assert before.index("reached") < before.index("slow")
    assert summary == [
        "beside: FAILED with code 3",
        "            slow",
        "first: FAILED with code 2",
        "            FAILED tests/a.py::test_it[x] - KeyError: 1",
        "last: passed",
    ]


def test_what_passes_alone_has_passed_and_is_named(tmp_path: Path) -> None:
    once = f'step it 60 sh -c "{PYTEST}"\nstep fine 60 true\nalone it 60 sh -c "echo again"\nalone fine 60 echo never'
    code, before, summary = run(tmp_path, once)
    assert code == 0
    assert ("again" in before, "never" in before) == (True, False)
    assert summary == [
        "it: passed alone, failed beside others",
        "            tests/a.py::test_it[x] - KeyError: 1",
        "fine: passed",
    ]


def test_what_fails_alone_too_fails_the_run_and_a_hang_is_not_tried_again(tmp_path: Path) -> None:
    twice = f'step it 60 sh -c "{PYTEST}"\nstep hung 1 sleep 60\nalone it 60 sh -c "echo still; exit 2"\nalone hung 60 echo never'
    code, before, summary = run(tmp_path, twice)
    assert code == 1
    assert "never" not in before
    assert summary == ["it: FAILED with code 2", "            still", "hung: FAILED with code 124", ""]


def test_a_run_that_is_stopped_says_which_steps_had_not_ended_and_ends_them(tmp_path: Path) -> None:
    long = 'begin long 600 sh -c "echo begun; exec sleep 600"'
    code, _, summary = run(tmp_path, f"{long}\nbegin short 60 true\nend short\npassed long || exit 7")
    assert code == 7
    assert summary == ["long: did not come to its end", "            begun", "short: passed"]


def test_no_step_outlasts_the_whole_run(tmp_path: Path) -> None:
    code, _, summary = run(tmp_path, "whole_s=1\nstep long 600 sleep 600\nstep late 600 sh -c 'sleep 600'")
    assert (code, summary) == (1, ["long: FAILED with code 124", "", "late: FAILED with code 124", ""])


def commit(folder: Path, *names: str) -> None:
    for name in names:
        folder.joinpath(name).write_text(str(len(list(folder.iterdir()))), encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "--allow-empty", "-m", "more"]):
        subprocess.run(["git", "-C", folder, *words], check=True, timeout=200, capture_output=True)


def test_an_extra_has_its_turn_with_every_third_commit_and_with_each_that_touches_it(tmp_path: Path) -> None:
    extras = "\n".join(f"is_due {turn} {name} && echo due {name} || pass_over {name}" for turn, name in enumerate("abc"))

    def due() -> str:
        code, before, summary = run(tmp_path, extras)
        assert code == 0
        assert len(summary) == 3 - len(before)
        return "".join(line[-1] for line in before)

    commit(tmp_path)
    assert due() == "abc"  # of the first commit nothing is known
    turns = []
    for _ in range(3):
        commit(tmp_path)
        turns.append(due())
    assert sorted(turns) == ["a", "b", "c"]
    commit(tmp_path, "a", "b", "c")
    assert due() == "abc"
