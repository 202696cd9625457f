"""The pictures in docs/diagrams say what the code does, and are drawn from their sources."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from kvemb.schema.slots import N_SLOTS, Placement

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs/site"))

import make_diagrams as diagrams  # noqa: E402 (in docs/site)

SOURCES = sorted(diagrams.FOLDER.glob("*.dot"))
CODE = "".join(path.read_text(encoding="utf-8") for top in ("kvemb", "paramserver") for path in (ROOT / top).rglob("*.py"))


def source(name: str) -> str:
    return (diagrams.FOLDER / f"{name}.dot").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])
def test_a_picture_is_drawn_from_its_source_as_it_is_now_and_stands_in_a_page(path: Path) -> None:
    svg = path.with_suffix(".svg").read_text(encoding="utf-8")
    assert f"from the source {diagrams.digest(path.read_text(encoding='utf-8'))} " in svg, "run make diagrams"
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(diagrams/{path.stem}.svg)" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("kind", ["nodes", "shards"])
def test_the_phases_of_a_move_are_those_that_the_machine_goes_through(kind: str) -> None:
    assert source(f"move-{kind}") == diagrams.moves(kind), "run make diagrams"


def test_the_files_of_a_shards_folder_are_named_in_the_code() -> None:
    names = [re.sub(r"^…\d+(?=\.)|…$", "", name).rstrip("/") for name in re.findall(r"<b>([^<]+)</b>", source("folder"))][1:]
    assert len(names) > 12
    assert [name for name in names if f'"{name}"' not in CODE] == []


def test_the_threads_of_a_push_are_named_in_the_code() -> None:
    names = re.findall(r'class=thread label="(kvemb-[a-z-]+)', source("push"))
    assert len(names) == 4
    assert [name for name in names if f'"{name}"' not in CODE and f'"{name}{{' not in CODE] == []


def test_the_id_that_is_placed_has_that_bucket_and_slot() -> None:
    placement = Placement(1024)
    (bucket,), (slot,) = (of(np.array([42], np.uint64)).tolist() for of in (placement.groups, placement.slots))
    text = source("placement")
    assert f"bucket {bucket} of 1,024" in text
    assert f"slot {slot:,} of {N_SLOTS:,}" in text
    assert text.count(f"of slot {slot:,}") == 2
