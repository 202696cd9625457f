"""What every test file shares: the servers it may require, and hypothesis' settings.

Fixtures of one part live with its tests.
"""

import gc
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import hypothesis
import pytest

from tests import forked, warm_clusters

collect_ignore_glob = ["*conftest.py"]  # searched for doctests, one would be imported beside another folder's of the same name

pytest.register_assert_rewrite("kvemb.testing")

# A shell ignores SIGINT for what a script starts in the background, and nohup ignores SIGHUP; whatever is started from there inherits it.
# Programs that leave it so do right, but tests that interrupt one need what a terminal gives.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

# No deadline: no time is asserted, on no machine. In CI the same examples every run. `make test` loads the profile `quick`.
hypothesis.settings.register_profile("kvemb", deadline=None, max_examples=100, derandomize=os.environ.get("CI") == "true")
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("kvemb"), max_examples=25)
hypothesis.settings.load_profile("kvemb")

forked.install()

PACKAGE_OF = {"redis-server": "redis-server", "redis-cli": "redis-tools", "memcached": "memcached"}


TURNS = 3
"""So many runs of CI have had every test, where each had the time."""

_BEGUN_S = time.monotonic()
_SLOW_S = 30.0

# The tests of one file stay in one process. These take minutes there, so no process may be left with one when all others have ended.
BEGIN_FIRST = ("tests/faults/test_faults_shard_moves.py",)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what CI gives: it runs what `make test` runs with every commit, and of the rest what is due and there is time for."""
    parser.addoption(
        "--turn",
        type=int,
        metavar="N",
        help=f"of the tests marked full those of one in {TURNS} turns, in an order of its own (default: all)",
    )
    parser.addoption("--most-starts", type=int, metavar="N", help="fail when tests have started more processes than that (default: any)")
    parser.addoption("--full-for", type=float, metavar="SECONDS", help="begin no test marked full later than that; skip it (default: any)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what only `make test-all` runs when its time is up, so that a slow machine runs less of it, and all that `make test` runs."""
    most_s = item.config.getoption("full_for")
    if most_s is not None and item.get_closest_marker("full") and time.monotonic() - _BEGUN_S > most_s:
        pytest.skip(f"the tests marked full have had their {most_s:g} s")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out those whose turn it is not, and begin with the longest; a turn has an order of its own."""
    turn = config.getoption("turn")
    waiting = [item for item in items if turn is not None and item.get_closest_marker("full") and hash_of(item) % TURNS != turn % TURNS]
    config.hook.pytest_deselected(items=waiting)
    left = set(waiting)
    # Not all come to run in their time: each turn begins with others.
    order = {item: 0 if turn is None else hash_of(item, str(turn)) for item in items}
    items[:] = sorted((item for item in items if item not in left), key=lambda item: (not item.nodeid.startswith(BEGIN_FIRST), order[item]))


def hash_of(item: pytest.Item, salt: str = "") -> int:
    """Return a number of a test's file, whose tests share a cluster."""
    return zlib.crc32((salt + item.nodeid.partition("::")[0]).encode())


class FailuresAtOnce:
    """Names each failure as it comes: a run that is ended from outside has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:  # a worker has none
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line(f"\nFAILED {report.nodeid} - {' '.join(crash.message.split())[:300] if crash else report.when}")


class UnderWay:
    """Says now and then which tests of a slow run have been under way for long."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._begun_s, self._n_done, self._told_s = config, dict[str, float](), 0, _BEGUN_S

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begun_s[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._begun_s.pop(nodeid, None)
        self._n_done += 1
        now_s, terminal = time.monotonic(), self._config.pluginmanager.get_plugin("terminalreporter")
        slow = [f"{name} ({now_s - begun_s:.0f} s)" for name, begun_s in self._begun_s.items() if now_s - begun_s > _SLOW_S]
        if slow and terminal is not None and now_s - self._told_s > _SLOW_S:
            self._told_s = now_s
            terminal.write_line(f"\n{self._n_done} tests after {now_s - _BEGUN_S:.0f} s; under way: {', '.join(slow)}")


class Starts:
    """Counts the processes that tests start, of all workers: each costs more than most tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._of_workers = config, 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers += getattr(node, "workeroutput", {}).get("n_started", 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["n_started"] = forked.n_started
        most = self._config.getoption("most_starts")
        if most is not None and self.count() > most and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        most = self._config.getoption("most_starts")
        over = f": FAILED, {most} at most (Makefile); let tests share what they start" if most is not None and self.count() > most else ""
        terminalreporter.write_line(f"tests started {self.count()} processes{over}")

    def count(self) -> int:
        """Those of this process, and of the workers that have ended."""
        return self._of_workers + forked.n_started


def pytest_configure(config: pytest.Config) -> None:
    """See these classes."""
    for plugin in (FailuresAtOnce, UnderWay, Starts):
        config.pluginmanager.register(plugin(config))


def pytest_sessionfinish() -> None:
    """End what waits for further tests."""
    warm_clusters.end_idle()


def pytest_collection_finish() -> None:
    """Search what is there before the first test for garbage no more: thousands of tests, and modules."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of `-n auto`: two workers for each core, for tests of clusters wait about as long as they work; at most 8, each takes half a GB.

    More of them starve the servers that each one starts, until a deadline of a second passes.
    """
    return min(8, 2 * (os.cpu_count() or 1))


def find_server(name: str) -> str:
    """Return the path of a system server's program, e.g. "redis-server" or "memcached".

    Where it is missing the test is skipped, saying which command installs it; where servers are required
    (KVEMB_REQUIRE_SERVERS=1, or CI=true) the test fails instead.
    """
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if path is not None:
        return path
    reason = f"{name} is not installed; run: sudo apt-get install {PACKAGE_OF.get(name, name)}"
    if os.environ.get("KVEMB_REQUIRE_SERVERS") == "1" or os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (required here: CI=true or KVEMB_REQUIRE_SERVERS=1)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def require_server() -> Callable[[str], str]:
    """`require_server("memcached")` returns its path, or skips (in CI: fails) the test; see `find_server`."""
    return find_server


@pytest.fixture
def real_processes() -> Iterator[None]:
    """Shards and commands are started as users start them; see `tests.forked`."""
    with forked.real_processes():
        yield


@pytest.fixture
def memory_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage kind "memory" (tests/memory_store.py) is found as one that another distribution brings."""
    points = (EntryPoint("memory", "memory_store:MemoryStore", "kvemb.stores"),)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
