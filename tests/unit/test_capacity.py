"""`kvemb plan`: its figures are those of benchmarks/RESULTS.md, its arithmetic follows from them, its page shows what it prints."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvemb import cli, init, optim
from kvemb.arrays.row_index import RowIndex
from kvemb.errors import InvalidInputError
from kvemb.operate import capacity as costs
from kvemb.operate.capacity import Workload, cautions, plan_shards, plan_storage
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


def test_trained_rows_repairs_and_saves_are_what_the_benchmarks_measured() -> None:
    measured: dict[str, dict[int, float]] = {"server": {}, "shard": {}, "trainer": {}}
    for title, rows in tables("train").items():
        size = int(dict(re.findall(r"(\w+) ([\w.]+)(?:,|$)", title))["record_bytes"])
        head, (ours,) = rows[0], [row for row in rows if row[0] == "ours, durability os"]
        for part, name in (("server", "server µs/row"), ("shard", "PS µs/row"), ("trainer", "trainer µs/row")):
            measured[part][size] = median(ours[head.index(name)])
    assert measured == costs.TRAINED_US
    (redis,) = [rows for title, rows in tables("recovery").items() if "redis" in title]
    (repair,) = [row for row in redis if row[0] == "repair from snapshot + journal"]
    assert median(repair[1]) * 1e3 == pytest.approx(costs.REPAIR_ROWS_S)
    (saves,) = tables("checkpoint").values()
    (save,) = [row for row in saves if row[0] == "full save"]
    assert median(save[saves[0].index("k rows/s")]) * 1e3 == pytest.approx(costs.SAVE_ROWS_S)
    assert f"{costs.ONE_ROW_A_COMMAND} of fast by CPU" in RESULTS


@pytest.mark.parametrize("n_rows", [10_000, 70_000, 150_000, 333_333])
def test_an_index_takes_no_more_than_is_planned_for_it(n_rows: int) -> None:
    index = RowIndex()
    for part in np.array_split(np.arange(n_rows, dtype=np.uint64), 10):
        index.put(part, np.ones(len(part), np.uint64))
    assert 0.8 * costs.INDEX_BYTES_PER_ROW < index.size_bytes / n_rows <= costs.INDEX_BYTES_PER_ROW


def workload(n_rows: int = 10**9, dim: int = 16, optimizer: str = "adam", step_rows: int = 100_000, steps_per_s: float = 1.0) -> Workload:
    table = TableDef("plan", dim, getattr(optim, optimizer)(), init.zeros())
    return Workload(table, n_rows, step_rows, steps_per_s)


def test_the_journal_takes_what_was_measured() -> None:
    plan = plan_shards(workload(step_rows=1), 64 * GB, 0)
    (rows,) = tables("durability").values()
    assert plan.journal_bytes_per_s == median(rows[1][rows[0].index("B/row")])


def test_ten_times_the_rows_take_ten_times_the_memory_and_no_more_time() -> None:
    few, many = (plan_storage(workload(n), GB) for n in (10**8, 10**9))
    for one, ten in zip(few, many, strict=True):
        assert ten.total_bytes == pytest.approx(10 * one.total_bytes)
        assert ten.nodes.for_memory in range(10 * one.nodes.for_memory - 10, 10 * one.nodes.for_memory + 1)
    shards = [plan_shards(workload(n), 64 * GB, 0).index_bytes for n in (10**8, 10**9)]
    assert shards == [24 * 10**8, 24 * 10**9]


def test_more_steps_take_more_nodes_and_shards_once_memory_is_enough() -> None:
    slow, fast = workload(10**6, steps_per_s=1), workload(10**6, steps_per_s=100)
    for few, many in zip(plan_storage(slow, 64 * GB), plan_storage(fast, 64 * GB), strict=True):
        assert few.nodes.n == 1
        assert many.nodes.n == many.nodes.for_cpu > 20
    assert plan_shards(slow, 64 * GB, 0).shards.n == 1
    assert plan_shards(fast, 64 * GB, 0).shards.n == plan_shards(fast, 64 * GB, 0).shards.for_cpu > 20


def test_a_step_with_one_row_of_a_bucket_costs_what_was_measured_for_that() -> None:
    together, alone = (
        next(plan for plan in plan_storage(workload(step_rows=rows), GB) if (plan.kind, plan.layout) == ("redis", "compact"))
        for rows in (10**9, 1000)
    )
    assert together.server_us == pytest.approx(0.76 * alone.server_us)


def test_a_layout_that_refuses_such_records_is_left_out_and_what_was_never_measured_is_said() -> None:
    work = workload(dim=1024)
    plans = plan_storage(work, 64 * GB)
    assert {plan.layout for plan in plans} == {"fast", "pages", "keys"}
    said = cautions(work, plans, plan_shards(work, 64 * GB, 0))
    assert any("records of 44 to 780 bytes; these have 12300" in line for line in said)
    assert any("compact layout is refused" in line for line in said)
    small = workload(10**6)
    assert cautions(small, plan_storage(small, 64 * GB), plan_shards(small, 64 * GB, 0)) == []


def test_a_cache_as_large_as_the_shard_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="leave no room for its index"):
        plan_shards(workload(), 1 * GB, int(GB))


def test_a_plan_for_programs_has_the_figures_of_the_one_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--ids", "1e9", "--dim", "16", "--optimizer", "sgd"]
    assert cli.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["record_bytes"], plan["shards"]["shards"]) == (76, 1)
    assert cli.main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for one in plan["storage"]:
        (line,) = [line for line in lines if line[:2] == [one["kind"], one["layout"]]]
        assert line[5] == str(one["nodes"])


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
