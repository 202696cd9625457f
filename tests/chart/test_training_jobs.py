"""deploy/kubernetes: trainers as a JobSet and as a TrainJob, against the published models of both, beside the chart's shards."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvemb import config
from tests.chart.rendered import NEWEST, OLDEST, ROOT, TOOLS, container, kvemb_yaml, pods, resources, tool

FOLDER = ROOT / "deploy/kubernetes"
DOCUMENTS = [one for name in ("jobset", "trainjob") for one in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())]
JOBSET, RUNTIME, TRAINJOB = DOCUMENTS
OPTIONS = 'shards.options={"mode":"sync","trainers":2,"on_lost_trainer":"wait"}'  # as jobset.yaml says
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
