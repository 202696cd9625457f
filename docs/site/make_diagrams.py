"""The pictures of docs/diagrams: `make diagrams` draws each SVG from its .dot file, by Graphviz. They are kept beside each other.

The two of moves are made from the pure machine that carries moves (`paramserver.scaling.move_phases`), so they cannot be wrong. An SVG
names the digest of its source, by which a test knows that it is current; it has its own colours for light and dark.
"""

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvemb.coordination.shard_notes import MoveReport  # noqa: E402 (of this checkout)
from kvemb.errors import MoveRefusedError  # noqa: E402
from kvemb.schema.cluster_map import ClusterMap  # noqa: E402
from kvemb.schema.move_plan import (  # noqa: E402
    ABORTING,
    CLEANING,
    DRAINING,
    FLIPPED,
    HOLDING,
    MOVING,
    NODES,
    PHASES_OF,
    SERVING,
    SHARDS,
    MovePlan,
)  # fmt: skip
from paramserver.scaling.move_phases import Transition, on_abort, on_reports  # noqa: E402

FOLDER = ROOT / "docs/diagrams"
_LARGER = 1.25  # than letters of 13: as wide as a phone, or larger
_DEFAULTS = [
    "-Gfontname=Helvetica", "-Gfontsize=13", "-Gpad=0.12", "-Gbgcolor=white",
    "-Nfontname=Helvetica", "-Nfontsize=13", "-Nshape=box", "-Nstyle=rounded", "-Nmargin=0.12,0.07", "-Nheight=0.3",
    "-Efontname=Helvetica", "-Efontsize=12", "-Earrowsize=0.7",
]  # fmt: skip
_STYLE = """<style>
svg { --page: #fff; --ink: #1c2024; --line: #5b6570; --box: #f3f4f6;
  --storage: #d8ebfb; --shard: #e3f3df; --trainer: #fdf0d5; --disk: #ece5f7 }
@media (prefers-color-scheme: dark) {
svg { --page: #131416; --ink: #e4e6e8; --line: #98a1ab; --box: #24272b;
  --storage: #173a57; --shard: #1f4023; --trainer: #4a3a14; --disk: #3a2d57 }
}
svg { font-family: Helvetica, Arial, sans-serif }
text { fill: var(--ink) }
.graph > polygon { fill: var(--page); stroke: none }
.node path, .node polygon, .node ellipse, .cluster path, .cluster polygon { fill: var(--box); stroke: var(--line) }
.storage path, .storage polygon { fill: var(--storage) }
.shard path, .shard polygon { fill: var(--shard) }
.trainer path, .trainer polygon { fill: var(--trainer) }
.disk path, .disk polygon { fill: var(--disk) }
.thread path, .thread polygon { fill: var(--page) }
.edge path { stroke: var(--line); fill: none }
.edge polygon { stroke: var(--line); fill: var(--line) }
.answer path { stroke-dasharray: 4 3 }
.titled text:first-of-type { font-weight: bold }
.wins path { stroke-width: 2.2 }
.node > polygon.plain, .node polygon[fill="black"] { fill: var(--line) }
</style>"""


_WORK = {
    (NODES, MOVING): "shards copy rows",
    (NODES, FLIPPED): "shards follow the new map",
    (NODES, CLEANING): "rows are erased\\non the old node",
    (NODES, ABORTING): "copies are erased",
    (SHARDS, MOVING): "the taker reads ahead",
    (SHARDS, HOLDING): "all stop at one step",
    (SHARDS, DRAINING): "the giver applies\\nwhat it has, then the\\ntaker takes over",
    (SHARDS, FLIPPED): "the giver forgets",
    (SHARDS, SERVING): "the taker takes pushes",
    (SHARDS, ABORTING): "the taker forgets",
}
_GIVER, _TAKER, _OTHER = 0, 1, 2
_BACK, _LEFT, _NEXT = "taken back", "\\l", "\\n"
_ENDS = {True: "done", False: "as before"}


def digest(source: str) -> str:
    """Return what an SVG says of its source."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def draw(source: str) -> str:
    """Return the SVG of a .dot source."""
    svg = subprocess.run(["dot", "-Tsvg", *_DEFAULTS], input=source, capture_output=True, text=True, check=True).stdout
    svg = re.sub(r"<\?xml.*?<svg", "<svg", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", svg, flags=re.DOTALL)
    size = re.search(r'width="(\d+)pt" height="(\d+)pt"', svg)
    assert size, "dot writes the size of a picture otherwise"
    width, height = (round(int(number) * _LARGER) for number in size.groups())
    svg = svg.replace(size[0], f'width="{width}" height="{height}"')
    head, rest = svg.split(">", 1)
    return f"{head}>\n<!-- made by `make diagrams`, from the source {digest(source)} -->\n{_STYLE}{rest}"


def moves(kind: str) -> str:
    """Return the .dot source of the phases of a move between nodes, or between shards, as the machine goes through them."""
    lines = [f"// The phases of a move between {kind}, made from paramserver/scaling/move_phases.py by `make diagrams`."]
    lines += [f"digraph {kind} {{", "  nodesep=0.15 ranksep=0.3"]
    for phase in PHASES_OF[kind]:
        plan = replace(_started(kind), phase=phase)
        facts = [f"{'new' if plan.flipped else 'old'} {kind[:-1]} in the map"]
        facts += ["rows go to both"] if kind == NODES and plan.writes_both else []
        look = "trainer" if phase == ABORTING else "storage" if plan.flipped else "shard"
        told = _NEXT.join([phase, *facts, _WORK[kind, phase]])
        lines.append(f'  {phase} [class="titled {look}" label="{told}"]')
    lines += [f'  {name.replace(" ", "_")} [label="{name}"]' for name in _ENDS.values()]
    ways = [{(before, after): why for before, after, why in _transitions(kind, sync=sync)} for sync in (False, True)]
    for before, after in {**ways[1], **ways[0]}:
        told = _told(*(way.get((before, after)) for way in ways))
        look = "class=answer" if told[-1] == _BACK else f'label="{"".join(f"  {word}{_LEFT}" for word in told)}"'
        lines.append(f"  {before} -> {after.replace(' ', '_')} [{look}]")
    return "\n".join([*lines, "}", ""])


def _told(in_async: list[str] | None, in_sync: list[str] | None) -> list[str]:
    """What an edge says, where it may be there in one of both modes only, or have another cause there."""
    if in_async and in_sync and in_async != in_sync:
        return [f"{in_async[0]}", f"(sync: {in_sync[0]})", *in_async[1:]]
    if in_async:
        return in_async if in_sync else ["async job:", *in_async]
    return ["sync job:", *(in_sync or [])]


def _started(kind: str) -> MovePlan:
    first = ClusterMap.first(2, 3)
    now = first.slot_nodes if kind == NODES else first.slot_shards
    return MovePlan(kind, MOVING, np.where(now == _GIVER, _TAKER, now).astype(np.uint16))


def _transitions(kind: str, *, sync: bool) -> Iterator[tuple[str, str, list[str]]]:
    """Every transition: phase, the phase or end after it, and what brings it about."""
    seen, ahead = set(), [replace(ClusterMap.first(2, 3), plan=_started(kind))]
    while ahead:
        now = ahead.pop()
        assert now.plan is not None
        if now.plan.phase in seen:
            continue
        seen.add(now.plan.phase)
        for why, next_one in _events(now, sync=sync):
            after = next_one.map.plan
            yield now.plan.phase, after.phase if after else _ENDS[now.plan.flipped], why
            ahead += [next_one.map] if after else []


def _events(now: ClusterMap, *, sync: bool) -> Iterator[tuple[list[str], Transition]]:
    done, away = MoveReport(1, now.version, True), None
    if found := on_reports(now, [done] * 3, sync=sync):
        needed = {shard for shard in range(3) if not on_reports(now, [away if one == shard else done for one in range(3)], sync=sync)}
        who = {frozenset({_GIVER}): "the giver", frozenset({_TAKER}): "the taker"}.get(frozenset(needed), "all shards")
        yield [who, *found.first], found
    try:
        found = on_abort(now, "asked for")
    except MoveRefusedError:
        found = None
    if found:
        yield [_BACK], found


def main() -> int:
    """Write the sources that are made, and draw all."""
    for kind in (NODES, SHARDS):
        (FOLDER / f"move-{kind}.dot").write_text(moves(kind), encoding="utf-8")
    for path in sorted(FOLDER.glob("*.dot")):
        path.with_suffix(".svg").write_text(draw(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
