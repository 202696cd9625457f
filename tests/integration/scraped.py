"""What tests of metrics need: free ports side by side, a scrape as Prometheus makes it, and Debian's Prometheus."""

import os
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 90.0


def ports_side_by_side(n: int) -> int:
    """The first of n free ports."""
    begin = os.getpid() * 16 % 8000  # tests that run beside this one look elsewhere first
    for first in (21000 + (begin + offset) % 8000 for offset in range(0, 8000, 16)):
        try:
            for port in range(first, first + n):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def text(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as reply:
        return str(reply.read(), "utf-8")


def value(port: int, name: str, **labels: str) -> float | None:
    """The one sample of this name and these labels, among others; None where there is none."""
    found = [sample for family in text_string_to_metric_families(text(port)) for sample in family.samples]
    values = [sample.value for sample in found if sample.name == name and labels.items() <= sample.labels.items()]
    assert len(values) < 2, (name, labels, values)
    return values[0] if values else None


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not there: apt-get install prometheus")
    return path
