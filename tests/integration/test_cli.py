"""The `kvemb` command as a person runs it: a process of its own, against real servers."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvemb
from kvemb import cli
from kvemb.commands.verb_options import EXAMPLES, words_of
from kvemb.demo.trainer_process import TrainerError, Trainers
from kvemb.errors import ConfigError
from kvemb.local_cluster import LocalCluster
from tests.warm_clusters import warm

ROOT = Path(__file__).parents[2]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvemb.cli", *words]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with warm("valkey", 2, shards=2) as running:
        with kvemb.connect(running.url) as client:
            table = client.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))
            table.push(np.arange(1000), np.ones((1000, 4)))
            table.flush()
        yield running


def test_status_shows_every_node_and_shard(cluster: LocalCluster) -> None:
    done = run("status", str(cluster.config_path))
    assert done.returncode == 0, done.stderr
    for server in cluster.servers:
        assert server.address in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("0 ", "1 "))]
    assert sum(int(row[2].replace(",", "")) for row in rows) == 1000
    assert all(row[-1] == "ok" for row in rows)
    (counted,) = [line.split() for line in done.stdout.splitlines() if line.startswith("t ")]
    assert sum(int(count.replace(",", "")) for count in counted[1:]) == 1000
    assert len(counted) == 1 + len(cluster.servers)
    assert "1,024 MB" in done.stdout or "1,074 MB" in done.stdout  # the nodes' limit


def test_status_of_a_cluster_with_a_dead_node_says_so_and_fails() -> None:
    with warm("valkey", 2, shards=1) as running:
        running.servers[1].process.kill()
        done = run("status", str(running.config_path))
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("127.0.0.1")}
    assert "Connection refused" in rows[running.servers[1].address]
    assert "valkey" in rows[running.servers[0].address]
    assert "Traceback" not in done.stderr


def test_status_says_that_nodes_or_the_cluster_are_others_than_kvemb_yaml_says_though_all_answer(tmp_path: Path) -> None:
    with warm("redis", 2, shards=1) as cluster, warm("redis", 1, shards=1) as other:
        tree = yaml.safe_load(cluster.config_path.read_text())
        changed = tmp_path / "kvemb.yaml"
        for wrong, told in (
            (tree | {"storage": tree["storage"] | {"nodes": [other.servers[0].address]}}, "storage.nodes ("),
            (tree | {"cluster": "another"}, "ConfigError: shard 0 "),
        ):
            changed.write_text(yaml.safe_dump(wrong))
            done = run("status", str(changed))
            assert done.returncode == 1
            assert done.stdout.splitlines()[0].startswith(f"not as kvemb.yaml says: {told}")


def test_status_shows_the_other_shards_when_one_is_down() -> None:
    with warm("valkey", 1, shards=2) as running:
        running.shards[0].kill()
        done = run("status", str(running.config_path))
    states = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("0 ", "1 "))}
    assert done.returncode == 1
    assert states["0"].endswith("no answer")
    assert "\nshard 0: " in done.stdout
    assert states["1"].endswith("ok")


def test_a_missing_config_is_one_line_with_the_mend() -> None:
    done = run("status", "no-such-file.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("kvemb status: no-such-file.yaml: cannot be read")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seed", "-1"], "argument --seed: '-1' is no whole number from 0"),
        (["--nodes", "x"], "argument --nodes: 'x' is no whole number above 0"),
        (["--config", "kvemb.yaml", "--nodes", "2"], "--config names one that is running"),
        (["--config", "kvemb.yaml", "--shards", "2"], "--config names one that is running"),
        (["--config", "kvemb.yaml", "--store", "valkey"], "--config names one that is running"),
    ],
)
def test_wrong_options_of_the_demo_are_told_in_its_last_line(words: list[str], told: str) -> None:
    done = run("demo", *words)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def verbs() -> dict[str, argparse.ArgumentParser]:
    (action,) = [action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(action.choices)


def test_every_verb_stands_in_a_group_of_the_help_and_a_slip_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = cli._parser()
    (verbs,) = [action.choices for action in parser._actions if action.dest == "verb"]
    assert sorted(verbs) == sorted(name for names in cli._GROUPS.values() for name in names)
    assert all(f"\n  {name} " in parser.format_help() for name in verbs)
    with pytest.raises(SystemExit):
        cli.main(["stauts"])
    assert "no verb 'stauts'. Did you mean 'status'?" in capsys.readouterr().err


def test_a_load_looks_at_the_checkpoint_before_it_asks_or_connects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["load"], ["load", "--offline"]):
        assert cli.main([*words, f"{tmp_path}/no.yaml", f"{tmp_path}/nothing"]) != 0
        assert f"{tmp_path}/nothing" in capsys.readouterr().err


def test_every_verb_has_an_example_in_its_help() -> None:
    assert [verb for verb in verbs() if not EXAMPLES.get(verb)] == []
    assert "\nexamples:\n  kvemb show user 42\n" in run("show", "--help").stdout
    assert "\nexample:\n  kvemb shard --config kvemb.yaml --shard 0\n" in run("shard", "--help").stdout


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_a_line_that_its_verb_takes(example: str) -> None:
    program, *words = shlex.split(example.partition(" > ")[0])
    assert program == "kvemb"
    if words[0] != "shard":  # its options are its own program's
        assert cli._parser().parse_args(words).verb == words[0]


WORDS = {"save": ["s3://a"], "load": ["s3://a"], "verify": ["s3://a"], "show": ["user", "5"], "drop": ["user"]}
ACTIONS = {"nodes": "add", "shards": "add", "moves": "abort", "config": "show"}


@pytest.mark.parametrize("verb", ["status", "doctor", "acl", "repair", "init", "bench", "tables", "demo", *WORDS])
def test_a_verb_takes_the_clusters_file_in_front_of_its_words_or_as_an_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, parse = WORDS.get(verb, []), cli._parse
    assert parse([verb, *words]).config == ("" if verb == "demo" else "kvemb.yaml")
    for given in (["my.yaml", *words], ["--config", "my.yaml", *words], [*words, "--config", "my.yaml"]):
        args = parse([verb, *given])
        assert args.config == "my.yaml"
        assert getattr(args, "url", "s3://a") == "s3://a"
        assert getattr(args, "table", "user") in ("user", "")
    with pytest.raises(SystemExit):
        parse([verb, "my.yaml", *words, "--config", "other.yaml"])
    assert "the cluster's file is given twice: my.yaml and other.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ACTIONS)
def test_a_verb_of_moves_takes_the_clusters_file_among_its_words_or_as_an_option(verb: str) -> None:
    action, parse = ACTIONS[verb], cli._parse
    actions, more = ("show", action), ["10.0.0.3:6379"] if action == "add" else []
    for given, path in (
        (["my.yaml", *more], "my.yaml"),
        (["--config", "my.yaml", *more], "my.yaml"),
        ([*more, "--config", "my.yaml"], "my.yaml"),
        (more, "kvemb.yaml"),
    ):
        assert words_of(parse([verb, action, *given]), actions) == (action, path, more)
    assert words_of(parse([verb, "--config", "my.yaml"]), actions) == ("show", "my.yaml", [])
    with pytest.raises(ConfigError, match="given twice"):
        words_of(parse(["nodes", "add", "other.yaml", *more, "--config", "my.yaml"]), ("show", "add"))


def test_options_may_stand_between_the_clusters_file_and_the_url() -> None:
    args = cli._parse(["save", "my.yaml", "--keep", "3", "s3://a"])
    assert (args.config, args.url, args.keep) == ("my.yaml", "s3://a", 3)
    for wrong in (["save", "my.yaml", "s3://a", "--keep", "3", "s3://b"], ["ls", "s3://a", "s3://b"]):
        with pytest.raises(SystemExit):
            cli._parse(wrong)


def test_kvemb_init_takes_its_file_where_its_usage_shows_it(tmp_path: Path) -> None:
    given = ["--nodes", "10.0.0.1:6379", "10.0.0.2:6379", "--shards", "127.0.0.1:7070"]
    for words in ([str(tmp_path / "a.yaml"), *given], [*given, str(tmp_path / "b.yaml")]):
        assert cli.main(["init", *words]) == 0
    first, last = ((tmp_path / name).read_text() for name in ("a.yaml", "b.yaml"))
    assert first == last


def test_a_pace_of_moves_need_not_be_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._parse(["nodes", "rebalance", "--max-mb-per-s", "0.5"]).max_mb_per_s == 0.5
    for wrong in ("0", "-1", "nan", "fast"):
        with pytest.raises(SystemExit):
            cli._parse(["nodes", "rebalance", f"--max-mb-per-s={wrong}"])
        assert "is no number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_is_a_script_that_knows_every_verb(shell: str) -> None:
    pytest.importorskip("shtab")
    done = run("completion", shell)
    assert done.returncode == 0, done.stderr
    assert [verb for verb in verbs() if verb not in done.stdout] == []
    if shell == "bash":
        asked = "COMP_WORDS=(kvemb do); COMP_CWORD=1; COMP_LINE='kvemb do'; COMP_POINT=8; _shtab_kvemb; echo ${COMPREPLY[@]}"
        completed = subprocess.run(["bash", "-c", f"{done.stdout}\n{asked}"], capture_output=True, text=True, timeout=200, check=False)
        assert completed.stdout.split() == ["doctor"], completed.stderr


def test_certificates_without_what_makes_them_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "kvemb.net.certificate_authority", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert cli.main(["certificates", str(tmp_path / "kvemb.yaml")]) == 2
    assert "pip install 'cryptography>=42'" in capsys.readouterr().err


def test_completion_without_what_makes_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install 'shtab>=1.7'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--config", "/no/kvemb.yaml"], ["--store", "redis-cluster", "--nodes", "2"]])
def test_the_demo_refuses_a_cluster_before_it_reads_text(words: list[str]) -> None:
    done = run("demo", *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "distinct" not in done.stdout


def test_a_demo_trainer_that_fails_is_told_with_its_last_words() -> None:
    with Trainers("/no/kvemb.yaml", 2, 0) as trainers, pytest.raises(TrainerError, match=r"last words:\ntrainer \d: .*/no/kvemb.yaml"):
        list(trainers.until_idle())


def test_ctrl_c_while_a_verb_is_imported_is_one_line() -> None:
    code = (
        "import builtins, sys\nfrom kvemb import cli\nimport_before = builtins.__import__\n"
        "def interrupt(name, *rest):\n    if name.startswith(('kvemb.', 'importlib')): raise KeyboardInterrupt\n"
        "    return import_before(name, *rest)\n"
        "builtins.__import__ = interrupt\nsys.exit(cli.main(sys.argv[1:]))"
    )
    for words in (["demo"], ["status"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)
        assert done.returncode == 130
        assert done.stderr.strip().startswith("interrupted")
        assert "Traceback" not in done.stderr


def test_a_missing_server_program_is_one_line_with_the_mend(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        command("demo", "--store", "memcached"), capture_output=True, text=True, timeout=200, cwd=ROOT, env=env, check=False
    )
    assert done.returncode == 2
    assert "apt-get install memcached" in done.stderr
    assert "Traceback" not in done.stderr


# SIGHUP has the handler of SIGTERM.
@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_told_to_end_leaves_no_process_and_no_folder(number: signal.Signals, code: int, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        command("demo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert demo.stdout is not None
    children: set[int] = set()
    try:
        for line in demo.stdout:
            children |= descendants(demo.pid)
            if " steps  loss" in line:
                break
        assert len(children) >= 6, "2 nodes, 2 shards, 2 trainers"
        assert list(tmp_path.glob("kvemb-*"))
        demo.send_signal(number)
        if number != signal.SIGINT:
            time.sleep(0.1)
            demo.send_signal(number)  # does not cut the cleaning short
        assert demo.wait(60) == code
        rest = demo.stdout.read()
        assert ("interrupted" in rest) == (number == signal.SIGINT)
        assert "Traceback" not in rest
        assert not list(tmp_path.glob("kvemb-*"))
    finally:
        demo.kill()
        demo.wait()
        demo.stdout.close()
    deadline = time.monotonic() + 60
    while alive(children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(children)


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # it ends while it is looked at
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= {int(child)} | descendants(int(child))
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}
