"""A shard that comes back at another address under its name, as a pod does. The name is in an /etc/hosts that no other process sees."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvemb.local_cluster.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]


def in_own_mounts(hosts: Path, *command: str) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts), *command]


def test_a_shard_is_found_at_its_names_new_address_though_grpc_has_just_looked_the_name_up(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.touch()
    if (
        not shutil.which("unshare")
        or subprocess.run(in_own_mounts(hosts, "true"), capture_output=True, timeout=200, check=False).returncode
    ):
        pytest.skip("a mount namespace of one's own takes root, and unshare")
    (port,) = free_ports(1)
    command = in_own_mounts(hosts, sys.executable, "-m", "tests.integration.shard_that_moves", str(port))
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.splitlines() == ["reached at 127.0.0.2", "reached at 127.0.0.3"], done.stderr
