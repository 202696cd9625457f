"""Our image: what it may do without, how large it is, and what is not in it."""

import json
import os
from collections.abc import Iterator

import pytest
from composed import ROOT, docker

IMAGE = os.environ.get("KVEMB_IMAGE", "kvemb:local")
SLIM = f"{IMAGE}-slim"
HARDENED = ["--read-only", "--user", "10001", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--network", "none"]


def in_image(*command: str, image: str = IMAGE, options: tuple[str, ...] = ()) -> str:
    """Run a command in a container that may do as little as possible."""
    return docker("run", "--rm", "--no-healthcheck", *HARDENED, *options, image, *command).stdout


def image_config(image: str) -> dict[str, object]:
    """The part `Config` of `docker image inspect`."""
    config: dict[str, object] = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", image).stdout)
    return config


@pytest.fixture
def volume() -> Iterator[str]:
    """The name of a volume that is not there yet, and not afterwards."""
    name = "kvemb-test-image"
    docker("volume", "rm", "-f", name)
    yield name
    docker("volume", "rm", "-f", name)


@pytest.mark.parametrize("image", [IMAGE, SLIM])
def test_the_command_runs_with_nothing_allowed(image: str) -> None:
    assert in_image("kvemb", "--version", image=image).startswith("kvemb ")
    assert in_image("id", "-u", image=image).strip() == "10001"


def test_a_shard_writes_to_its_volume_and_nowhere_else(volume: str) -> None:
    folder = ("-v", f"{volume}:/var/lib/kvemb")
    write = 'import pathlib; pathlib.Path("/var/lib/kvemb/file").touch(); pathlib.Path("/etc/kvemb/file").touch()'
    refused = docker("run", "--rm", "--no-healthcheck", *HARDENED, *folder, IMAGE, "python", "-c", write, check=False)
    assert "Read-only file system: '/etc/kvemb/file'" in refused.stderr
    assert in_image("ls", "/var/lib/kvemb", options=folder).split() == ["file"]


@pytest.mark.parametrize(("image", "least_mb", "most_mb"), [(IMAGE, 100, 450), (SLIM, 100, 300)])
def test_an_image_is_as_small_as_promised(image: str, least_mb: int, most_mb: int) -> None:
    size_bytes = int(docker("image", "inspect", "--format", "{{.Size}}", image).stdout)
    assert least_mb * 10**6 < size_bytes < most_mb * 10**6


def test_an_image_has_no_compiler_and_no_build_tools_of_ours() -> None:
    found = in_image("sh", "-c", "for name in cc gcc g++ clang ld make; do command -v $name; done; ls /src /opt/kvemb/bin/pip; true")
    assert found == ""


def test_checkpoints_need_what_only_the_whole_image_has() -> None:
    assert in_image("python", "-c", "import pyarrow.parquet, fsspec; print('both')") == "both\n"
    refused = docker("run", "--rm", "--no-healthcheck", *HARDENED, SLIM, "kvemb", "ls", "/checkpoints", check=False)
    assert refused.returncode != 0
    assert "pip install 'pyarrow>=" in refused.stderr


@pytest.mark.parametrize("image", [IMAGE, SLIM])
def test_an_image_says_what_it_is_and_how_it_is(image: str) -> None:
    config = image_config(image)
    assert config["User"] == "kvemb"
    assert str(config["Healthcheck"]).count("healthcheck.py")
    labels = config["Labels"]
    assert isinstance(labels, dict)
    assert {"title", "description", "licenses", "version"} <= {name.removeprefix("org.opencontainers.image.") for name in labels}


def test_packages_are_those_of_the_lock() -> None:
    ask = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    installed = {name.lower().replace("_", "-") for name in in_image("python", "-c", ask).split() if not name.startswith("kvemb==")}
    lock = (ROOT / "deploy/locks/checkpoint.txt").read_text(encoding="utf-8")
    assert installed == {line.split(" ")[0] for line in lock.splitlines() if "==" in line}
