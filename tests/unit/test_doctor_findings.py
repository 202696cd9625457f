"""What the doctor makes of answers that no server here can be brought to give: clocks, disks, versions, shards in trouble."""

from dataclasses import replace

import pytest

from kvemb import config
from kvemb.operate.findings import ShardFacts, judge_addresses, judge_node, judge_shard
from kvemb.operate.inspection_messages import ExamineReply
from kvemb.protocol.messages import DescribeReply, StatusReply
from kvemb.stores.store_nodes import NodeStats

CONFIG = config.parse({"cluster": "c", "storage": {"kind": "redis", "nodes": ["n:1"]}, "parameter_servers": {"shards": ["s:1"]}}, {})
GOOD = ExamineReply("1.0", 1000.0, ["s:1"], ["n:1"], "fsync", 0.001, 10**12, 2 * 10**12, 90, 4096, 2**32)
STATUS = StatusReply(0, 1, 2, 3, 0, 0.0, 6, 1, 0, 0, 0, "")
FACTS = ShardFacts(0, "s:1", "", DescribeReply("c", b"i", 0, 1, "async", 0, []), STATUS, GOOD, 1000.0)
NODE = NodeStats("n:1", "redis 7.2.4", 5, 50, 100, 0)
SETTINGS = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "maxclients": "10000"}


def names(facts: ShardFacts) -> list[str]:
    return [finding.name for finding in judge_shard(facts, CONFIG, "1.0")]


def test_nothing_is_found_where_nothing_is() -> None:
    assert names(FACTS) == []
    assert list(judge_node(NODE, SETTINGS)) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"now_s": 1010.0}, "clock-skew"),
        ({"now_s": 990.0}, "clock-skew"),
        ({"version": "0.9"}, "shard-version"),
        ({"sync_s": 0.2}, "disk-slow"),
        ({"sync_s": -1.0}, "disk-unwritable"),
        ({"disk_free": 10**9}, "disk-space"),
        ({"open_files": 4000}, "open-files"),
        ({"lacks": "saves and loads need pyarrow"}, "shard-lacks"),
    ],
)
def test_a_shards_host(change: dict[str, object], found: str) -> None:
    assert names(replace(FACTS, examine=replace(GOOD, **change))) == [found]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"failure": "the shard stopped applying: NodeLostError: gone"}, "shard-failed"),
        ({"failure": "NodeFullError: node n:1"}, "shard-waiting"),
        ({"repair": "node n:1: in repair"}, "node-repair"),
        ({"lag_s": 60.0, "pending_parts": 9}, "shard-lag"),
    ],
)
def test_a_shards_work(change: dict[str, object], found: str) -> None:
    assert names(replace(FACTS, status=replace(STATUS, **change))) == [found]  # type: ignore[arg-type]


def test_a_node_or_shard_that_is_away_is_named_once() -> None:
    (node,) = judge_node(replace(NODE, error=f"node {NODE.address}: cannot connect"), {})
    (shard,) = judge_shard(ShardFacts(0, "a:1", error="shard 0 (a:1): Status: no answer"), CONFIG, "1")
    assert (node.what, shard.what) == ("cannot connect", "Status: no answer")


def test_an_old_server_and_a_failed_snapshot() -> None:
    assert [one.name for one in judge_node(replace(NODE, server="redis 5.0.7"), SETTINGS)] == ["node-version"]
    assert [one.name for one in judge_node(NODE, {**SETTINGS, "rdb_last_bgsave_status": "err"})] == ["node-snapshot-failed"]
    assert "node-snapshot-failed" in [one.name for one in judge_node(NODE, {**SETTINGS, "rdb_last_bgsave_status": "err", "save": "60 1"})]


def test_a_failed_snapshot_is_no_matter_once_its_advice_was_followed() -> None:
    assert list(judge_node(NODE, {**SETTINGS, "rdb_last_bgsave_status": "err", "save": ""})) == []


def test_a_replica_within_a_redis_cluster_is_as_it_should_be() -> None:
    assert not list(judge_node(NODE, {**SETTINGS, "role": "slave", "cluster_enabled": "1"}))


def test_a_node_that_answers_with_an_error_is_not_to_be_started() -> None:
    full = "node n:1: does not serve now (-ERR max number of clients reached). End programs that hold some."
    (found,) = judge_node(replace(NODE, error=full), {})
    assert (found.name, found.mend.startswith("It runs")) == ("node-unreachable", True)
    (found,) = judge_node(replace(NODE, error="node n:1: cannot connect: Connection refused."), {})
    assert (found.name, found.mend.startswith("Start it")) == ("node-unreachable", True)


def test_a_node_that_speaks_no_tls_is_not_to_be_started() -> None:
    (found,) = judge_node(replace(NODE, error="node n:1: no TLS connection: no answer to the handshake within 5 s."), {})
    assert (found.name, found.mend.startswith("See that it speaks TLS")) == ("tls-refused", True)


MEMCACHED = {"evictions": "off", "slab_reassign": "no", "cas_enabled": "yes", "memory_file": "(null)", "maxconns": "4096"}


@pytest.mark.parametrize(
    ("change", "unsafe", "found"),
    [
        ({}, "", []),
        ({"ext_item_age": "10", "ext_drop_unread": "no"}, "", []),
        ({"ext_item_age": "4294967295"}, "", ["node-flash-idle"]),
        ({"ext_item_age": "10", "ext_drop_unread": "yes"}, "", ["node-eviction"]),
        ({"ext_item_age": "10"}, "node n:1: 70 MB of rows lie in its flash file of 100 MB", ["node-eviction"]),
    ],
)
def test_a_memcached_with_a_flash_file(change: dict[str, str], unsafe: str, found: list[str]) -> None:
    node = replace(NODE, server="memcached 1.6.18", unsafe=unsafe)
    assert [finding.name for finding in judge_node(node, MEMCACHED | change)] == found


def test_addresses_of_the_file_that_the_cluster_has_not_are_told_though_shards_were_started_with_them() -> None:
    assert list(judge_addresses(CONFIG, ["n:1", "n:2"], ["s:1"])) == []
    (node, shard) = judge_addresses(CONFIG, ["n:2"], ["s:2"])
    assert (node.name, "storage.nodes names n:1" in node.what, "it has [n:2]" in node.what) == ("file-addresses", True, True)
    assert "parameter_servers.shards names s:1" in shard.what
    assert list(judge_addresses(CONFIG, [], [])) == [], "the map was not read"
