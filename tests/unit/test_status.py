"""What `kvemb status` prints, from what a cluster answered."""

from dataclasses import fields

from kvemb.commands.status_command import render
from kvemb.operate.cluster_status import ClusterStatus, ShardStatus, healthy
from kvemb.protocol.messages import StatusReply
from kvemb.stores.row_io import HeldRows
from kvemb.stores.store_nodes import NodeStats

LONG = "the shard stopped applying: NodeLostError: " + "a long story " * 30


def shard(number: int, failure: str = "", error: str = "", repair: str = "", compared: str = "", starting: str = "") -> ShardStatus:
    values = {field.name: 1.0 if field.type in (float, "float") else 1 for field in fields(StatusReply)}
    texts = {"failure": failure, "repair": repair, "compared": compared, "starting": starting}
    return ShardStatus(number, f"h:{number}", None if error else StatusReply(**values | texts), error)  # type: ignore[arg-type]


def lines(*shards: ShardStatus, used: int = 50) -> list[str]:
    node = NodeStats("n:1", "valkey 9", n_keys=5, used_bytes=used, limit_bytes=100, evicted=0)
    return render(ClusterStatus(shards, (node,))).splitlines()


def test_headroom_is_never_below_nothing() -> None:
    for used, expected in ((50, " 50 %"), (100, " 0 %"), (130, " 0 %")):
        assert expected in lines(used=used)[1]
        assert "-" not in lines(used=used)[1]


def test_rows_are_shown_for_tables_whose_rows_nodes_can_count_and_how_sure_that_is() -> None:
    node = NodeStats("n:1", "valkey 9", n_keys=5, used_bytes=1, limit_bytes=100, evicted=0)
    held = (("user", (HeldRows(1200, exact=True),)), ("dense", (None,)), ("item", (HeldRows(3_000_000, exact=False),)))
    printed = render(ClusterStatus((shard(0),), (node,), held=held)).splitlines()
    assert [line.split() for line in printed[3:6]] == [["ROWS", "OF", "n:1"], ["user", "1,200"], ["item", "about", "3,000,000"]]
    assert printed[6] == ""
    idle = (("dense", (HeldRows(9, exact=True, idle_bytes=2_340_000),)),)
    assert "9 and 2.3 MB of no row" in render(ClusterStatus((shard(0),), (node,), held=idle))
    assert "ROWS OF" not in render(ClusterStatus((shard(0),), (node,), held=held[1:2]))


def test_trouble_stands_below_the_table_and_its_kind_in_it() -> None:
    printed = lines(shard(0), shard(1, LONG), shard(2, "OutOfMemory: node n:1"), shard(3, error="no route\nto h:3"))
    table = [line for line in printed if line[:1].isdigit()]
    assert [line.split("  ")[-1] for line in table] == ["ok", "failed", "retrying", "no answer"]
    assert printed[-3:] == [f"shard 1: {LONG.strip()}", "shard 2: OutOfMemory: node n:1", "shard 3: no route to h:3"]


def test_a_shard_that_starts_says_how_far_it_is_and_is_not_well_yet() -> None:
    starts = shard(1, starting="it applies its journal: 5 of 9 rows")
    assert lines(shard(0), starts)[-2].split() == ["1", "h:1", *"-------", "starting"]
    assert lines(shard(0), starts)[-1] == "shard 1: it applies its journal: 5 of 9 rows"
    assert not healthy(ClusterStatus((shard(0), starts), ()))


def test_a_repair_stands_below_and_is_no_health_until_the_rows_are_back() -> None:
    printed = lines(shard(0), shard(1, repair="node n:1: in repair"))
    assert printed[-1] == "shard 1 repairs: node n:1: in repair"
    assert not healthy(ClusterStatus((shard(0, repair="node n:1: in repair"),), ()))


def test_how_far_cold_rows_are_compared_stands_last() -> None:
    assert lines(shard(0, compared="5 of 9 rows"))[-1].endswith("ok")  # --json has it


def test_a_cluster_without_trouble_has_nothing_below() -> None:
    assert lines(shard(0))[-1].endswith("ok")
    assert healthy(ClusterStatus((shard(0),), ()))
    assert not healthy(ClusterStatus((shard(0, "x"),), ()))


def test_what_is_of_another_cluster_stands_last_and_is_no_health() -> None:
    status = ClusterStatus((shard(0),), (), strangers="WrongNodeError: node n:1:\nis node 1")
    assert render(status).splitlines()[0] == "not as kvemb.yaml says: WrongNodeError: node n:1: is node 1"
    assert not healthy(status)


def test_a_node_in_repair_is_as_kvemb_yaml_says() -> None:
    status = ClusterStatus((shard(0),), (), strangers="NodeLostError: node n:1: lost its rows")
    assert render(status).splitlines()[0] == "NodeLostError: node n:1: lost its rows"
    assert not healthy(status)
