"""Writes dashboard.json, Grafana's dashboard of one cluster: python deploy/monitoring/dashboard.py > deploy/monitoring/dashboard.json"""

import json
from typing import Any

_OF = '{cluster="$cluster"}'


def _rate(metric: str, of: str = _OF) -> str:
    return f"rate({metric}{of}[$__rate_interval])"


def _quantile(q: float, metric: str, by: str = "shard") -> str:
    return f"histogram_quantile({q}, sum by (le, {by}) ({_rate(f'{metric}_bucket')}))"


# Title, unit, and queries with their legends.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Shards that take pushes", "short", ((f"sum(kvemb_shard_ready{_OF})", "ready"), (f"sum(kvemb_shard_failed{_OF})", "failed"))),
    ("Nodes by state of their marker", "short", ((f"sum by (state) (max by (node, state) (kvemb_node_marker_state{_OF}))", "{{state}}"),)),
    ("Rows applied per second", "rowsps", ((_rate("kvemb_shard_rows_applied_total"), "shard {{shard}}"),)),
    ("Lag: age of the oldest push that is not applied", "s", ((f"kvemb_shard_lag_seconds{_OF}", "shard {{shard}}"),)),
    (
        "Time of an apply",
        "s",
        (
            (_quantile(0.5, "kvemb_shard_apply_seconds"), "median, {{shard}}"),
            (_quantile(0.99, "kvemb_shard_apply_seconds"), "99 %, {{shard}}"),
        ),
    ),
    ("Staleness of pushes, batches, 99 %", "short", ((_quantile(0.99, "kvemb_push_staleness_batches"), "shard {{shard}}"),)),
    ("Rows by table", "short", ((f"sum by (table) (kvemb_shard_rows{_OF})", "{{table}}"),)),
    (
        "Hits of the shards' caches",
        "percentunit",
        ((f"{_rate('kvemb_shard_cache_hits_total')} / {_rate('kvemb_shard_cache_lookups_total')}", "shard {{shard}}"),),
    ),
    ("Headroom of nodes", "bytes", ((f"min by (node) (kvemb_node_headroom_bytes{_OF})", "{{node}}"),)),
    ("Answer of nodes", "s", ((f"min by (node) (kvemb_node_answer_seconds{_OF})", "{{node}}"),)),
    ("Slots that stand open between two nodes", "short", ((f"max(kvemb_nodes_open_slots{_OF})", "slots"),)),
    (
        "Clocks of shards' hosts, from Prometheus's",
        "s",
        ((f"kvemb_shard_clock_seconds{_OF} - timestamp(kvemb_shard_clock_seconds{_OF})", "shard {{shard}}"),),
    ),
    ("Keys that nodes threw away", "short", ((f"max by (node) (kvemb_node_evicted_total{_OF})", "{{node}}"),)),
    (
        "Journals",
        "bytes",
        ((f"kvemb_shard_journal_bytes{_OF}", "shard {{shard}}"), (f"kvemb_shard_disk_free_bytes{_OF}", "free, {{shard}}")),
    ),
    (
        "Rows rewritten by repairs and moves",
        "rowsps",
        (
            (_rate("kvemb_shard_repaired_rows_total"), "repaired, shard {{shard}}"),
            (_rate("kvemb_shard_moved_rows_total"), "{{what}} by moves, shard {{shard}}"),
        ),
    ),
    ("Trainers", "short", ((f"max(sum by (shard) (kvemb_shard_trainer_connected{_OF}))", "connected"),)),
    ("Wait of a sync step", "s", ((f"kvemb_shard_step_wait_seconds{_OF}", "shard {{shard}}"),)),
    ("Pulls of trainers, 99 %", "s", ((_quantile(0.99, "kvemb_pull_seconds", "table"), "{{table}}"),)),
    ("Age of the last checkpoint", "s", ((f"time() - min(kvemb_shard_last_save_timestamp_seconds{_OF})", "age"),)),
    ("Memory of shards", "bytes", (('process_resident_memory_bytes{job="kvemb"}', "{{instance}}"),)),
    ("CPU of shards, cores", "short", (('rate(process_cpu_seconds_total{job="kvemb"}[$__rate_interval])', "{{instance}}"),)),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana 9 and newer import it."""
    return {
        "uid": "kvemb",
        "title": "kvemb",
        "tags": ["kvemb"],
        "schemaVersion": 36,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "cluster",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(kvemb_shard_ready, cluster)",
                    "refresh": 2,
                },
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, title: str, unit: str, queries: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
