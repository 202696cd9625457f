"""Whether a server that speaks RESP can hold kvemb's rows, check by check: `kvemb doctor --conformance`.

First commands are tried, a few for each promise that rests on them. Where none is missing, the contract of a store follows (`resp_suite`),
as every storage kind of ours passes it. All of it happens under scratch keys, which are deleted whatever happens.
"""

import io
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, KvembError, NodeUnavailableError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.stores.redis_server.compare_and_set import swap_words
from kvemb.stores.redis_server.redis_commands import Word, ask_all, shown
from kvemb.stores.redis_server.redis_login import RedisAccess, fields_of, logged_in
from kvemb.testing.bucket_contract import BucketedStoreContract
from kvemb.testing.node_contract import NodeContract
from kvemb.testing.repair_contract import RepairContract
from kvemb.testing.rows_contract import ConflictContract, RowsContract
from kvemb.testing.scratch_nodes import PREFIX, ScratchNodes
from kvemb.testing.shared_use_contract import SharedUseContract
from kvemb.testing.store_contract import PagedStoreContract
from kvemb.wire.resp.resp_value import Value

HOLDS, MISSING, NOT_TRIED = "holds", "missing", "not tried"
_TIMEOUT_S = 10.0
_MANY = 500


@dataclass(frozen=True)
class ServerCheck:
    """One check of a server."""

    name: str  # what is to hold
    outcome: str  # HOLDS, MISSING or NOT_TRIED
    said: str = ""  # what came instead, or why it was not tried
    costs: str = ""  # which promise of kvemb breaks without
    needed: bool = True  # whether kvemb refuses a server without


@dataclass(frozen=True)
class Probe:
    """Commands, and what a server answers that has them."""

    # name, costs, needed: see `ServerCheck`
    name: str
    costs: str
    commands: Sequence[Sequence[Word]]  # in one piece; "KEY" stands for a scratch key
    expected: Sequence[object]  # of each: a value, or a type
    needed: bool = True


_FIELDS = b"\r\n\x00\xff{a}*", b"$-1\r\n\x00\x01\x02"  # 8 bytes that may be taken for the protocol
PROBES = (
    Probe(
        "small values: SET, NX, GET",
        "markers, owners of shards and the cluster map have no place",
        [("SET", "KEY", "a", "NX"), ("SET", "KEY", "b", "NX"), ("GET", "KEY"), ("TYPE", "KEY")],
        [b"OK", None, b"a", b"string"],
    ),
    Probe(
        "rows in hashes, fields of any bytes: HSET, HMGET, HLEN, HDEL, HKEYS, HSCAN",
        "tables have no place for rows",
        [
            ("HSET", "KEY", _FIELDS[0], "a", _FIELDS[1], "b"),
            ("HMGET", "KEY", _FIELDS[1], "none", _FIELDS[0]),
            ("HDEL", "KEY", _FIELDS[0], "none"),
            *(("HLEN", "KEY"), ("HKEYS", "KEY"), ("HSCAN", "KEY", "0", "COUNT", 10)),
        ],
        [2, [b"b", None, b"a"], 1, 1, [_FIELDS[1]], [b"0", [_FIELDS[1], b"b"]]],
    ),
    Probe(
        "rows in pages: SETRANGE, GETRANGE, STRLEN",
        "tables with num_ids have no place for rows",
        [("SETRANGE", "KEY", 4, "ab"), ("GETRANGE", "KEY", 3, 5), ("STRLEN", "KEY")],
        [6, b"\x00ab", 6],
    ),
    Probe(
        "scripts that compare and set in one step: EVAL",
        "two shards could repair one node at a time, and a marker be written over: lost rows would be taken for new ones",
        [("SET", "KEY", "a"), swap_words((b"KEY", b"other", b"b")), swap_words((b"KEY", b"a", b"b")), ("GET", "KEY")],
        [b"OK", 0, 1, b"b"],
    ),
    Probe(
        "keys listed, counted and deleted: SCAN, DBSIZE, UNLINK, DEL",
        "rows on a node that comes back from an old snapshot cannot be compared, dropped tables not be erased",
        [("SET", "KEY", "a"), ("SCAN", "0", "COUNT", 10), ("DBSIZE",), ("UNLINK", "KEY"), ("DEL", "KEY")],
        [b"OK", list, int, 1, 0],
    ),
    Probe(
        f"{2 * _MANY:,} commands in one piece, answered in order",
        "pulls and pushes, which are such pieces, would mix up rows",
        [*(("HSET", "KEY", at, at) for at in range(_MANY)), *(("HMGET", "KEY", at) for at in range(_MANY))],
        [*[1] * _MANY, *([b"%d" % at] for at in range(_MANY))],
    ),
    Probe(
        "connections are named, listed and ended: CLIENT ID, SETNAME, LIST, KILL ID",
        "a write without a reply could land later, over a newer row, and a replaced shard go on writing: not exactly once",
        [("CLIENT", "SETNAME", "kvemb-conformance"), ("CLIENT", "ID"), ("CLIENT", "LIST"), ("CLIENT", "KILL", "ID", 1 << 62)],
        [b"OK", int, bytes, 0],
    ),
    Probe(
        "limits of hashes can be read: CONFIG GET",
        "kvemb doctor cannot tell when buckets outgrow the server's compact encoding, and take more memory",
        [("CONFIG", "GET", "hash-max-*")],
        [list],
        needed=False,
    ),
    Probe(
        "rights of users can be looked at: ACL WHOAMI, ACL DRYRUN",
        "kvemb acl --check cannot tell whether a user may do what it must, and no more",
        [("ACL", "WHOAMI"), ("ACL", "DRYRUN", "default", "PING")],
        [bytes, b"OK"],
        needed=False,
    ),
)
COSTS: Mapping[type, str] = {
    RowsContract: "a pull could give other rows than were pushed",
    BucketedStoreContract: "a pull could give other rows than were pushed, to tables in buckets",
    PagedStoreContract: "a pull could give other rows than were pushed, to tables with num_ids",
    ConflictContract: "a late write could land over a newer row: a push would not be applied exactly once",
    NodeContract: "a node that is empty, another one or away would not be noticed: lost rows would be taken for new ones",
    RepairContract: "rows that a node has lost would not come back bit for bit, or a shard that was replaced would go on writing",
    SharedUseContract: "threads and processes of one trainer would get each other's rows",
}
_BRANDS = {"valkey_version": "Valkey", "dragonfly_version": "Dragonfly", "kvrocks_version": "Kvrocks", "redis_version": "Redis"}
_PROXY = (
    "a proxy in front of servers, as nutcracker (twemproxy) is, answers none: give kvemb the servers themselves. Without, lost rows would "
    "be taken for new ones"
)


class ServerExamination:
    """The checks of one server, in order; `report` is told of each when it is done."""

    def __init__(self, config: StorageConfig, report: Callable[[ServerCheck], None]) -> None:
        self._address, self._access, self._config, self._report = config.nodes[0], RedisAccess(config), config, report
        self.prefix = f"{PREFIX}{secrets.token_hex(4)}:"
        self.server = "a server that does not tell its name"
        self.checks: list[ServerCheck] = []
        self._made: list[ScratchNodes] = []
        self._costs: dict[str, str] = {}  # by test
        self._ended: SystemExit | None = None

    @property
    def fits(self) -> bool:
        """Whether nothing that is needed is missing."""
        return not any(check.outcome == MISSING and check.needed for check in self.checks)

    def run(self) -> None:
        """Run all checks; what the server lacks is in `checks`. After a StorageError (it went away) scratch keys remain, and are named."""
        with logged_in(self._address, self._access, self._deadline()):
            pass
        probed = ScratchNodes(self._config, f"{self.prefix}probe:", n=1)
        self._made.append(probed)
        try:
            self._ask_info()
            for at, probe in enumerate(PROBES):
                self._add(self._probed(probe, probed.scratch_key(f"{at}")))
            if self.fits:
                self._run_contract()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        failed: list[KvembError] = []
        for nodes in self._made:
            try:
                nodes.close()
            except KvembError as error:
                failed.append(error)
        if failed:
            remaining = f"keys that begin with {self.prefix} remain; delete them: redis-cli --scan --pattern '{self.prefix}*'"
            raise StorageError(f"{remaining}. {_first_line(failed[0])}") from failed[0]

    def _add(self, check: ServerCheck) -> None:
        self.checks.append(check)
        self._report(check)

    def _deadline(self) -> Deadline:
        return Deadline.after(_TIMEOUT_S)

    def _ask_info(self) -> None:
        name, fields = "the server's process is known by its run_id: INFO", dict[str, str]()
        try:
            with logged_in(self._address, self._access, self._deadline()) as link:
                fields = fields_of(link, self._deadline(), "everything")
                said = "" if re.fullmatch(r"\w{1,64}", fields.get("run_id", "")) else "INFO names no run_id"
        except KvembError as error:
            said = _first_line(error)
        told = [f"{brand} {fields[field]}" for field, brand in _BRANDS.items() if field in fields]
        self.server = "KeyDB " + fields["redis_version"] if "keydb" in fields.get("executable", "") else told[0] if told else self.server
        lost = "a server that was started again, empty or from an old snapshot, would be taken for the one before: rows are lost unnoticed"
        self._add(_judged(name, said, lost if fields else _PROXY))
        if not fields:
            return
        memory = "" if "used_memory" in fields else "INFO names no used_memory"
        self._add(_judged("its memory is known: INFO", memory, "a node that fills up cannot be told before it is full"))
        policy = fields.get("maxmemory_policy", "noeviction")
        said = "" if policy == "noeviction" else f"maxmemory-policy is {policy}; set it to noeviction"
        self._add(_judged("no row is evicted", said, "rows would be gone when memory is full"))
        said = "it is part of a Redis Cluster, which storage.kind: redis-cluster is for" if fields.get("cluster_enabled") == "1" else ""
        said = said or ("it is a replica; give its primary" if fields.get("role", "master") != "master" else "")
        self._add(_judged("it stands alone and takes writes", said, "rows are placed by a map of ours"))

    def _probed(self, probe: Probe, key: bytes) -> ServerCheck:
        commands = [[key if word in ("KEY", b"KEY") else word for word in words] for words in probe.commands]
        try:
            with logged_in(self._address, self._access, self._deadline()) as link:
                answers = ask_all(link, commands, self._deadline())
        except NodeUnavailableError as error:  # nutcracker ends the connection at a command that it does not know
            return _judged(probe.name, _first_line(error), probe.costs, needed=probe.needed)
        found = (
            f"{' '.join(map(str, words[:2]))[:20]} answered {shown(answer)}, expected {_wanted(expected)}"
            for words, answer, expected in zip(probe.commands, answers, probe.expected, strict=True)
            if not _is_as(answer, expected)
        )
        return _judged(probe.name, next(found, ""), probe.costs, needed=probe.needed)

    def _run_contract(self) -> None:
        suite = Path(__file__).with_name("resp_suite.py")
        options = ["--noconftest", "--disable-plugin-autoload", "-p", "no:cacheprovider", "-s", "-q", "-c", os.devnull]
        with redirect_stdout(io.StringIO()) as told:
            code = pytest.main([str(suite), *options, "--rootdir", str(suite.parent)], plugins=[self])
        if self._ended is not None:
            raise self._ended
        if code == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise ConfigError(f"pytest {pytest.__version__} could not run the contract; it takes 8.4 or newer. {told.getvalue()[-1000:]}")

    # --- as a plugin of pytest --------------------------------------------------------------------------------------------------------

    @pytest.fixture
    def new_nodes(self) -> Callable[[], ScratchNodes]:
        """Makes empty nodes in the server."""

        def make() -> ScratchNodes:
            self._made.append(ScratchNodes(self._config, f"{self.prefix}{len(self._made)}:"))
            return self._made[-1]

        return make

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note what each test's failure would cost."""
        for item in items:
            assert isinstance(item, pytest.Function)
            self._costs[item.nodeid] = COSTS[next(one for one in item.cls.__mro__ if item.originalname in vars(one))]

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """End where a signal came; pytest would take it for a failed test."""
        if call.excinfo is not None and isinstance(call.excinfo.value, SystemExit):
            self._ended, item.session.shouldstop = call.excinfo.value, "ended"

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
        """End where a signal came between two tests; pytest would take it for an error of its own."""
        if isinstance(excinfo.value, SystemExit):
            self._ended = excinfo.value
        return self._ended is not None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test to the checks."""
        if self._ended is not None or (report.passed and report.when != "call"):
            return
        layout, _, test = report.nodeid.split("::", 1)[1].partition("::")
        name = f"{layout.removeprefix('Test').lower()}: {test.removeprefix('test_').replace('_', ' ').replace('[', ' [')}"
        if report.skipped:
            said = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            self._add(ServerCheck(name, NOT_TRIED, said))
        else:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = "" if report.passed else crash.message.splitlines()[0] if crash else "failed"
            self._add(_judged(name, said, self._costs[report.nodeid]))


def _judged(name: str, said: str, costs: str, *, needed: bool = True) -> ServerCheck:
    """Return the check: it holds where nothing is said against it."""
    return ServerCheck(name, MISSING, said, costs, needed) if said else ServerCheck(name, HOLDS, needed=needed)


def _is_as(answer: Value, expected: object) -> bool:
    return isinstance(answer, expected) if isinstance(expected, type) else answer == expected


def _wanted(expected: object) -> str:
    return {bytes: "text", list: "a list", int: "a number"}.get(expected, "") if isinstance(expected, type) else repr(expected)[:60]


def _first_line(error: KvembError) -> str:
    return str(error).splitlines()[0]
