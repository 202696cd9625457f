"""A wall clock that jumps in the middle of everything: nothing of the promise hangs on it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from jobs import PATIENCE_S

from kvemb.net.deadline import Deadline


def library() -> str:
    """The path of libfaketime, or skip."""
    found = [path for root in ("/usr/lib", "/usr/local/lib") for path in Path(root).glob("**/faketime/libfaketime.so.1")]
    if not found:
        pytest.skip("libfaketime is not installed; run: sudo apt-get install faketime")
    sleeps = ["/usr/bin/env", f"LD_PRELOAD={found[0]}", "DONT_FAKE_MONOTONIC=1", sys.executable, "-c", "import time; time.sleep(0.001)"]
    if subprocess.run(sleeps, capture_output=True, check=False).returncode:
        pytest.skip("with this libfaketime time.sleep of this Python raises OSError: it takes no wait until a time of the monotonic clock")
    return str(found[0])


def test_shards_whose_clock_jumps_by_years_apply_every_push_once(tmp_path: Path, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    now = tmp_path / "now"

    def jump(offset: str) -> None:
        tmp_path.joinpath("next").write_text(offset)
        os.replace(tmp_path / "next", now)

    jump("+0")
    wrong_clock = [f"LD_PRELOAD={library()}", f"FAKETIME_TIMESTAMP_FILE={now}", "FAKETIME_NO_CACHE=1", "DONT_FAKE_MONOTONIC=1"]
    program = ["/usr/bin/env", *wrong_clock, sys.executable, "-m", "paramserver"]
    cluster = FaultyCluster("redis", 2, shards=2, storage={"timeout_s": 2}, shard_program=program)
    with cluster, LedgerRun(cluster, n_trainers=2) as run:
        run.wait_for_acks(5, Deadline.after(PATIENCE_S))
        for offset in ("+3600", "-86400", "+400d", "-400d"):
            jump(offset)
            run.wait_for_acks(5, Deadline.after(PATIENCE_S))
        processes.kill(cluster.shards[0])
        jump("-2000d")  # a restart in the past: its epoch is later all the same
        cluster.start_shard(0)
        run.wait_for_acks(5, Deadline.after(PATIENCE_S))
        verdict = run.finish()
        assert verdict.kept, f"{verdict}\n{run.last_words()}"
