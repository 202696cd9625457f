"""Two releases of kvemb side by side: the checkout, and an older one that lies here as the files of its wheel.

`golden/kvemb-VERSION.tar.xz` is a wheel, unpacked and packed again (xz takes three fifths of zip); `python tests/upgrade/releases.py WHEEL`
makes it. The older release's processes find nothing of the checkout, and share its dependencies.
"""

import io
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from golden_data import unpack

from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import LocalProcess, python_env

GOLDEN = Path(__file__).with_name("golden")
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Release:
    """One installed release.

    Args:
        name: for messages.
        python: interpreter with options, in which `kvemb` is this release.
        env: what its processes have beside this one's environment.
    """

    name: str
    python: Sequence[str]
    env: dict[str, str]

    def kvemb(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the `kvemb` command to its end."""
        command = [*self.python, "-m", "kvemb.cli", *arguments]
        env = {**os.environ, **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def done(self, *arguments: str) -> str:
        """Run the `kvemb` command, which must succeed; return what it has said."""
        ran = self.kvemb(*arguments)
        assert ran.returncode == 0, f"{self.name}: kvemb {' '.join(arguments)}: {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout


def present() -> Release:
    """The checkout."""
    return Release("present", [sys.executable, "-P"], python_env())


def older(folder: Path, archive: str = "kvemb-0.1.0.tar.xz") -> Release:
    """Install the older release into a folder."""
    unpack(GOLDEN / archive, folder)
    # -S: the file that puts the checkout on every path lies in site-packages, whose packages are wanted all the same.
    packages = [path for path in sys.path if path.endswith("-packages")]
    return Release("older", [sys.executable, "-S", "-P"], python_env() | {"PYTHONPATH": os.pathsep.join([str(folder), *packages])})


class MixedCluster(LocalCluster):
    """A local cluster each of whose shards runs a release of its own.

    Args:
        release: of every shard at first.
        store, nodes, shards, mode, trainers: see `LocalCluster`.
    """

    def __init__(self, release: Release, store: str, nodes: int, *, shards: int, mode: str = "async", trainers: int = 0) -> None:
        super().__init__(store, nodes, shards=shards, mode=mode, trainers=trainers, memory_mb=64)
        self.releases = [release] * shards

    @property
    def addresses(self) -> list[str]:
        """Of the shards."""
        return self._addresses

    def launch_shard(self, index: int, *options: str) -> LocalProcess:
        """As that of LocalCluster, by the shard's release."""
        self._ready_file(index).unlink(missing_ok=True)
        usual = self._shard_command(index)
        command = [*self.releases[index].python, *usual[usual.index("-m") :], *options]
        process = LocalProcess(f"shard {index}", command, self.folder / f"shard-{index}.log", self.releases[index].env)
        self.shards[index : index + 1] = [process]
        return process

    def exchange_shard(self, index: int, release: Release) -> None:
        """End a shard and start it again as another release."""
        assert self.shards[index].stop(PATIENCE_S) == 0, self.shards[index].log_tail()
        self.releases[index] = release
        self.start_shard(index)


def pack(wheel: Path) -> Path:
    """Write a wheel's files as an archive beside the others."""
    data = io.BytesIO()
    with zipfile.ZipFile(wheel) as files, tarfile.open(fileobj=data, mode="w") as archive:
        for name in sorted(files.namelist()):
            content = files.read(name)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    made = GOLDEN / f"{'-'.join(wheel.name.split('-')[:2])}.tar.xz"
    made.write_bytes(lzma.compress(data.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    return made


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
