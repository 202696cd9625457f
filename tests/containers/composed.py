"""A cluster of docker-compose.yml under test: its commands, its containers' processes, its logs. Whatever it made is gone at the end.

What must not live here: what is done to it, and what is expected.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
LOG_CHARS = 6_000  # of a service, at its end
DOCKER_S = 120.0  # a single command of docker or compose, on a machine that is busy
# Every process of that name is killed; what runs as process 1 is the init, which then ends the container as a crash would.
_KILL = 'for at in /proc/[0-9]*; do [ "$(cat "$at/comm" 2>/dev/null)" != "$0" ] || kill -9 "${at#/proc/}"; done'


def compose_command() -> list[str]:
    """`docker compose` where there is one, or the older docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=DOCKER_S, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


class Composed:
    """One project of docker-compose.yml; a context manager.

    Args:
        project: its name.
        config: the kvemb.yaml that is mounted into its containers.
        profiles: of docker-compose.yml.
    """

    def __init__(self, project: str, config: Path, profiles: Sequence[str] = ()) -> None:
        self.project = project
        self._env = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": project,
            "KVEMB_CONFIG": str(config),
            "KVEMB_STORAGE_PASSWORD": "a-test_password",
        }
        self._command = [*compose_command(), *(word for profile in profiles for word in ("--profile", profile))]

    def __enter__(self) -> "Composed":
        self._down()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            print(self.compose("ps").stdout)
            for service in self.compose("config", "--services").stdout.split():
                print(f"== {service}", self.logs(service)[-LOG_CHARS:], sep="\n")  # each: the tail of all of them would be one node's
        self._down()

    def mount(self, config: Path) -> None:
        """Mount another kvemb.yaml into containers that are made from now on."""
        self._env["KVEMB_CONFIG"] = str(config)

    def compose(self, *arguments: str, check: bool = True, timeout_s: float = DOCKER_S) -> subprocess.CompletedProcess[str]:
        """Run one command of compose."""
        return run([*self._command, *arguments], self._env, check=check, timeout_s=timeout_s)

    def up(self, *services: str) -> None:
        """Start services, and those that they wait for, once these are healthy; return when they are healthy themselves."""
        self.compose("up", "-d", *services, timeout_s=3 * DOCKER_S)
        for service in services:
            self.wait(lambda service=service: self.health(service) in ("healthy", ""), f"{service} to be healthy")

    def kvemb(self, *arguments: str) -> str:
        """Run the `kvemb` command beside a shard; return what it prints."""
        return self.compose("exec", "-T", "ps-0", "kvemb", *arguments).stdout

    def container(self, service: str) -> str:
        """The container of a service that has one; those of `compose run` are not counted."""
        labels = {"project": self.project, "service": service, "oneoff": "False"}
        filters = (word for name, value in labels.items() for word in ("--filter", f"label=com.docker.compose.{name}={value}"))
        (found,) = docker("ps", "-a", "-q", "--no-trunc", *filters).stdout.split()
        return found

    def inspect(self, service: str, template: str) -> str:
        """One value of `docker inspect`."""
        return docker("inspect", "--format", template, self.container(service)).stdout.strip()

    def health(self, service: str) -> str:
        """What the health check says; "" for a service without one."""
        return self.inspect(service, "{{if .State.Health}}{{.State.Health.Status}}{{end}}")

    def kill_process(self, service: str, name: str) -> None:
        """End a service's process by SIGKILL from inside, and wait until the restart policy has brought a new one."""
        before = int(self.inspect(service, "{{.RestartCount}}"))
        self.compose("exec", "-T", service, "sh", "-c", _KILL, name, check=False)
        self.wait(lambda: int(self.inspect(service, "{{.RestartCount}}")) > before, f"the restart policy to start {service} again")

    def remove_volumes(self, *volumes: str) -> None:
        """Remove volumes that no container uses any more."""
        docker("volume", "rm", *(f"{self.project}_{volume}" for volume in volumes))

    def exit_code(self, service: str, timeout_s: float) -> int:
        """Wait for the end of a job, behind the restarts that its policy allows."""
        self.wait(lambda: self.inspect(service, "{{.State.Status}}") == "exited", f"the end of {service}", timeout_s)
        return int(self.inspect(service, "{{.State.ExitCode}}"))

    def logs(self, *services: str) -> str:
        """What the services have written."""
        return self.compose("logs", "--no-color", *services).stdout

    def wait(self, done: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        """Wait until something holds.

        Raises:
            TimeoutError: not in time.
        """
        end = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}")
            time.sleep(0.25)

    def leftovers(self) -> str:
        """Containers, volumes and networks of the project."""
        label = f"label=com.docker.compose.project={self.project}"
        found = (docker(*words, "-q", "--filter", label).stdout for words in (("ps", "-a"), ("volume", "ls"), ("network", "ls")))
        return "".join(found)

    def _down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20", timeout_s=2 * DOCKER_S)


class Ledger:
    """Trainers of the ledger in containers of the service `trainer`, on a volume of their own; a context manager.

    Args:
        cluster: healthy.
        n_trainers: how many.
        seed: of what they push.
    """

    def __init__(self, cluster: Composed, n_trainers: int = 2, seed: int = 1) -> None:
        self._cluster, self._n_trainers, self._seed = cluster, n_trainers, seed
        self._volume = f"{cluster.project}-ledger"
        self._names = [f"{cluster.project}-ledger-{trainer}" for trainer in range(n_trainers)]

    def __enter__(self) -> "Ledger":
        self._remove()
        self._judge("create")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            print(*(docker("logs", "--tail", "100", name, check=False).stderr for name in self._names), sep="\n")
        self._remove()

    def start(self) -> None:
        """Start the trainers, or start them again: they go on behind their last pushes."""
        for trainer, name in enumerate(self._names):
            docker("rm", "-f", name, check=False)
            plan = ["--seed", str(self._seed), "--trainers", str(self._n_trainers), "--trainer", str(trainer)]
            program = ["python", "-m", "chaos.trainer", "--config", "/etc/kvemb/kvemb.yaml", *plan]
            self._run(["-d", "--name", name], [*program, "--file", f"/var/lib/kvemb/ledger-{trainer}", "--pause-s", "0.02"])

    def acks(self) -> list[int]:
        """Acknowledged pushes of each trainer so far."""
        found: list[int] = json.loads(docker("exec", self._names[0], "python", "/etc/kvemb/judge.py", "acks", str(self._n_trainers)).stdout)
        return found

    def wait_for_acks(self, more: int) -> None:
        """Wait until each trainer has so many more pushes acknowledged."""
        wanted = [n + more for n in self.acks()]
        reached = lambda: all(n >= least for n, least in zip(self.acks(), wanted, strict=True))  # noqa: E731
        self._cluster.wait(reached, f"acknowledged pushes {wanted}")

    def stop(self) -> None:
        """Let the trainers end in order."""
        docker("stop", "--time", "90", *self._names)
        for name in self._names:
            assert docker("wait", name).stdout.strip() == "0", docker("logs", "--tail", "100", name).stderr

    def verdict(self) -> dict[str, object]:
        """Judge every row; see `chaos.ledger.Verdict`."""
        found: dict[str, object] = json.loads(self._judge("verify", str(self._n_trainers), str(self._seed)).splitlines()[-1])
        return found

    def _judge(self, *arguments: str) -> str:
        return self._run(["--rm", "-T"], ["python", "/etc/kvemb/judge.py", *arguments])

    def _run(self, options: list[str], command: list[str]) -> str:
        tests = Path(__file__).parents[1]
        programs = {tests / "containers" / "judge.py": "judge.py", tests / "chaos": "chaos"}  # Python finds both in its working folder
        volumes = ["-v", f"{self._volume}:/var/lib/kvemb"]
        volumes += [word for path, name in programs.items() for word in ("-v", f"{path}:/etc/kvemb/{name}:ro")]
        return self._cluster.compose("run", "--no-deps", *options, *volumes, "trainer", *command).stdout

    def _remove(self) -> None:
        docker("rm", "-f", *self._names, check=False)
        docker("volume", "rm", "-f", self._volume, check=False)


def docker(*arguments: str, check: bool = True, timeout_s: float = DOCKER_S) -> subprocess.CompletedProcess[str]:
    """Run one command of docker."""
    return run([str(shutil.which("docker")), *arguments], dict(os.environ), check=check, timeout_s=timeout_s)


def run(command: list[str], env: dict[str, str], *, check: bool, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root; fail with what it said."""
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}")
    return done
