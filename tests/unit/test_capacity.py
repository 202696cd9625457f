"""`kvemb plan`: its figures are those of benchmarks/RESULTS.md, its arithmetic follows from them, its page shows what it prints."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvemb import cli, init, optim
from kvemb.arrays.row_index import RowIndex
from kvemb.errors import InvalidInputError
from kvemb.operate import capacity as costs
from kvemb.operate.capacity import LOAD_S, LOOKUP_US, VERSION_BYTES, Workload, cautions, logged_share, plans_for, smallest, ten_times
from kvemb.operate.row_costs import COSTS, LOAD, REPAIR, SERVER, SHARD, TRAIN, Scale, cost, factors, seconds
from kvemb.schema.table_def import TableDef

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
GB = 1e9


def tables(section: str) -> dict[str, list[list[str]]]:
    """The tables of a benchmark by the line that describes each: rows of cells, bare of blanks."""
    text = RESULTS.split(f"\n### {section}\n")[1].split("\n### ")[0]
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith(("store ", "rows ")):
            title = line
        elif line.startswith("|") and not line.startswith("|-"):
            found.setdefault(title, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def median(cell: str) -> float:
    """The first number of a cell."""
    found = re.match(r"[\d.]+", cell)
    assert found, cell
    return float(found[0])


def test_memory_of_a_row_is_what_the_benchmark_measured() -> None:
    words = {"small buckets": "compact", "pages": "pages", "in buckets": "fast"}
    measured: dict[tuple[str, str], dict[int, float]] = {}
    for title, rows in tables("memory").items():
        kind = title.split()[1].rstrip(",")
        layout = "keys" if kind == "memcached" else next(layout for word, layout in words.items() if word in title)
        column = rows[0].index("claimed bytes/row" if kind == "memcached" and "claimed bytes/row" in rows[0] else "bytes/row")
        measured[kind, layout] = {round(float(row[1])): float(row[column]) for row in rows[1:]}
    assert measured == costs.BYTES_PER_ROW


def test_pulls_are_what_the_benchmark_measured() -> None:
    rates: dict[tuple[str, str], dict[int, float]] = {}
    server_us: dict[tuple[str, str], float] = {}
    for title, rows in tables("pull").items():
        found = dict(re.findall(r"(\w+) ([\w.]+)(?:,|$)", title))
        if found["ids"] != "uniform":
            continue
        where = found["store"], "keys" if found["store"] == "memcached" else {"buckets": "fast", "paged": "pages"}[found["layout"]]
        (ours,) = [row for row in rows if row[0] == "Table.pull"]
        rates.setdefault(where, {})[int(found["record_bytes"])] = median(ours[1]) * 1e6
        if found["record_bytes"] == "76":
            server_us[where] = median(ours[2])
    assert {where: pytest.approx(of) for where, of in rates.items()} == costs.PULL_ROWS_S
    assert server_us == costs.PULL_SERVER_US


def test_costs_are_what_the_benchmark_found() -> None:
    text = RESULTS.split("\n### scale --simulate\n")[1].split("\n### ")[0].split("Costs, ")[1]
    found = {
        (job, role): {name: float(each) for name, each in re.findall(r"([a-z ]+) ([\d.]+)", costs)}
        for job, role, costs in re.findall(r"^\| (\w+), (\w+) +\| +(.*) \|$", text, re.MULTILINE)
    }
    assert {where: {name.strip(): each for name, each in of.items()} for where, of in found.items()} == COSTS


@pytest.mark.parametrize("n_rows", [10_000, 70_000, 150_000, 333_333])
def test_an_index_takes_no_more_than_is_planned_for_it(n_rows: int) -> None:
    index = RowIndex()
    for part in np.array_split(np.arange(n_rows, dtype=np.uint64), 10):
        index.put(part, np.ones(len(part), np.uint64))
    assert 0.8 * VERSION_BYTES < index.size_bytes / n_rows <= VERSION_BYTES


def test_versions_on_disk_are_what_the_benchmark_measured() -> None:
    (rows,) = tables("Versions on disk").values()
    head, most_rows = [row for row in rows if len(row) == len(rows[0])][::4]  # before the table of filters
    most = dict(zip(head, most_rows, strict=True))
    assert (median(most["uniform"]), median(most["memory"])) == (LOOKUP_US, costs.FENCE_BYTES)
    assert f"{costs.COLD_ROWS_S:,} to 90,000 a second from this disk" in RESULTS


def workload(n_rows: int = 10**9, dim: int = 16, optimizer: str = "adam", step_rows: int = 100_000, **more: Any) -> Workload:
    table = TableDef("plan", dim, getattr(optim, optimizer)(), init.zeros())
    rest = {"steps_per_s": 1.0, "trainers": 8, "node_bytes": 64 * GB, "shard_bytes": 64 * GB, "cache_bytes": 0.0} | more
    return Workload(table, n_rows, step_rows, **rest)


def plan_of(kind: str, layout: str, work: Workload) -> costs.CapacityPlan:
    (plan,) = [plan for plan in plans_for(work) if (plan.kind, plan.layout) == (kind, layout)]
    return plan


def test_the_journal_takes_what_was_measured() -> None:
    plan = plan_of("redis", "fast", workload(step_rows=1))
    (rows,) = tables("durability").values()
    assert plan.journal_bytes_per_s == median(rows[1][rows[0].index("B/row")])


def test_ten_times_the_rows_take_ten_times_the_memory() -> None:
    for one, ten in zip(plans_for(workload(10**9, node_bytes=GB)), plans_for(workload(10**10, node_bytes=GB)), strict=True):
        assert ten.row_bytes == one.row_bytes
        assert ten.nodes.for_memory in range(10 * one.nodes.for_memory - 10, 10 * one.nodes.for_memory + 1)
        assert ten.at.shards * ten.shard_rows == pytest.approx(10 * one.at.shards * one.shard_rows)


def test_more_steps_take_more_nodes_and_shards_once_memory_is_enough() -> None:
    for slow, fast in zip(plans_for(workload(10**6)), plans_for(workload(10**6, steps_per_s=100)), strict=True):
        assert slow.at.nodes == slow.at.shards == 1
        assert fast.at.nodes == fast.nodes.for_cpu > 20
        assert fast.at.shards == fast.shards.for_cpu > 20
        assert max(share for what, share in fast.shares().items() if "CPU" in what) <= 1


def test_where_no_number_of_machines_is_enough_that_is_said() -> None:
    plans = plans_for(workload(10**9, step_rows=10, steps_per_s=1e9))
    assert all(plan.shards.for_cpu == 0 and plan.at.shards == plan.shards.for_memory for plan in plans)
    assert any("no number of machines is enough" in line for line in cautions(plans))


def test_ten_times_the_load_has_the_same_machines_or_those_that_it_needs() -> None:
    plan = smallest(plans_for(workload(10**11)))
    faster, larger = ten_times(plan).values()
    assert (faster.at.nodes, faster.at.shards) == (plan.at.nodes, plan.at.shards)
    assert faster.shares()["CPU of a node"] == pytest.approx(10 * plan.shares()["CPU of a node"])
    assert larger.at.nodes > 9 * plan.at.nodes
    assert larger.us["shard"] > plan.us["shard"]  # its requests go to more nodes


def test_the_smallest_plan_takes_any_ids() -> None:
    plans = plans_for(workload(10**11))
    best = smallest(plans)
    assert best.layout != "pages"
    assert all(best.at.nodes + best.at.shards <= plan.at.nodes + plan.at.shards for plan in plans if plan.layout != "pages")


def test_rows_are_known_from_memory_as_far_as_the_index_may_grow() -> None:
    small, large = (plan_of("valkey", "fast", workload(n_rows)) for n_rows in (10**7, 10**11))
    assert small.index_bytes == pytest.approx((VERSION_BYTES + costs.FENCE_BYTES) * 10**7)
    assert small.us[SHARD] == cost(TRAIN, SHARD, small.at)
    assert large.index_bytes == pytest.approx(costs.INDEX_BYTES + costs.FENCE_BYTES * large.shard_rows)
    assert large.us[SHARD] == pytest.approx(cost(TRAIN, SHARD, large.at) + LOOKUP_US * logged_share(large.shard_rows))
    assert large.shards.for_memory == 1


def test_what_the_system_has_no_memory_for_is_read_from_disk() -> None:
    roomy, tight = (plan_of("valkey", "fast", workload(10**11, shard_bytes=n_bytes)) for n_bytes in (1000 * GB, 64 * GB))
    (none, some) = (plan.shares()["row log of a shard"] for plan in (roomy, tight))
    assert none == 0
    assert 0 < some < tight.work.rows_per_s / tight.at.shards / costs.COLD_ROWS_S


def test_there_are_as_many_shards_as_find_versions_on_their_disks_in_time() -> None:
    plan = plan_of("valkey", "fast", workload(10**11, dim=7, optimizer="sgd", step_rows=10**6))
    assert plan.at.shards == plan.shards.for_log > plan.shards.for_load
    assert 0.8 < plan.shares()["row log of a shard"] <= 1


def test_there_are_as_many_shards_as_bring_a_load_to_its_time() -> None:
    plan = plan_of("valkey", "fast", workload(10**11))
    assert plan.at.shards == plan.shards.for_load
    assert plan.times[LOAD][0] <= LOAD_S < seconds(LOAD, replace(plan.at, shards=plan.at.shards - 1))[0]


def test_a_repair_waits_for_a_node_whose_buckets_are_listed_once() -> None:
    few, many = (Scale(100, shards, 8, 10**9, 40, "compact", 1 << 25, 10**6) for shards in (10, 100))
    assert seconds(REPAIR, many) == (pytest.approx(seconds(REPAIR, few)[0]), SERVER)
    pages = Scale(100, 100, 8, 10**9, 40, "pages", 10**7, 10**6)
    assert seconds(REPAIR, pages)[0] < seconds(REPAIR, few)[0]


def test_a_step_with_one_row_of_a_bucket_has_a_command_for_each() -> None:
    together, alone = (Scale(1, 1, 1, 10**6, 40, "fast", keys, 30_000) for keys in (16, 1 << 30))
    assert factors(TRAIN, together)["command"] == pytest.approx(3 * 16 / 30_000)
    assert factors(TRAIN, alone)["command"] == pytest.approx(3, rel=1e-3)
    assert cost(TRAIN, SERVER, alone) > cost(TRAIN, SERVER, together)


def test_a_layout_that_refuses_such_records_is_left_out_and_what_was_never_measured_is_said() -> None:
    plans = plans_for(workload(dim=1024))
    assert {plan.layout for plan in plans} == {"fast", "pages", "keys"}
    said = cautions(plans)
    assert any("records of 44 to 780 bytes; these have 12300" in line for line in said)
    assert any("compact layout is refused" in line for line in said)
    assert cautions(plans_for(workload(10**6))) == []


def test_a_cache_as_large_as_the_shard_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="leave no room for its index"):
        plans_for(workload(shard_bytes=GB, cache_bytes=GB))


def test_a_plan_for_programs_has_the_figures_of_the_one_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--ids", "1e9", "--dim", "16", "--optimizer", "sgd"]
    assert cli.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["record_bytes"] == 76
    assert cli.main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for one in plan["plans"]:
        (line,) = [line for line in lines if line[:2] == [one["kind"], one["layout"]]]
        assert line[5] == str(one["nodes"])
        assert one["shards"] == 1
    said = lines[0]  # the answer, before anything else
    assert int(said[said.index("machines") - 1]) == min(one["nodes"] + one["shards"] for one in plan["plans"] if one["layout"] != "pages")


@pytest.mark.parametrize(
    ("option", "value"), [("--ids", "1.5"), ("--ids", "0"), ("--dim", "x"), ("--node-gb", "nan"), ("--step-ids", "1e19")]
)
def test_a_number_that_is_none_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--ids", "1", "--dim", "1", option, value])
    assert f"argument {option}: {value!r} is no" in capsys.readouterr().err


def test_the_page_on_capacity_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```console\n\$ kvemb (plan .*)\n((?:.*\n)*?)```", (ROOT / "docs/capacity.md").read_text(encoding="utf-8"))
    assert blocks
    for words, shown in blocks:
        assert cli.main(words.split()) == 0
        assert capsys.readouterr().out == shown


def test_the_page_on_capacity_says_what_a_row_takes_as_the_model_does() -> None:
    table = (ROOT / "docs/capacity.md").read_text(encoding="utf-8").split("| optimizer, dtype | record |")[1].split("\n\n")[0]
    header, _, *lines = table.splitlines()
    layouts = [tuple(cell.strip().lower().split(", ")) for cell in header.strip("|").split("|")]
    assert len(lines) == 4
    for line in lines:
        name, record, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        kind, dtype = name.split(", ")
        size = TableDef("t", 16, getattr(optim, kind)(lr=0.1), init.zeros(), dtype=dtype).record.size_bytes
        assert int(record) == size
        assert [int(one) for one in shown] == [round(costs.bytes_per_row((store, layout), size)) for store, layout in layouts]
