"""The Helm chart in deploy/helm: its output is valid, safe, and accepted by kvemb. No cluster runs here (deploy/helm/try-kind.sh)."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvemb import config
from kvemb.errors import ConfigError
from tests.chart.rendered import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    NEWEST,
    OLDEST,
    ROOT,
    container,
    helm,
    kvemb_yaml,
    named,
    of_kind,
    pod_template,
    pods,
    policy_faults,
    resources,
    template,
    tool,
)

VARIABLES = {"KVEMB_STORAGE_PASSWORD": "secret", "KVEMB_STORAGE_USER": "user", "KVEMB_TLS_CERT": "/c", "KVEMB_TLS_KEY": "/k"}
CUSTOM = ("ServiceMonitor", "PrometheusRule")
# Policies that are not kept, and why.
NOT_KEPT = {
    "CKV_K8S_21": "the namespace is the release's, which `helm install` gives",
    "CKV_K8S_43": "image.tag may be a digest; ours is built by who installs it",
    "CKV_K8S_15": "image.pullPolicy",
    "CKV_K8S_11": "a CPU limit would slow a node or a shard down where there is CPU to be had; memory is limited",
    "CKV_K8S_35": "kvemb takes passwords from the environment; TLS keys and tokens are files",
    "CKV_K8S_8": "the toolbox waits for somebody to type; the others have probes (below)",
    "CKV_K8S_9": "the same",
    "CKV_K8S_40": "the users of the official images of Redis and Valkey",
}


def loaded(*of: str) -> config.Config:
    """kvemb.yaml as kvemb reads it in a pod."""
    return config.parse(kvemb_yaml(resources(*of)), VARIABLES)


def test_a_clone_without_the_charts_tools_skips_these_tests_in_anybodys_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.skip.Exception, match="make chart"):
        tool("no-such-helm")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_what_is_rendered_is_what_the_api_takes(version: str, tmp_path: Path) -> None:
    files = []
    for example in EXAMPLES:
        for number, one in enumerate(resources(example)):
            if one["kind"] not in CUSTOM:
                files.append(tmp_path / f"{example}-{number}.yaml")
                files[-1].write_text(yaml.safe_dump(one))
    words = [tool("kubernetes-validate"), "-k", version, "--strict", *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files) > 50


@pytest.mark.timeout(300)
def test_what_is_rendered_keeps_the_policies_of_checkov(tmp_path: Path) -> None:
    for example in EXAMPLES:
        (tmp_path / f"{example}.yaml").write_text(yaml.safe_dump_all(resources(example)))
    assert [fault for fault in policy_faults(tmp_path) if fault[0] not in NOT_KEPT] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_kvemb_accepts_the_file_and_finds_every_pod_in_it(example: str) -> None:
    for shards in (1, 3, 11):
        found = resources(example, f"shards.replicas={shards}")
        tree = loaded(example, f"shards.replicas={shards}")
        addresses = list(tree.servers.shards) + (list(tree.storage.nodes) if len(of_kind(found, "StatefulSet")) == 2 else [])
        made = []
        for one in sorted(of_kind(found, "StatefulSet"), key=lambda one: not one["metadata"]["name"].endswith("-shard")):
            service = named(found, "Service", one["spec"]["serviceName"])
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["publishNotReadyAddresses"] is True
            (port, *_) = service["spec"]["ports"]
            domain = f"{service['metadata']['name']}.{NAMESPACE}.svc.cluster.local:{port['port']}"
            made += [f"{one['metadata']['name']}-{number}.{domain}" for number in range(one["spec"]["replicas"])]
        assert addresses == made
        assert len(tree.servers.shards) == shards


@pytest.mark.parametrize("release", ["kvemb", "prod", "my-kvemb-of-a-name-that-goes-on-and-on-and-on-and-on"])
def test_a_pods_name_fits_a_dns_label(release: str) -> None:
    for one in of_kind(resources("valkey-tls", release=release), "StatefulSet", "Job", "CronJob", "Deployment"):
        assert len(f"{one['metadata']['name']}-999") <= 52  # of a CronJob's, eleven are added
        assert not one["metadata"]["name"].startswith("kvemb-kvemb")


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_selector_finds_pods(example: str) -> None:
    found = resources(example)
    labels = [pod["metadata"]["labels"] for pod in pods(found).values()]

    def finds(selector: dict[str, Any]) -> bool:
        wanted = selector.get("matchLabels", selector).items()
        among = selector.get("matchExpressions", [])
        assert wanted
        return any(wanted <= one.items() and all(one[e["key"]] in e["values"] for e in among) for one in labels)

    for one in of_kind(found, "NetworkPolicy"):
        assert finds(one["spec"]["podSelector"]), one["metadata"]["name"]
    for one in of_kind(found, "Service", "PodDisruptionBudget", "StatefulSet", "Deployment"):
        assert finds(one["spec"]["selector"]), one["metadata"]["name"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_can_do_no_more_than_a_container_of_docker_compose(example: str) -> None:
    for pod in pods(resources(example)).values():
        spec, security = pod["spec"], container(pod)["securityContext"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_file_and_variable_that_kvemb_yaml_names_is_in_every_pod_that_reads_it(example: str) -> None:
    tree = kvemb_yaml(resources(example))
    files = [value for part in ("storage", "parameter_servers") for value in tree[part].get("tls", {}).values() if value.startswith("/")]
    variables = {tree["storage"][key] for key in ("password_env", "username_env") if key in tree["storage"]}
    for component, pod in pods(resources(example)).items():
        if component == "storage":
            continue
        mounted = {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}
        assert {str(Path(path).parent) for path in files} | {"/etc/kvemb", "/tmp"} <= mounted.keys()
        assert set(mounted.values()) <= {volume["name"] for volume in pod["spec"]["volumes"]} | {"data"}
        assert variables <= {one["name"] for one in container(pod).get("env", [])}


def test_each_role_has_its_own_certificate_and_password() -> None:
    found = pods(resources("valkey-tls", "storage.trainerPassword.secret=reads"))

    def secret(component: str) -> str:
        (volume,) = [volume for volume in found[component]["spec"]["volumes"] if volume["name"] == "tls"]
        name: str = volume["projected"]["sources"][0]["secret"]["name"]
        return name

    def password(component: str) -> str:
        env = {one["name"]: one for one in container(found[component])["env"]}
        name: str = env["KVEMB_STORAGE_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"]
        return name

    assert [secret(name) for name in ("shard", "trainer", "backup", "toolbox")] == ["ads-shard", "ads-trainer", "ads-admin", "ads-admin"]
    assert [password(name) for name in ("storage", "shard", "trainer", "backup")] == ["ads-storage", "ads-storage", "reads", "reads"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_secret_stands_in_what_is_rendered(example: str) -> None:
    assert not of_kind(resources(example), "Secret")


@pytest.mark.parametrize("drain", [30, 300])
def test_a_shard_is_given_the_time_to_drain_and_runs_the_shard_of_its_number(drain: int, tmp_path: Path) -> None:
    shard = pods(resources("memcached", f"shards.drainSeconds={drain}"))["shard"]
    words = ran(container(shard)["command"], tmp_path, POD_NAME="prod-kvemb-shard-12")
    assert words[:5] == ["shard", "--config", "/etc/kvemb/kvemb.yaml", "--shard", "12"]
    assert int(words[words.index("--drain-timeout") + 1]) == drain < shard["spec"]["terminationGracePeriodSeconds"]


def test_a_backup_is_saved_under_the_time_of_its_start(tmp_path: Path) -> None:
    words = ran(container(pods(resources("existing-redis"))["backup"])["command"], tmp_path, BACKUP_URL="s3://bucket/backup")
    assert words[:-1] == ["save", "--config", "/etc/kvemb/kvemb.yaml", "--keep", "7"]
    assert words[-1].startswith("s3://bucket/backup/20")


def ran(command: list[str], folder: Path, **variables: str) -> list[str]:
    """The arguments that a pod's command gives kvemb, for which a script stands in."""
    (folder / "kvemb").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "kvemb").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=True).stdout.splitlines()


@pytest.mark.parametrize(("example", "asks"), [("memcached", "grpc"), ("valkey-tls", "--cert"), ("existing-redis", "--ca")])
def test_a_shard_is_asked_for_its_health_in_its_own_tongue(example: str, asks: str) -> None:
    shard = container(pods(resources(example))["shard"])
    for probe, service in (("startupProbe", "live"), ("livenessProbe", "live"), ("readinessProbe", "")):
        if asks == "grpc":
            assert shard[probe]["grpc"] == {"port": 7070, "service": service}
        else:
            words = shard[probe]["exec"]["command"][-1]
            assert f'--service "{service}"' in words
            assert asks in words
            assert ("--cert" in words) == (asks == "--cert")
            assert f'--name "$POD_NAME.prod-kvemb-shard.{NAMESPACE}.svc.cluster.local"' in words


def test_storage_is_restarted_by_hand_and_shards_one_after_the_other() -> None:
    found = resources("large")
    assert named(found, "StatefulSet", "prod-kvemb-memcached")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    for one in of_kind(found, "StatefulSet"):
        assert one["spec"]["podManagementPolicy"] == "Parallel"
    assert [one["spec"]["maxUnavailable"] for one in of_kind(found, "PodDisruptionBudget")] == [1, 1]
    volumes = pod_template(named(found, "StatefulSet", "prod-kvemb-shard"))["metadata"]["annotations"]
    again = pod_template(named(resources("large", "tables.t.dim=4"), "StatefulSet", "prod-kvemb-shard"))["metadata"]["annotations"]
    assert volumes["checksum/config"] != again["checksum/config"]  # shards read kvemb.yaml at their start


def test_a_release_of_the_chart_alone_restarts_no_shard_and_changes_no_job(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "kvemb")
    release = tmp_path / "kvemb/Chart.yaml"
    release.write_text(re.sub("(?m)^(version|appVersion): .*", r"\1: 9.9.9", release.read_text()))
    values = ("-f", str(ROOT / "deploy/helm/examples/valkey-tls.yaml"), "--set", "image.tag=pinned")
    rendered = [helm("template", "prod", str(chart), "--kube-version", OLDEST, *values).stdout for chart in (CHART, tmp_path / "kvemb")]
    before, after = ([one for one in yaml.safe_load_all(text) if one] for text in rendered)
    assert pods(before) == pods(after)
    assert len(pods(before)) == 7
    assert named(after, "StatefulSet", "prod-kvemb-shard")["metadata"]["labels"]["helm.sh/chart"] == "kvemb-9.9.9"


def test_a_backup_to_an_object_store_goes_where_a_policy_or_its_absence_lets_it() -> None:
    for example, *values in (
        ("memcached", "networkPolicy.enabled=false"),
        ("memcached", 'networkPolicy.egress=[{"ports":[{"port":443}]}]'),
        ("redis-cluster",),
    ):
        assert named(resources(example, "backup.url=s3://bucket/a", *values), "CronJob", "prod-kvemb-backup")


def test_pods_run_as_a_service_account_that_the_cloud_knows() -> None:
    of = 'serviceAccount.annotations={"eks.amazonaws.com/role-arn":"arn:aws:iam::1:role/kvemb"}'
    account = named(resources("valkey-tls", of), "ServiceAccount", "prod-kvemb")
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/kvemb"}
    own = resources("valkey-tls", "serviceAccount.name=ours")
    assert not of_kind(own, "ServiceAccount")
    assert {pod["spec"]["serviceAccountName"] for pod in pods(own).values()} == {"ours"}


@pytest.mark.parametrize("component", ["shard", "storage"])
def test_pods_are_spread_over_zones_by_their_own_labels(component: str) -> None:
    of = "shards" if component == "shard" else "storage"
    spread = '{"maxSkew":1,"topologyKey":"topology.kubernetes.io/zone","whenUnsatisfiable":"DoNotSchedule"}'
    found = pods(resources("memcached", f"{of}.topologySpreadConstraints=[{spread}]"))
    (one,) = found[component]["spec"]["topologySpreadConstraints"]
    assert one["topologyKey"] == "topology.kubernetes.io/zone"
    assert one["labelSelector"]["matchLabels"].items() <= found[component]["metadata"]["labels"].items()
    assert one["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    given = f'[{spread[:-1]},"labelSelector":{{"matchLabels":{{"a":"b"}}}}}}]'
    (one,) = pods(resources("memcached", f"{of}.topologySpreadConstraints={given}"))[component]["spec"]["topologySpreadConstraints"]
    assert one["labelSelector"]["matchLabels"]["a"] == "b"


@pytest.mark.parametrize(("component", "of"), [("shard", "shards"), ("backup", "backup"), ("toolbox", "toolbox")])
def test_further_volumes_reach_the_pods_that_speak_to_the_object_store(component: str, of: str) -> None:
    values = f'{of}.volumes=[{{"name":"ca","secret":{{"secretName":"s3"}}}}]', f'{of}.volumeMounts=[{{"name":"ca","mountPath":"/ca"}}]'
    pod = pods(resources("valkey-tls", *values))[component]
    assert {"name": "ca", "secret": {"secretName": "s3"}} in pod["spec"]["volumes"]
    assert {"name": "ca", "mountPath": "/ca"} in container(pod)["volumeMounts"]


def test_an_image_is_named_by_its_digest_where_there_is_one() -> None:
    digest = f"sha256:{'0' * 64}"
    assert container(pods(resources("memcached", f"image.digest={digest}"))["shard"])["image"] == f"kvemb@{digest}"


@pytest.mark.parametrize(
    ("component", "of", "name"), [("shard", "shards", "prod-kvemb-shard"), ("storage", "storage", "prod-kvemb-memcached")]
)
def test_budgets_and_probes_are_as_given(component: str, of: str, name: str) -> None:
    found = resources("memcached", f"{of}.podDisruptionBudget.maxUnavailable=25%", f"{of}.probes.liveness.failureThreshold=30")
    assert named(found, "PodDisruptionBudget", name)["spec"]["maxUnavailable"] == "25%"
    probe = container(pods(found)[component])["livenessProbe"]
    assert (probe["failureThreshold"], probe["periodSeconds"], probe["timeoutSeconds"]) == (30, 20, 10)


def test_a_start_may_last_as_long_as_was_said() -> None:
    def probe(*values: str) -> tuple[int, int]:
        found = container(pods(resources("memcached", *values))["shard"])["startupProbe"]
        return found["periodSeconds"], found["failureThreshold"]

    assert probe() == (5, 4200 // 5)
    assert probe("shards.probes.startup.periodSeconds=10") == (10, 4200 // 10)
    assert probe("shards.probes.startup.failureThreshold=7") == (5, 7)


def test_shards_may_share_a_claim_that_exists() -> None:
    shards = named(resources("memcached", "shards.volume.existingClaim=journals"), "StatefulSet", "prod-kvemb-shard")["spec"]
    assert "volumeClaimTemplates" not in shards
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "journals"}} in shards["template"]["spec"]["volumes"]


def test_a_memcached_node_is_started_as_docker_compose_starts_it() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["memcached-0"]["command"]
    command = container(pods(resources("memcached", "storage.memoryMB=512"))["storage"])["command"]
    assert command == compose
    assert container(pods(resources("large"))["storage"])["command"][-3:-1] == ["-Z", "-o"]


def test_monitoring_gets_the_rules_and_the_dashboard_of_this_repository() -> None:
    found = resources("valkey-tls")
    (rule,), (monitor,) = of_kind(found, "PrometheusRule"), of_kind(found, "ServiceMonitor")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/monitoring/alerts.yml").read_text())
    dashboard = named(found, "ConfigMap", "prod-kvemb-dashboard")["data"]["kvemb.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "deploy/monitoring/dashboard.json").read_text())
    service = named(found, "Service", "prod-kvemb-shard")
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "kvemb"  # as the rules call the job
    assert {port["name"] for port in service["spec"]["ports"]} >= {one["port"] for one in monitor["spec"]["endpoints"]}


@pytest.mark.parametrize(
    ("example", "values", "says"),
    [
        ("", [], "tls.shardSecret: missing"),
        ("", ["shards.insecure=true"], "storage.tls.secret: missing"),
        ("memcached", ["storage.kind=redis-cluster"], "puts no Redis Cluster together"),
        ("memcached", ["storage.kind=valkey"], "do not run without a password"),
        ("memcached", ["storage.password.secret=s"], "memcached nodes take no passwords"),
        ("memcached", ["storage.tls.secret=s"], "storage.tls.nodesSecret: missing"),
        ("memcached", ["tls.tokenSecret=s"], "goes over TLS only"),
        ("memcached", ["tls.shardSecret=s"], "tls.trainerSecret: missing"),
        ("existing-redis", ["tls.adminSecret=s"], "or the token"),
        ("large", ["tls.adminSecret="], "tls.adminSecret: missing"),
        ("memcached", ["backup.url=/checkpoints/a"], "checkpoints.claim: missing"),
        ("memcached", ["backup.url=s3://bucket/a"], "networkPolicy.egress: missing"),
        ("existing-redis", ["networkPolicy.egress=[]"], "networkPolicy.egress: missing"),
        ("memcached", ["image.digest=latest"], "/image/digest"),
        ("memcached", ["shards.podDisruptionBudget.maxUnavailable=-1"], "/shards/podDisruptionBudget/maxUnavailable"),
        ("memcached", ["shards.probes.liveness.period=5"], "'period'"),
        ("memcached", ["shards.replicas=0"], "/shards/replicas"),
        ("memcached", ["shards.replica=3"], "additional properties 'replica' not allowed"),
        ("memcached", ["shards.options.cache_gb=3"], "cache_gb"),
        ("memcached", ["storage.kind=mysql"], "/storage/kind"),
        ("memcached", ['storage.nodes=["a"]'], "/storage/nodes/0"),
    ],
)
def test_values_that_do_not_go_together_are_refused_before_anything_is_installed(example: str, values: list[str], says: str) -> None:
    done = template(example, *values)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize(
    ("section", "of", "given"),  # what the chart says itself
    [
        ("storage", "storage", {"kind", "nodes", "username_env", "password_env", "tls", "insecure"}),
        ("parameter_servers", "shards", {"shards", "data_dir", "metrics_port", "tls", "insecure"}),
    ],
)
def test_the_options_that_may_be_given_are_those_of_kvemb(section: str, of: str, given: set[str]) -> None:
    tree = {"cluster": "c", "storage": {"kind": "memcached", "nodes": ["a:1"]}, "parameter_servers": {"shards": ["b:1"]}}
    with pytest.raises(ConfigError, match="known here: ") as caught:
        config.parse({**tree, section: {**tree[section], "no-such-key": 1}}, {})  # type: ignore[dict-item]
    known = set(str(caught.value).split("known here: ")[1].split(", "))
    options = json.loads((CHART / "values.schema.json").read_text())["properties"][of]["properties"]["options"]
    assert set(options["propertyNames"]["enum"]) == known - given


def test_the_script_for_a_real_cluster_is_valid_and_names_what_the_chart_makes() -> None:
    script = ROOT / "deploy/helm/try-kind.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=200)
    made = {one["metadata"]["name"] for one in resources("memcached", "toolbox.enabled=true", release="kvemb")}
    for name in ("kvemb-shard", "kvemb-memcached", "kvemb-toolbox", "kvemb-demo"):
        assert name in made
        assert name in script.read_text()


def test_rollout_status_is_asked_only_of_what_rolls_out() -> None:
    """kubectl refuses it for OnDelete."""
    asked = set()
    for path in ("deploy/helm/try-kind.sh", "docs/kubernetes.md", "deploy/helm/kvemb/templates/NOTES.txt"):
        asked |= set(re.findall(r"rollout status (?:statefulset|deploy\w*)/(kvemb-[a-z]+)", (ROOT / path).read_text()))
    assert {"kvemb-shard", "kvemb-toolbox"} <= asked
    found = resources("memcached", "toolbox.enabled=true", release="kvemb")
    of = {one["metadata"]["name"]: one["spec"].get("updateStrategy", {}) for one in of_kind(found, "StatefulSet", "Deployment")}
    assert of["kvemb-memcached"] == {"type": "OnDelete"}
    assert [name for name in asked if of[name]] == []


def test_commands_in_the_toolbox_are_about_the_release_that_is_there() -> None:
    """A mounted ConfigMap follows after a minute or so, and a new pod has it at once."""
    before, again, after = (
        pods(resources("memcached", "toolbox.enabled=true", *more))["toolbox"] for more in ((), (), ("shards.replicas=4",))
    )
    assert before == again
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]


def test_a_pull_waits_longer_than_resolvers_keep_a_pods_old_address() -> None:
    assert loaded("memcached").node_waits[0] >= 4 * 30  # CoreDNS keeps it for 30 s; then rows are restored
    assert loaded("memcached", 'storage.options={"timeout_s":7}').storage.timeout_s == 7
