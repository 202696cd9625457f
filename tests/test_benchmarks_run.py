"""Every benchmark runs to its end with tiny sizes. The figures then mean nothing, and are not looked at."""

from collections.abc import Sequence

import pytest

from benchmarks import scale_simulate
from benchmarks.__main__ import BENCHMARKS, main

pytest.importorskip("torch")
pytestmark = pytest.mark.full

_ONCE = ("--repeats", "1")
TINY: dict[str, Sequence[str]] = {
    "pull": ("--store", "redis", "--rows", "5000", "--seconds", "0.02", *_ONCE),
    "latency": ("--rows", "1000", "--sizes", "3", "--calls", "10", *_ONCE),
    "apply": ("--rows", "4000", "--batch", "400", "--optimizer", "adam", *_ONCE),
    "train": ("--rows", "5000", "--dim", "16", "--seconds", "0.05", "--durability", "os", *_ONCE),
    "new_rows": ("--rows", "20000", "--dim", "16", "--steps", "1", "--seconds", "0.02", *_ONCE),
    "durability": ("--rows", "4000", "--batch", "400", *_ONCE),
    "recovery": ("--store", "redis", "--rows", "4000", "--batch", "1000", "--small-batch", "100", *_ONCE),
    "checkpoint": ("--rows", "4000", "--batch", "1000", "--changed", "0.1", *_ONCE),
    "compare": ("HEAD", "--rounds", "1", "--seconds", "0.05", "--dims", "4", "--limit", "1000"),
    "deepfm": ("--store", "redis", "--mode", "sync", "--batch", "64", "--lines", "2000", "--steps", "2", *_ONCE),
    "dlrm": ("--batch", "64", "--ids", "500", "--steps", "1", *_ONCE),
    "memory": ("--store", "redis", "--dim", "8", "--optimizer", "sgd", "--rows", "4000"),
    "elastic": ("--store", "redis", "--rows", "1000", "--batch", "100", "--seconds", "0.3", "--steps", "4", *_ONCE),
    "evictions": ("--rows", "2000", "--batch", "200", "--new", "50", "--seconds", "0.2", "--times", "2"),
    "policies": ("--steps", "4", "--batch", "100", "--users", "50", "--new", "5", "--window", "20"),
    "publish": ("--rows", "5000", "--probes", "2", "--rtt-ms", "5", *_ONCE),
    "exchange": ("--ranks", "2", "--tables", "2", "--lines", "16", "--rows", "500", "--steps", "3", *_ONCE),
    "flash": ("--rows", "5000", "--dim", "32", "--batch", "500", "--seconds", "0.2", "--cold", *_ONCE),
    "frameworks": ("--framework", "torch", "--batch", "64", "--lines", "2000", "--steps", "9", *_ONCE),
    "index": ("--rows", "20000", "--batch", "500", "--repeats", "1"),
    "storage_optimizes": ("--rows", "5000", "--seconds", "0.05", *_ONCE),
    "serve": ("--rows", "4000", "--pushes", "5", "--calls", "10", "--unseen", "5000", "--seconds", "0.05", *_ONCE),
    "switch": ("--rows", "4000", "--lookups", "20", "--switches", "2"),
    "scale": ("--nodes", "2", "--trainers", "2", "--rows", "4000", "--seconds", "0.5", *_ONCE),
}


def test_rows_of_bytes_are_pulled_beside_a_file_of_them(capfd: pytest.CaptureFixture[str]) -> None:
    tiny = ("--rows", "5000", "--seconds", "0.02", *_ONCE)
    assert main(["pull", "--store", "redis", "--dtype", "bytes:264", *tiny]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    for name in ("Table.pull", "redis-py + hiredis HMGET", "MGET 1024", "in memory", "read from disk"):
        assert name in said


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_comes_to_its_end(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([name, *TINY[name]]) == 0, capfd.readouterr().err


def test_the_model_of_plan_is_laid_beside_a_real_cluster(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scale_simulate, "CLUSTERS", ((2, 2),))
    monkeypatch.setattr(scale_simulate, "KINDS", scale_simulate.KINDS[2:3])
    assert main(["scale", "--simulate", "--rows", "64000", "--seconds", "0.05", *_ONCE]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    for job in scale_simulate.JOBS:
        assert f"2 nodes, 2 shards: {job}" in said
