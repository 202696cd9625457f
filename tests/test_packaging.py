"""The files around the code: pyproject.toml, the Makefile's scripts, docker-compose.yml, the files of a distribution.

Scripts are run on copies in a temporary folder with a stand-in for the interpreter: no environment is built and nothing
is installed.
"""

import importlib
import os
import re
import runpy
import shutil
import stat
import subprocess
import tomllib
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvemb import config
from kvemb.stores import storage_kinds

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
JOBS = {"trainer", "redis-cluster-create"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", sorted({*(kind.store for kind in storage_kinds.KINDS.values()), *PROJECT["scripts"].values()}))
def test_an_entry_point_or_a_storage_kind_names_something_that_exists(target: str) -> None:
    module, name = target.split(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("package", ["kvemb", "paramserver", "trainer"])
def test_a_package_ships_its_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert (ROOT / package / "__init__.py").is_file()


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = read("LICENSE")
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text
    assert "Copyright 2026 The kvemb authors" in text
    assert len(text.splitlines()) > 190


def test_the_version_of_pyproject_is_the_one_of_chart_image_and_pages() -> None:
    version = PROJECT["version"]
    chart = yaml.safe_load(read("deploy/helm/kvemb/Chart.yaml"))
    assert chart["version"] == chart["appVersion"] == version
    assert f"\nARG VERSION={version}\n" in read("deploy/Dockerfile")
    assert set(re.findall(r"kvemb:([0-9][\w.]*)", read("docs/kubernetes.md"))) == {version}
    assert re.fullmatch(r"0\.\d+\.\d+", version)


def test_the_description_has_words_where_the_readme_links_into_the_repository() -> None:
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]()
    assert all("://" in link for link in re.findall(r"\]\(([^)]*)\)", described))
    assert "docs/limits.md: refused, slow, never run." in described
    assert "!" not in {line[:1] for line in described.splitlines()}  # of a picture
    assert len(described) > 0.7 * len(read("README.md"))


def test_operators_find_rules_dashboard_and_chart_beside_an_installed_kvemb() -> None:
    shared = dict(runpy.run_path(str(ROOT / "setup.py"))["shared"]())
    assert {"deploy/monitoring/alerts.yml", "deploy/monitoring/dashboard.json"} <= set(shared["share/kvemb/monitoring"])
    assert "deploy/helm/kvemb/Chart.yaml" in shared["share/kvemb/helm/kvemb"]
    assert "share/kvemb" in read("docs/operations.md")
    assert "share/kvemb" in read("docs/kubernetes.md")


def test_the_changelog_has_this_version_below_what_is_not_released() -> None:
    sections = re.findall(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert sections[:2] == ["Unreleased", PROJECT["version"]]


def test_the_readme_names_the_commands_that_the_makefile_has() -> None:
    targets = {line.split(":")[0] for line in read("Makefile").splitlines() if line[:1].isalpha() and ":" in line}
    assert {"demo", "test", "lint", "types", "bench", "clean"} <= targets
    for command in ("make demo", "make test"):
        assert command in read("README.md")


LICENCES = runpy.run_path(str(ROOT / "deploy/licences.py"))
LISTED = re.findall(r"^\| ([\w-]+) \| (\d\S*) \| (.*) \| (.*) \|$", read("deploy/locks/LICENCES.md"), re.MULTILINE)


def test_every_package_of_an_image_is_listed_with_a_licence_that_is_known() -> None:
    assert {name: version for name, version, *_ in LISTED} == LICENCES["locked"]("torch.txt")
    assert [name for name, _, licence, _ in LISTED if not LICENCES["is_known"](licence)] == []
    assert [name for name, _, licence, images in LISTED if images.startswith("slim")] == sorted(LICENCES["locked"]("run.txt"))


def test_the_licences_of_packages_that_are_here_are_those_that_their_metadata_name() -> None:
    here = {one.metadata["Name"].lower().replace("_", "-"): one for one in distributions()}
    judged = {name: LICENCES["licence_of"](here[name]) for name, *_ in LISTED if name in here}
    assert len(judged) >= 15
    assert judged == {name: licence for name, _, licence, _ in LISTED if name in judged}


def test_an_unknown_licence_of_an_images_package_fails() -> None:
    class Package:
        def __init__(self, *lines: str) -> None:
            self.metadata = Parser().parsestr("\n".join(["Name: torch", *lines, ""]))

    of = LICENCES["licence_of"]
    assert of(Package("License-Expression: MIT AND Zlib")) == "MIT AND Zlib"
    assert of(Package("License: Apache License 2.0")) == "Apache-2.0"
    for lines in (["License-Expression: GPL-3.0-only"], ["License: my own"], ["Classifier: License :: Other/Proprietary License"], []):
        assert of(Package(*lines)) == ""
    with pytest.raises(SystemExit, match="none known of async-timeout"):
        LICENCES["page"]([])


# --- scripts/setup.sh -------------------------------------------------------------------------------------------------

# Plays the interpreter: a venv is a folder with a copy of it, pip writes down its arguments.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"-m pip"*) echo "$*" >>pip-calls; {pip} ;;
    *ensurepip*) exit {ensurepip} ;;
    *version_info*print*|*print*version_info*) echo "Python {version}" ;;
    *version_info*) exit {too_old} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing but the scripts and pyproject.toml."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def fake_python(folder: Path, *, pip: str = "true", ensurepip: int = 0, version: str = "3.12", too_old: int = 0) -> str:
    path = folder / "python-stand-in"
    path.write_text(FAKE_PYTHON.format(pip=pip, ensurepip=ensurepip, version=version, too_old=too_old), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def setup(checkout: Path, python: str, profile: str = "dev") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": python, "TORCH_SPEC": "torch==9.9"}
    command = ["sh", "scripts/setup.sh", profile]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=200, check=False)


def pip_calls(checkout: Path) -> list[str]:
    calls = checkout / "pip-calls"
    return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_setup_says_in_one_line_that_the_interpreter_is_not_there(checkout: Path) -> None:
    assert_one_line(setup(checkout, "/no/such/python"), "/no/such/python was not found", "3.11")


def test_setup_says_in_one_line_that_the_interpreter_is_none(checkout: Path) -> None:
    assert_one_line(setup(checkout, "false"), "not a working Python", "make PYTHON=")


def test_setup_says_in_one_line_that_python_is_too_old(checkout: Path) -> None:
    python = fake_python(checkout, version="3.9", too_old=1)
    assert_one_line(setup(checkout, python), "Python 3.9", "3.11 or newer", "make PYTHON=")


def test_setup_says_in_one_line_that_venv_is_missing(checkout: Path) -> None:
    done = setup(checkout, fake_python(checkout, ensurepip=1))
    assert_one_line(done, "has no venv module", "apt-get install")
    assert not (checkout / ".venv").exists()


def test_setup_says_in_one_line_that_there_is_no_network(checkout: Path) -> None:
    pip = 'echo "WARNING: Retrying after connection broken by NewConnectionError"; exit 1'
    assert_one_line(setup(checkout, fake_python(checkout, pip=pip)), "no package index could be reached", ".venv/setup.log")


def test_setup_says_in_one_line_that_no_index_has_it(checkout: Path) -> None:
    told = "Could not find a version (from versions: none)", "No matching distribution found for setuptools>=77"
    pip = "; ".join(f'echo "ERROR: {line}"' for line in told) + "; exit 1"
    assert_one_line(setup(checkout, fake_python(checkout, pip=pip)), "does not have setuptools>=77", ".venv/setup.log")


def test_setup_shows_what_pip_said_when_it_fails_otherwise(checkout: Path) -> None:
    done = setup(checkout, fake_python(checkout, pip='echo "ERROR: no such version"; exit 1'))
    assert done.returncode != 0
    assert "ERROR: no such version" in done.stderr


def test_setup_installs_once_and_again_when_pyproject_changes(checkout: Path) -> None:
    python = fake_python(checkout)
    assert setup(checkout, python).returncode == 0
    first = pip_calls(checkout)
    assert [call.split()[-1] for call in first] == ["torch==9.9", ".[dev,embedded]"]

    assert setup(checkout, python).returncode == 0
    assert setup(checkout, python, "demo").returncode == 0  # the dev profile holds all that demo needs
    assert pip_calls(checkout) == first

    with (checkout / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert setup(checkout, python).returncode == 0
    assert len(pip_calls(checkout)) == 2 * len(first)


def test_setup_tries_again_after_a_failed_installation(checkout: Path) -> None:
    assert setup(checkout, fake_python(checkout, pip="exit 1"), "demo").returncode != 0
    (checkout / "pip-calls").unlink()
    shutil.rmtree(checkout / ".venv")
    assert setup(checkout, fake_python(checkout), "demo").returncode == 0
    assert [call.split()[-1] for call in pip_calls(checkout)] == [".[demo]"]


def test_setup_asks_for_the_python_that_pyproject_asks_for() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert "(3, 11)" in read("scripts/setup.sh")


# --- scripts/servers.sh -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_missing_servers_are_named_with_the_command_and_fail_only_in_ci(tmp_path: Path, ci: str, code: int) -> None:
    env = {"PATH": str(tmp_path), "KVEMB_NO_INSTALL": "1", "CI": ci}
    command = [str(shutil.which("sh")), str(ROOT / "scripts/servers.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code
    assert "sudo apt-get install redis-server memcached" in done.stderr
    assert ("skipped without memcached" in done.stderr) == (code == 0)


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/servers.sh"])
def test_a_script_is_valid_shell(script: str) -> None:
    subprocess.run(["sh", "-n", script], cwd=ROOT, check=True, timeout=200)


def test_the_ci_script_runs_what_the_command_of_the_readme_runs_and_the_rest() -> None:
    makefile = read("Makefile")
    selections = dict(
        re.findall(r"^(test|test-all): setup\n\t@sh .*\n\t@\$\(PYTEST\) (\$\(QUICK\)|-m 'not long') ", makefile, re.MULTILINE)
    )
    assert selections == {"test": "$(QUICK)", "test-all": "-m 'not long'"}
    assert "\nQUICK := -m 'not full and not long' " in makefile
    assert "step tests 3000 make test ARGS=" in read(".ci/run")
    assert """make test-all ARGS="-m 'full and not long' ${now:+--turn $now }--full-for 600 """ in read(".ci/run")
    assert (ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR


# --- docker-compose.yml and deploy/ -----------------------------------------------------------------------------------


def in_profile(profile: str) -> list[str]:
    return [name for name, service in SERVICES.items() if service.get("profiles") == [profile]]


def test_compose_has_the_services_of_the_architecture() -> None:
    by_default = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert by_default == {"memcached-0", "memcached-1", "ps-0", "ps-1", "trainer"}
    assert in_profile("grow") == ["memcached-2", "ps-2"]
    assert in_profile("monitoring") == ["prometheus", "grafana"]
    for kind in ("redis", "valkey"):
        assert in_profile(kind) == [f"{kind}-{number}" for number in range(3)]
    assert in_profile("redis-cluster") == [*(f"redis-cluster-{number}" for number in range(6)), "redis-cluster-create"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_container_is_limited_watched_bare_and_published_nowhere(name: str) -> None:
    service = SERVICES[name]
    assert {"restart", "mem_limit", "cpus", "logging"} <= set(service)
    assert name in JOBS or service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
    assert service["logging"]["options"].keys() >= {"max-size", "max-file"}
    if service.get("profiles") == ["monitoring"]:  # a person looks at them, on this machine
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    else:
        assert "ports" not in service
        assert service["networks"] == ["kvemb"]

    # It can do no more than it has to.
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    # Its image is a variable with a tag by default.
    variable, default = service["image"].removeprefix("${").removesuffix("}").split(":-")
    assert variable.endswith("_IMAGE")
    assert ":" in default
    assert variable in ("KVEMB_IMAGE", "GRAFANA_IMAGE") or f"\n{variable}=" in read("deploy/stand-ins.env")


@pytest.mark.parametrize("name", [name for name in SERVICES if name.startswith("memcached-")])
def test_a_memcached_node_does_not_lose_rows(name: str) -> None:
    command = SERVICES[name]["command"]
    assert "-M" in command
    assert command[command.index("-o") + 1] == "no_slab_reassign"


def run_node(folder: Path, password: str | None = "a-word", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run deploy/redis-node.sh with `cat` as the server: it prints its configuration."""
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), **variables} | (
        {} if password is None else {"KVEMB_STORAGE_PASSWORD": password}
    )
    script = str(ROOT / "deploy/redis-node.sh")
    return subprocess.run(["sh", script, "cat"], env=env, capture_output=True, text=True, timeout=200, check=False)


def test_a_redis_node_keeps_its_rows_in_memory_alone_and_evicts_none(tmp_path: Path) -> None:
    done = run_node(tmp_path)
    assert {"maxmemory 512mb", "maxmemory-policy noeviction", 'save ""', "appendonly no", "requirepass a-word"} <= set(
        done.stdout.splitlines()
    )
    assert "cluster-enabled yes" not in done.stdout
    assert "tls" not in done.stdout


def test_a_redis_node_with_certificates_speaks_tls_only(tmp_path: Path) -> None:
    said = run_node(tmp_path, KVEMB_TLS_FOLDER="/tls").stdout.splitlines()
    assert {"port 0", "tls-port 6379", "tls-cert-file /tls/tls.crt", "tls-auth-clients yes"} <= set(said)
    assert "tls-auth-clients no" in run_node(tmp_path, KVEMB_TLS_FOLDER="/tls", KVEMB_TLS_CLIENTS="no").stdout


@pytest.mark.parametrize("password", [None, "", "two words", 'a"quote', "a\nline"])
def test_a_redis_node_without_a_usable_password_does_not_start(tmp_path: Path, password: str | None) -> None:
    done = run_node(tmp_path, password)
    assert done.returncode != 0
    assert "KVEMB_STORAGE_PASSWORD" in done.stderr
    assert not done.stdout


def test_no_password_stands_on_a_command_line() -> None:
    assert not [name for name, service in SERVICES.items() if "PASSWORD" in str(service.get("command"))]


def test_every_shard_keeps_its_data_in_a_volume_of_its_own() -> None:
    volumes = [v.split(":")[0] for name in ("ps-0", "ps-1") for v in SERVICES[name]["volumes"] if v.endswith("/var/lib/kvemb")]
    assert sorted(volumes) == ["ps-0-data", "ps-1-data"]


@pytest.mark.parametrize("name", ["ps-0", "ps-1"])
def test_a_shard_has_one_name_so_that_there_is_one_of_it(name: str) -> None:
    assert SERVICES[name]["container_name"].endswith(name)


def test_every_volume_that_is_mounted_is_declared_and_the_other_way_round() -> None:
    mounted = {v.split(":")[0] for service in SERVICES.values() for v in service.get("volumes", []) if v[0] not in "./$"}
    assert mounted == set(COMPOSE["volumes"])


@pytest.mark.parametrize("kind", ["memcached", "redis", "redis-cluster", "valkey"])
def test_a_mounted_configuration_is_valid_and_names_the_containers(kind: str) -> None:
    name = "kvemb.yaml" if kind == "memcached" else f"kvemb-{kind}.yaml"
    loaded = config.load(ROOT / "deploy" / name, {"KVEMB_STORAGE_PASSWORD": "secret"})
    assert loaded.storage.kind == kind
    nodes = [address.split(":")[0] for address in loaded.storage.nodes]
    known = [service for service in SERVICES if re.fullmatch(rf"{kind}-\d", service) and service not in in_profile("grow")]
    assert nodes == known[: len(nodes)]
    assert len(nodes) == len(known) or kind == "redis-cluster"  # whose nodes name one another
    assert [address.split(":")[0] for address in loaded.servers.shards] == ["ps-0", "ps-1"]
    assert loaded.storage.password == (None if kind == "memcached" else "secret")


@pytest.mark.parametrize("lock", ["run", "checkpoint", "torch", "build"])
def test_a_lock_has_one_version_with_checksums_of_each_package_on_every_python(lock: str) -> None:
    requirements = read(f"deploy/locks/{lock}.txt").replace("\\\n", " ").splitlines()[1:]
    assert requirements
    for requirement in requirements:
        assert ";" not in requirement
        assert " --hash=sha256:" in requirement
    names = [requirement.split("==")[0] for requirement in requirements]
    assert len(set(names)) == len(names)


def test_the_locks_have_what_pyproject_asks_for() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=!~ ]", requirement)[0] for requirement in requirements if requirement[0].isalpha()}

    run, checkpoint = (names(read(f"deploy/locks/{lock}.txt").splitlines()) for lock in ("run", "checkpoint"))
    assert names(PROJECT["dependencies"]) <= run
    assert names(PROJECT["optional-dependencies"]["checkpoint"]) | run <= checkpoint


@pytest.mark.parametrize("extra", ["keras", "tensorflow", "jax"])
def test_the_extra_of_a_bridge_ends_above_what_ci_has_tried(extra: str) -> None:
    """Bridges use private names of frameworks."""
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", read("scripts/frameworks.txt"), re.MULTILINE))
    for requirement in PROJECT["optional-dependencies"][extra]:
        name, upper = re.fullmatch(r"([\w-]+)>=[\d.]+,<([\d.]+)", requirement).groups()  # type: ignore[union-attr]
        *same, last = map(int, upper.split("."))
        assert list(map(int, pinned[name].split(".")))[: len(same) + 1] == [*same, last - 1], requirement


def test_deploy_scripts_are_valid_shell() -> None:
    for path in sorted((ROOT / "deploy").glob("**/*.sh")):
        shell = path.read_text(encoding="utf-8").splitlines()[0].split("/")[-1].split()[-1]
        subprocess.run([shell, "-n", path], check=True, timeout=200)
