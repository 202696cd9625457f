"""An hour of everything that a cluster does while nothing is wrong: its memory, disk, files and threads come to a level and stay there."""

import faulthandler
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.api import Cluster
from kvemb.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(4200)]

SOAK_S, EVERY_S, SAVED_EVERY_S = 3600.0, 10.0, 120.0
N_IDS, N_NEW, KEPT = 2000, 40, 20_000
PAUSE_S = 0.05
MAY_GROW, AND_BY = 1.15, {"MB": 16, "files": 12, "descriptors": 4, "threads": 2, "storage MB": 4, "disk MB": 16}


def figures(local: LocalCluster, cluster: Cluster) -> dict[str, float]:
    """What may grow without bound, the largest of the shards."""
    found = {"storage MB": max(node.used_bytes for node in cluster.status().nodes) / 1e6}
    files = [path for path in (local.folder / "shards").rglob("*") if path.is_file()]
    found |= {"files": len(files), "disk MB": sum(path.stat().st_size for path in files if path.exists()) / 1e6}
    for name, of in {
        "MB": lambda proc: int((proc / "statm").read_text(encoding="utf-8").split()[1]) * 4096 / 1e6,
        "descriptors": lambda proc: len(list((proc / "fd").iterdir())),
        "threads": lambda proc: len(list((proc / "task").iterdir())),
    }.items():
        found[name] = max(of(Path(f"/proc/{shard.pid}")) for shard in local.shards)
    return found


def test_nothing_grows_in_an_hour_of_drifting_ids_saves_evictions_and_a_feed(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    faulthandler.cancel_dump_traceback_later()  # it takes any test for hung after ten minutes
    with (
        LocalCluster("redis", 2, shards=2, index_mb=0, journal_max_mb=4, cache_mb=4) as local,
        kvemb.connect(local.url) as cluster,
        cluster.feed.open() as feed,
    ):
        policies = {"admission": kvemb.admit.after(2), "eviction": kvemb.evict.keep(KEPT)}
        table = cluster.create_table("drift", dim=16, optimizer=kvemb.optim.adam(lr=0.01), **policies)
        seen: list[dict[str, float]] = []
        begun_s = looked_s = saved_s = time.monotonic()
        step, n_saves, n_events = 0, 0, 0
        while time.monotonic() - begun_s < SOAK_S:
            newest = (step + 1) * N_NEW
            ids = newest - 1 - np.random.default_rng(step).integers(0, min(newest, KEPT // 2), N_IDS)
            table.push(ids, table.pull(ids) * 0.1 + 1).wait_applied(60)
            step += 1
            while feed.take(0) is not None:
                n_events += 1
            if time.monotonic() - saved_s > SAVED_EVERY_S:
                cluster.save((tmp_path / f"saved-{n_saves}").as_uri())
                shutil.rmtree(tmp_path / f"saved-{n_saves - 1}", ignore_errors=True)
                saved_s, n_saves = time.monotonic(), n_saves + 1
            if time.monotonic() - looked_s > EVERY_S:
                seen.append(figures(local, cluster))
                looked_s = time.monotonic()
            time.sleep(PAUSE_S)
        n_rows = len(table)
    quarter = len(seen) // 4
    early, late = ({name: max(one[name] for one in part) for name in seen[0]} for part in (seen[quarter : 2 * quarter], seen[-quarter:]))
    print(f"{step} steps, {n_saves} saves, {n_events} events, {n_rows} rows; second quarter {early}, last quarter {late}")
    assert n_events >= step
    assert n_rows <= 1.02 * KEPT
    assert {name: (early[name], late[name]) for name in late if late[name] > early[name] * MAY_GROW + AND_BY[name]} == {}
