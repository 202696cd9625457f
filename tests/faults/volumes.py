"""A replicated volume, as a shard's host sees it: a block device that may fail or go, and whose replica another host attaches.

The device is an image file, its file system ext4. What was synced is in the image; what was not is lost when the volume fails.
"""

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_FLUSH = struct.pack("I", 2)


class Volume:
    """A volume that is attached, until `detach`.

    Args:
        image: file of the device, with a file system.
        path: where it is mounted; made.
    """

    def __init__(self, image: Path, path: Path) -> None:
        self._image, self.path = image, path
        self._device = _run("losetup", "--find", "--show", str(image)).strip()
        try:
            path.mkdir()
            self.attach()
        finally:
            _run("losetup", "--detach", self._device)  # once it is mounted nowhere any more

    def attach(self) -> None:
        """Mount it at its place; the same files are there again."""
        _run("mount", "-o", "errors=remount-ro", self._device, str(self.path))

    def detach(self) -> None:
        """Take it away from its place; a process that has files of it open keeps those."""
        _run("umount", "--lazy", str(self.path))

    def fail(self) -> None:
        """Let every call answer with an I/O error from now on; what was not synced never reaches the device."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, _WITHOUT_FLUSH)
        finally:
            os.close(folder)

    def become_read_only(self) -> None:
        """Do what ext4 does after an error on the device."""
        _run("mount", "-o", "remount,abort", str(self.path))

    def replica(self) -> "Volume":
        """Attach a copy of the device, as it is now, at a place of its own: what another host attaches."""
        number = len(list(self._image.parent.glob("*.image")))
        image = self._image.with_name(f"{number}.image")
        shutil.copyfile(self._image, image)
        return Volume(image, self.path.with_name(f"volume-{number}"))


@contextmanager
def volume(folder: Path, size_mb: int = 96) -> Iterator[Volume]:
    """Make a volume, where that is allowed; all that are attached below the folder go at the end."""
    image = folder / "0.image"
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("volumes need root and mkfs.ext4")
    _run("mkfs.ext4", "-q", "-F", str(image))
    try:
        made = Volume(image, folder / "volume-0")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"volumes cannot be attached here: {error.stderr}")
    try:
        yield made
    finally:
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            place = line.split()[1]
            if Path(place).is_relative_to(folder):
                _run("umount", "--lazy", place)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
