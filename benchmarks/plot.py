"""`python -m benchmarks plot`: pictures of reports that `--json` wrote. Every figure in a picture is one of the report's.

A picture says when, on which machine and under which load its report was made, and names its file and that file's digest, so that a test
finds a picture that is older than its report. Its colours are legible on white and on black; it has no background of its own.
"""

import argparse
import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Report = Mapping[str, Any]
Section = Mapping[str, Any]
GREY, OURS, PEER, OTHER = "#7a7f87", "#3b82f6", "#9a8f80", "#c2731a"
"""Each has a contrast of 3 or more with white and with a dark page, text of 4."""
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "kvemb", "font.family": "sans-serif", "font.size": 9, "figure.constrained_layout.use": True,
    "axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY, "text.color": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "legend.frameon": False,
}  # fmt: skip
_LANES = (  # the first one of which the fault's name has something
    ("moves", r"added|removed|exchanged|rebalanced|emptied"), ("nodes", r"\bnodes?\b"), ("shards", r"\bshards?\b"),
    ("trainers", r"\btrainer\b"), ("followers", r"subscriber|publisher|target|client"), ("network", r""),
)  # fmt: skip
_BOUND_MS = 1000


def plot(options: argparse.Namespace) -> int:
    """Draw the picture of every report in `options.results` that has one, into `options.out`; 0, or 1 if there is none."""
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = [picture(path, options.out) for name in PICTURES if (path := options.results / f"{name}.json").exists()]
    for path in drawn:
        print(path)
    if not drawn:
        print(f"no report in {options.results}: python -m benchmarks NAME --json {options.results}/NAME.json makes one", file=sys.stderr)
    return 0 if drawn else 1


def picture(report_path: Path, folder: Path) -> Path:
    """Draw one report; return the picture's path."""
    report = json.loads(report_path.read_text(encoding="utf-8"))
    with matplotlib.rc_context(_STYLE):
        figure = PICTURES[report["name"]](report)
        figure.supxlabel(caption(report), x=0.01, ha="left", fontsize=7)
        path = folder / f"{report['name']}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None, "Source": source_of(report_path)})
    plt.close(figure)
    return path


def source_of(report_path: Path) -> str:
    """What a picture names as its source: the report's file and the digest of its bytes."""
    return f"{report_path.name} sha256:{hashlib.sha256(report_path.read_bytes()).hexdigest()}"


def caption(report: Report) -> str:
    """When, where, with what, under which load, by which command.

    Example:
        >>> report = {"date": "2026-11-24T03:20:00+00:00", "machine": {"cpu": "A", "cores": 2}, "load": {"before": 7.1, "after": 8}}
        >>> print(caption({**report, "versions": {"redis server": "Redis 7.0.15"}, "command": "python -m benchmarks pull"}))
        24 November 2026; 2 cores of A; load average 7.1 before, 8 after; Redis 7.0.15; python -m benchmarks pull
    """
    day = datetime.fromisoformat(report["date"]).strftime("%d %B %Y").lstrip("0")
    load, machine = report["load"], report["machine"]
    servers = [version for name, version in report["versions"].items() if name.endswith(" server")]
    where = f"{machine['cores']} cores of {machine['cpu']}"
    said = [day, where, f"load average {load['before']} before, {load['after']} after", *servers, report["command"]]
    return "\n".join(textwrap.wrap("; ".join(said), 150))


def _pull(report: Report) -> Any:
    """Rows per second of each client, for each storage kind: sections of uniform ids, dim 16, without pages."""
    usual = {"dim": 16, "optimizer": "sgd", "layout": "buckets", "ids": "uniform"}
    sections = [one for one in report["sections"] if usual.items() <= one["settings"].items()]
    groups = {one["settings"]["store"]: [(line["name"], line["rows_per_s"]) for line in one["measured"]] for one in sections}
    return _bars(groups, "million rows pulled per second, dim 16", 1e-6)


def _train(report: Report) -> Any:
    """Distinct rows trained per second, ours and TFRA's, for each storage kind and dim."""
    groups = {}
    for one in report["sections"]:
        lines = [(line["name"], line["figures"]["k rows/s"]) for line in one["lines"]]
        groups[f"{one['settings']['store']}, dim {one['settings']['dim']}"] = lines
    return _bars(groups, "thousand distinct rows trained per second, Adam, from pull to applied", 1.0)


def _bars(groups: Mapping[str, Sequence[tuple[str, Mapping[str, float]]]], label: str, scale: float) -> Any:
    """Horizontal bars with the smallest and largest round; the first of a group is ours, and others that are called so."""
    figure, panels = plt.subplots(
        len(groups), 1, figsize=(8, 0.7 + sum(0.25 * len(bars) + 0.35 for bars in groups.values())), sharex=True, squeeze=False,
        height_ratios=[len(bars) + 0.6 for bars in groups.values()],
    )  # fmt: skip
    for panel, (group, bars) in zip(panels[:, 0], groups.items(), strict=True):
        values = [spread["median"] * scale for _, spread in bars]
        errors = [[(spread["median"] - spread["low"]) * scale for _, spread in bars], [(s["high"] - s["median"]) * scale for _, s in bars]]
        colours = [OURS if at == 0 or name.startswith("ours") else PEER for at, (name, _) in enumerate(bars)]
        panel.barh([name for name, _ in bars], values, xerr=errors, color=colours, ecolor=GREY, height=0.7)
        for at, value in enumerate(values):
            panel.annotate(f" {value:.3g}", (0, at), va="center", color="white", fontsize=8)
        panel.invert_yaxis()
        panel.set_title(group, loc="left")
    panels[-1, 0].set_xlabel(label)
    return figure


def _scale(report: Report) -> Any:
    """CPU time that a pulled row costs, by number of nodes and of trainers."""
    (section,) = report["sections"][:1]
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for panel, of in zip(panels, ("node", "trainer"), strict=True):
        other = "trainer" if of == "node" else "node"
        lines = [line for line in section["lines"] if re.search(rf"\b1 {other}\b", line["name"])]
        counts = [int(re.search(rf"(\d+) {of}s?\b", line["name"]).group(1)) for line in lines]  # type: ignore[union-attr]
        for column, colour in (("server µs/row", OURS), ("client µs/row", OTHER)):
            spreads = [line["figures"][column] for line in lines]
            middle = [one["median"] for one in spreads]
            errors = [[one["median"] - one["low"] for one in spreads], [one["high"] - one["median"] for one in spreads]]
            panel.errorbar(counts, middle, yerr=errors, color=colour, marker="o", capsize=3, label=column.removesuffix(" µs/row"))
        panel.set_xticks(counts)
        panel.set_xlabel(f"{of}s, with 1 {other}")
    panels[0].set_ylabel("µs of CPU per row")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    return figure


def _elastic(report: Report) -> Any:
    """The longest step of any trainer over time, while nodes or shards come and go."""
    sections = [one for one in report["sections"] if one["series"]]
    figure, panels = plt.subplots(len(sections), 1, figsize=(8, 1 + 1.5 * len(sections)), squeeze=False)
    for panel, section in zip(panels[:, 0], sections, strict=True):
        (series,) = section["series"]
        panel.plot(*zip(*series["points"], strict=True), color=OURS, linewidth=1)
        panel.axhline(_BOUND_MS, color=GREY, linewidth=0.8, linestyle="--")
        for name, begin_s, end_s in series["spans"]:
            panel.axvspan(begin_s, end_s, color=OTHER, alpha=0.25, linewidth=0)
            panel.annotate(f" {name}", (begin_s, 0.98), xycoords=("data", "axes fraction"), va="top")
        settings = section["settings"]
        said = f"{settings['store']}, {settings['part']}: {settings['rows']:,} rows, {settings['trainers']} trainers"
        panel.set_title(f"{said}; {series['name']} (dashed: the bound)", loc="left")
        panel.set_yscale("log")
        panel.set_ylim(top=10 * _BOUND_MS)
    panels[-1, 0].set_xlabel("seconds")
    return figure


def _chaos(report: Report) -> Any:
    """Pushes acknowledged over time, and which faults happened meanwhile: from their begin until every trainer went on."""
    section = report["sections"][0]
    (series,) = section["series"]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4), sharex=True, height_ratios=[3, 2])
    above.step(*zip(*series["points"], strict=True), where="post", color=OURS, linewidth=1)
    above.set_ylabel(series["name"])
    above.set_title(", ".join(section["notes"]), loc="left")
    lanes = [name for name, _ in _LANES]
    for name, begin_s, end_s in series["spans"]:
        below.barh(lanes.index(lane_of(name)), max(end_s - begin_s, 0.1), left=begin_s, color=OTHER, height=0.6)
    below.set_yticks(range(len(lanes)), lanes)
    below.set_ylabel("faults of")
    below.set_xlabel("seconds")
    return figure


def lane_of(fault: str) -> str:
    """Whom a fault of chaos concerns.

    Example:
        >>> lane_of("nodes added"), lane_of("dead node replaced"), lane_of("shard killed"), lane_of("one-way partition")
        ('moves', 'nodes', 'shards', 'network')
    """
    return next(lane for lane, words in _LANES if re.search(words, fault))


PICTURES: Mapping[str, Callable[[Report], Any]] = {"pull": _pull, "train": _train, "scale": _scale, "elastic": _elastic, "chaos": _chaos}
