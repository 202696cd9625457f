"""Draws the dashboard without Grafana: each panel's queries, asked of a Prometheus over some minutes, as one picture.

    python deploy/monitoring/draw.py http://127.0.0.1:9090 CLUSTER MINUTES out.png      (needs matplotlib)

What is shown is what Prometheus answers; only the drawing is not Grafana's. docs/dashboard.png was made by it.
"""

import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

_COLUMNS, _STEPS = 3, 150
_FORMATS = {
    "s": EngFormatter(unit="s"),
    "bytes": EngFormatter(unit="B"),
    "rowsps": EngFormatter(unit="rows/s"),
    "percentunit": PercentFormatter(1.0),
}


def series(prometheus: str, expr: str, legend: str, minutes: float) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield what a query answers: name, minutes before now, values."""
    end = time.time()
    step = max(1.0, 60 * minutes / _STEPS)
    words = urllib.parse.urlencode({"query": expr, "start": end - 60 * minutes, "end": end, "step": step})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{words}", timeout=60) as reply:
        found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    for one in found:
        name = legend
        for label, value in one["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        points = [(float(at), float(value)) for at, value in one["values"]]
        yield name, [(at - end) / 60 for at, _ in points], [value for _, value in points]


def draw(axes: Axes, panel: dict[str, Any], prometheus: str, cluster: str, minutes: float) -> None:
    """Draw one panel."""
    axes.set_title(panel["title"], fontsize=9, loc="left")
    for target in panel["targets"]:
        expr = target["expr"].replace("$cluster", cluster).replace("$__rate_interval", "30s")
        for name, at, values in series(prometheus, expr, target["legendFormat"], minutes):
            axes.plot(at, values, linewidth=1.2, label=name)
    axes.set_xlim(-minutes, 0)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.yaxis.set_major_formatter(_FORMATS.get(panel["fieldConfig"]["defaults"]["unit"], EngFormatter()))
    if axes.lines:
        axes.legend(fontsize=6, loc="best", framealpha=0.5)


def main(prometheus: str, cluster: str, minutes: str, out: str) -> None:
    panels = json.loads((Path(__file__).parent / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    rows = -(-len(panels) // _COLUMNS)
    figure, all_axes = pyplot.subplots(rows, _COLUMNS, figsize=(13, 2.3 * rows), layout="constrained")
    for panel, axes in zip(panels, all_axes.flat, strict=False):
        draw(axes, panel, prometheus, cluster, float(minutes))
    figure.supxlabel("minutes", fontsize=8)
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
