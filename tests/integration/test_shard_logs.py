"""What a shard's process logs, in JSON: every line an object that says whose it is; no secret in any."""

import json
import signal

import pytest
import redis
from shard_processes import Cluster, Process, Server, cluster, server

__all__ = ["cluster", "server"]


def objects(process: Process) -> list[dict[str, object]]:
    return [json.loads(line) for line in process.text().splitlines()]


def test_every_line_names_cluster_shard_and_epoch(cluster: Cluster) -> None:
    for epoch in (1, 2):
        shard = cluster.start(0, "--log-format", "json")
        shard.hello("anna")
        shard.process.child.send_signal(signal.SIGTERM)
        assert shard.process.wait() == 0
        lines = objects(shard.process)
        assert {"time", "level", "cluster", "shard", "epoch", "message", "thread"} <= lines[0].keys()
        assert {(line["cluster"], line["shard"], line["level"]) for line in lines} == {("test", 0, "INFO")}
        served = [number for number, line in enumerate(lines) if str(line["message"]).startswith("serving on")]
        assert len(served) == 1
        assert {(line["epoch"], line["plan"]) for line in lines[served[0] :]} == {(epoch, None)}
        assert any("trainer anna joined" in str(line["message"]) for line in lines)


def test_the_reason_of_an_end_is_a_line_of_the_log_too_and_what_matters_less_is_left_out(cluster: Cluster) -> None:
    first = cluster.start()
    code, text = cluster.refused(0, "--log-format", "json", "--log-level", "error")
    (line,) = map(json.loads, text.splitlines())
    assert code == 3
    assert (line["level"], line["cluster"]) == ("ERROR", "test")
    assert "another process runs shard 0" in line["message"]
    assert "serving on" in first.process.text()


def test_a_password_is_in_no_line(cluster: Cluster, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis.Redis(port=server.port) as node:
        node.config_set("requirepass", "correct horse")
    monkeypatch.setenv("KVEMB_TEST_PASSWORD", "correct horse")
    path = cluster.folder / "kvemb.yaml"
    path.write_text(path.read_text().replace("timeout_s:", "password_env: KVEMB_TEST_PASSWORD, timeout_s:"))
    shard = cluster.start(0, "--log-format", "json", "--log-level", "debug")
    server.process.end()
    shard.process.child.send_signal(signal.SIGTERM)
    assert shard.process.wait() == 0
    assert "correct horse" not in shard.process.text()
