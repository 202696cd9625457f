"""The pictures in docs/pictures are those of the reports in benchmarks/results, and legible on white and on black."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from benchmarks import plot
from benchmarks.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
REPORTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_picture_is_that_of_its_report(report: Path) -> None:
    drawn = (ROOT / "docs" / "pictures" / f"{report.stem}.svg").read_text(encoding="utf-8")
    assert plot.source_of(report) in drawn, "draw it again: python -m benchmarks plot"


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_picture_says_when_and_under_which_load_it_was_measured(report: Path, tmp_path: Path) -> None:
    text = " ".join(ElementTree.parse(plot.picture(report, tmp_path)).getroot().itertext())
    load = json.loads(report.read_text(encoding="utf-8"))["load"]
    assert f"load average {load['before']} before, {load['after']} after" in " ".join(text.split())
    assert " 2026;" in text or " 2027;" in text


def test_bars_are_the_figures_of_the_report(tmp_path: Path) -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "pull.json").read_text(encoding="utf-8"))
    text = "".join(ElementTree.parse(plot.picture(ROOT / "benchmarks" / "results" / "pull.json", tmp_path)).getroot().itertext())
    for section in report["sections"]:
        assert section["settings"]["store"] in text
        for line in section["measured"]:
            assert f"{line['rows_per_s']['median'] / 1e6:.3g}" in text


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb". Source: WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("colour", "contrast"), [(plot.GREY, 4), (plot.OURS, 3), (plot.PEER, 3), (plot.OTHER, 3)])
def test_colours_are_legible_on_white_and_on_black(colour: str, contrast: float) -> None:
    of_colour = luminance(colour) + 0.05
    assert min(1.05 / of_colour, of_colour / (luminance("#0d1117") + 0.05)) >= contrast


def test_pictures_have_no_background(tmp_path: Path) -> None:
    drawn = plot.picture(ROOT / "benchmarks" / "results" / "scale.json", tmp_path).read_text(encoding="utf-8")
    assert not re.findall(r"fill: #(?:ffffff|000000)", drawn)


def test_without_reports_the_command_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--results", str(tmp_path), "--out", str(tmp_path / "pictures")]) == 1
    assert "--json" in capsys.readouterr().err
