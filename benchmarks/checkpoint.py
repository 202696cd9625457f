"""The question `checkpoint`: how fast are save and load beside copying the same bytes, and what does an incremental save cost?"""

import argparse
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks.apply import OPTIMIZERS
from benchmarks.apply_load import TIMEOUT_S, Load, WrongApplyError, make_load
from benchmarks.disk import Moved, copy_raw, file_system, folder_bytes
from benchmarks.measure import Spread
from benchmarks.options import fraction, whole
from benchmarks.recovery_steps import Target, records
from benchmarks.report import Line, Report, Section
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.schema.record import HEADER_SIZE
from kvemb.stores.storage_kinds import open_store

STORES = ("redis", "valkey", "memcached")
T = TypeVar("T")
WITHIN = 0.1
_OVERHEAD_BYTES = 160


@dataclass(frozen=True)
class Round:
    """One round.

    Args:
        save, load, copy: the full checkpoint's bytes, and the seconds of each.
        changed: by fraction of the rows that had changed: bytes and seconds of an incremental save.
        written_s: by fraction, the seconds until the last data file of that save was complete; 0 where there was none.
    """

    save: Moved
    load: Moved
    copy: Moved
    changed: Mapping[float, Moved]
    written_s: Mapping[float, float]


def checkpoint(options: argparse.Namespace) -> Report:
    """How many MB/s do save and load move beside a raw copy of the same bytes, and how long is an incremental save?

    One shard, no load beside it, a checkpoint in a local folder (--folder). In every round every row is pushed; then a full save; then
    its files are copied raw, each read, written and fsynced, one after the other (saved files are fsynced, too); then, for 0, 1, 10 and
    100 % of the rows, so many are pushed again and saved on the full checkpoint as a base; and at last the full one is loaded. Read: MB/s
    are the checkpoint's files as they lie on the disk (MB of 10**6 bytes), k rows/s the rows in them; / raw is MB/s divided by those of
    the raw copy, within a round. A load verifies every checksum before it begins, restarts the shard, and writes every row to storage
    anew: compare its k rows/s with `apply`. s is the time of the whole call; the client asks the shard five times a second whether it has
    finished, so that it comes in steps of 0.2 s. Of incremental saves written s is the time until the last data file was complete, as the
    file system noted it, and share is that divided by the same of 100 %, within a round: in proportion it is the fraction that had
    changed (target: within 0.1 of it). Values are medians with (smallest..largest). Checked: every save has exactly the rows that had
    changed; after the load weights and state of every row are, bit for bit, what they were when they were saved, and no other row exists.
    """
    sections = []
    versions: dict[str, str] = {}
    for store in options.store:
        sections.append(_measure(store, options, versions))
    return Report("checkpoint", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `checkpoint` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam", help="(adam)")
    parser.add_argument("--rows", type=whole(1), default=300_000, metavar="N", help="rows in the table (300000)")
    parser.add_argument("--batch", type=whole(1), default=40_000, metavar="N", help="rows of a push (40000)")
    parser.add_argument("--changed", nargs="+", type=fraction, default=[0.01, 0.1], metavar="F", help="fractions beside 0 and 1 (0.01 0.1)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where a folder for checkpoints is made (the system's for temporary files)"
    )
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="rounds, after one to warm up (3)")


def lines_of(rounds: Sequence[Round], n_rows: int) -> list[Line]:
    """Lay the rounds out.

    Args:
        rounds: that count.
        n_rows: of the table.
    """
    lines = []
    for name, moved in (("save", [one.save for one in rounds]), ("load", [one.load for one in rounds])):
        figures: dict[str, Spread | float | str] = {
            "MB/s": Spread.of([one.mb_per_s for one in moved]),
            "/ raw": Spread.of([one.mb_per_s / other.copy.mb_per_s for one, other in zip(moved, rounds, strict=True)]),
            "k rows/s": Spread.of([n_rows / one.seconds / 1e3 for one in moved]),
        }
        lines.append(Line(f"full {name}", figures | _size(moved)))
    copies = [one.copy for one in rounds]
    lines.append(Line("raw copy", {"MB/s": Spread.of([one.mb_per_s for one in copies])} | _size(copies)))
    for share in rounds[0].changed:
        moved = [one.changed[share] for one in rounds]
        figures = _size(moved) | {"written s": Spread.of([one.written_s[share] for one in rounds])}
        figures["share"] = Spread.of([one.written_s[share] / one.written_s[1.0] for one in rounds])
        figures["target"] = f"share {share:g} ± {WITHIN}" if 0 < share < 1 else "–"
        lines.append(Line(f"incremental save, {share * 100:.4g} % changed", figures))
    return lines


def _size(moved: Sequence[Moved]) -> dict[str, Spread | float | str]:
    return {"MB": moved[-1].n_bytes / 1e6, "s": Spread.of([one.seconds for one in moved])}


def shares_of(asked: Sequence[float]) -> list[float]:
    """Return the fractions to be changed, ascending, nothing and everything among them.

    Example:
        >>> shares_of([0.1, 0.01, 0.1])
        [0.0, 0.01, 0.1, 1.0]
    """
    return sorted({0.0, 1.0, *asked})


def written_s(folder: Path, begun_s: float) -> float:
    """Return how many seconds after `begun_s` (since 1970) the last data file got its name, which is when it is complete; 0 without one.

    Args:
        folder: of a checkpoint on a disk of this machine.
        begun_s: when the save was asked for.
    """
    return max((max(0.0, one.stat().st_ctime - begun_s) for one in folder.rglob("*.parquet")), default=0.0)


def require_saved(manifest: CheckpointManifest, n_rows: int) -> None:
    """Refuse a checkpoint that does not hold so many rows.

    Raises:
        WrongApplyError: with both numbers.
    """
    if manifest.n_rows != n_rows:
        raise WrongApplyError(f"{n_rows} rows had changed; the checkpoint holds {manifest.n_rows}")


def require_no_other(load: Load) -> None:
    """Refuse a table with more or fewer rows than the load has.

    Raises:
        WrongApplyError: with both numbers.
    """
    n_known = len(load.table)
    if n_known != load.n_rows:
        raise WrongApplyError(f"the table had {load.n_rows} rows when it was saved; after the load the shard knows {n_known}")


def push_first(load: Load, n_rows: int) -> None:
    """Push the first n rows of a load once more, and wait until they are applied."""
    for ids in load.batches:
        some = ids[: max(0, n_rows)]
        if len(some):
            load.table.push(some, load.grads[: len(some)], timeout_s=TIMEOUT_S)
        n_rows -= len(some)
    load.table.flush(TIMEOUT_S)


def values_of(cluster: LocalCluster, load: Load) -> NDArray[np.uint8]:
    """Read weights and state of every row, as bytes: uint8 [n, record bytes - header]; a load gives new versions."""
    with open_store(load.table.cluster.config.storage, role="trainer") as store:
        store.open(Deadline.after(TIMEOUT_S))
        return records(Target(cluster, load, store))[:, HEADER_SIZE:]


def require_loaded(got: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
    """Refuse rows that differ in any bit from the saved ones.

    Raises:
        WrongApplyError: with how many differ.
    """
    differ = (got != expected).any(axis=1)
    if differ.any():
        raise WrongApplyError(f"{int(differ.sum())} of {len(differ)} rows are not what was saved")


def _measure(store: str, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    spec = OPTIMIZERS[options.optimizer]()
    record_bytes = 12 + 4 * (options.dim + spec.state_size(options.dim))
    memory_mb = max(1024, math.ceil(2 * options.rows * (record_bytes + _OVERHEAD_BYTES) / (1 << 20)))
    with LocalCluster(store, memory_mb=memory_mb) as cluster, kvemb.connect(cluster.url) as opened, _folder(options.folder) as folder:
        versions[f"{store} server"] = opened.status().nodes[0].server
        table = opened.create_table("bench", dim=options.dim, optimizer=spec, id_dtype="uint64")
        load = make_load(table, options.rows, options.batch)
        shares = shares_of(options.changed)
        rounds = [_round(cluster, load, shares, folder / str(number)) for number in range(options.repeats + 1)]
        kind = file_system(folder)
    settings = {
        "store": store,
        "dim": options.dim,
        "optimizer": options.optimizer,
        "record_bytes": record_bytes,
        "rows": options.rows,
        "file system": kind,
        "repeats": options.repeats,
    }
    return Section(settings, lines=lines_of(rounds[1:], options.rows))


def _round(cluster: LocalCluster, load: Load, shares: Sequence[float], folder: Path) -> Round:
    opened, full = load.table.cluster, folder / "full"
    load.push_all()
    expected = values_of(cluster, load)
    saved, save_s = _timed(lambda: opened.save(str(full)))
    require_saved(saved.manifest, load.n_rows)
    n_bytes = folder_bytes(full)
    copy = copy_raw(full, folder / "copy")
    changed, until_written_s = {}, {}
    for share in shares:  # the rows of the share before are among those of the next, and all are changes since the base
        n_changed, above = round(share * load.n_rows), folder / f"changed-{share:g}"
        push_first(load, n_changed)
        begun_s = time.time()
        saved, seconds = _timed(lambda above=above: opened.save(str(above), base=str(full)))  # type: ignore[misc]
        require_saved(saved.manifest, n_changed)
        changed[share], until_written_s[share] = Moved(folder_bytes(above), seconds), written_s(above, begun_s)
    _, load_s = _timed(lambda: opened.load(str(full)))
    require_loaded(values_of(cluster, load), expected)
    require_no_other(load)
    shutil.rmtree(folder)
    return Round(Moved(n_bytes, save_s), Moved(n_bytes, load_s), copy, changed, until_written_s)


def _timed(act: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    result = act()
    return result, time.perf_counter() - start_s


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """Make a folder and delete it in the end."""
    with tempfile.TemporaryDirectory(prefix="kvemb-bench-", dir=parent) as name:
        yield Path(name)
