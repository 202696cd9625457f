"""The Helm chart as helm renders it, for the tests of this folder: the real program, on the example values."""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/kvemb"
TOOLS = ROOT / ".chart-tools/bin"
EXAMPLES = sorted(path.stem for path in (ROOT / "deploy/helm/examples").glob("*.yaml"))
NAMESPACE = "ml"
OLDEST, NEWEST = "1.27", "1.37"
PODS = ("StatefulSet", "Deployment", "Job", "CronJob")


def tool(name: str) -> str:
    """Return the path of a tool that `make chart` installs; without it the test is skipped, where servers are required (CI), too."""
    if path := shutil.which(name, path=f"{TOOLS}:{os.environ['PATH']}"):
        return path
    pytest.skip(f"{name} is not there; run: make chart")


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("helm"), *words], capture_output=True, text=True, timeout=200, check=False)


def template(example: str, *values: str, release: str = "prod") -> subprocess.CompletedProcess[str]:
    """Render the chart; of the example "" with its own values alone."""
    files = ("-f", str(ROOT / f"deploy/helm/examples/{example}.yaml")) if example else ()
    changes = [word for value in values for word in ("--set-json" if "[" in value or "{" in value else "--set", value)]
    return helm("template", release, str(CHART), "--namespace", NAMESPACE, "--kube-version", OLDEST, *files, *changes)


@cache
def _text(example: str, values: tuple[str, ...], release: str) -> str:
    done = template(example, *values, release=release)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resources(example: str, *values: str, release: str = "prod") -> list[dict[str, Any]]:
    """What the chart makes of an example and of further values, each "key=value"."""
    return [document for document in yaml.safe_load_all(_text(example, values, release)) if document]


def of_kind(found: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [one for one in found if one["kind"] in kinds]


def named(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (one,) = [one for one in of_kind(found, kind) if one["metadata"]["name"] == name]
    return one


def pod_template(one: dict[str, Any]) -> dict[str, Any]:
    """Of a resource that makes pods."""
    spec = one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one["spec"]
    found: dict[str, Any] = spec["template"]
    return found


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The template of every kind of pod, by its component."""
    templates = [pod_template(one) for one in of_kind(found, *PODS)]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def container(template: dict[str, Any]) -> dict[str, Any]:
    (one,) = template["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def kvemb_yaml(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The file that every pod gets."""
    (text,) = [one["data"]["kvemb.yaml"] for one in of_kind(found, "ConfigMap") if "kvemb.yaml" in one["data"]]
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


def policy_faults(folder: Path) -> list[tuple[str, str]]:
    """What checkov finds in a folder of manifests: (check, resource)."""
    # checkov takes what its environment says of proxies, and asks its maker's servers, unless told not to.
    words = ["-d", str(folder), "--framework", "kubernetes", "--compact", "--quiet", "--skip-download", "-o", "json"]
    done = subprocess.run([tool("checkov"), *words], capture_output=True, text=True, timeout=280, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 100
    return [(one["check_id"], one["resource"]) for one in report["results"]["failed_checks"]]
