"""When tests in containers run: only where `make compose-test` has brought a Docker engine and the images. Elsewhere they are skipped."""

import os
import subprocess
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies here without an engine; allow what runs here the time that containers take."""
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def missing() -> str:
    """What these tests lack; "" for nothing."""
    if os.environ.get("KVEMB_CONTAINER_TESTS") != "1":
        return "tests in containers are run by `make compose-test`"
    try:
        subprocess.run(["docker", "version"], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "no Docker engine answers"
    return ""
