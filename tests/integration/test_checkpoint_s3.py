"""Checkpoints on an S3 server: moto's, in a process of its own on loopback. Skipped where moto or s3fs is not installed."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import BaseCheckpoint, part_path
from kvemb.checkpoint.listing import list_checkpoints, prune
from kvemb.checkpoint.verify import verify
from kvemb.errors import CheckpointError
from kvemb.local_cluster.processes import free_ports
from tests.unit.checkpoint_files import USER, save


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The URL of a running S3 server."""
    port = free_ports(1)[0]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if "Running on" in line:
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket's URL; where it is, and the credentials, are in the environment, as in production."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("kvemb-test", exist_ok=True)
    return "s3://kvemb-test/run"


def test_a_chain_is_saved_listed_verified_read_and_pruned_on_s3(bucket: str) -> None:
    first = save(bucket + "/a", range(5000), k=1, part_bytes=30_000, step_rows=500)
    save(bucket + "/b", range(100, 200), k=2, base=BaseCheckpoint("a", first.save_id), erased=[7])
    assert [one.name for one in list_checkpoints(bucket)] == ["a", "b"]
    assert verify(bucket + "/b").require_good().n_checkpoints == 2
    chain = open_chain(bucket + "/b")
    ids = np.concatenate([block.ids for shard in range(2) for block in chain.rows(USER, shard)])
    assert sorted(ids.tolist()) == [i for i in range(5000) if i != 7]
    save(bucket + "/c", range(10), k=3)
    assert prune(bucket, keep=1) == ["b", "a"]
    assert [one.name for one in list_checkpoints(bucket)] == ["c"]
    assert CheckpointStorage(bucket + "/a").names() == []


class Gate(ThreadingHTTPServer):
    """Before an S3 server: takes requests of one access key only, as a store does whose keys are rotated."""

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        self.key, self.refusals, self._behind = "", 0, endpoint.removeprefix("http://")
        super().__init__(("127.0.0.1", 0), self._handler())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # which says "100 Continue" to those who wait for it

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.close_connection = True
                if f"Credential={gate.key}/" not in self.headers.get("Authorization", ""):
                    gate.refusals += 1
                    self.send_response(400)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                behind = HTTPConnection(gate._behind)
                behind.request(self.command, self.path, body, dict(self.headers))
                answer = behind.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date", "content-length"):
                        self.send_header(name, value)
                self.send_header("Content-Length", answer.getheader("Content-Length", str(len(data))))
                self.end_headers()
                self.wfile.write(data)

        return Handler


def test_a_process_that_goes_on_finds_credentials_that_were_replaced(
    bucket: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"

    def rotate(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")

    with Gate(endpoint) as gate:
        thread = threading.Thread(target=gate.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.server_port}")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            rotate("first")
            gate.key = "first"
            type(CheckpointStorage(bucket)._fs).clear_instance_cache()  # the one that the fixture made goes past the gate
            storage = CheckpointStorage(bucket + "/rotated", pause=lambda _: None)
            storage.write("a", b"1")
            rotate("second")
            gate.key = "second"
            storage.write("b", b"2")  # one that was open before
            assert gate.refusals
            n_refusals = gate.refusals
            assert CheckpointStorage(bucket + "/rotated").names() == ["a", "b"]  # and one that is opened behind
            assert gate.refusals == n_refusals
            gate.key = "third"
            with pytest.raises(CheckpointError, match=r"(?s)rotated/c: cannot write it: .*credentials that have expired or were replaced"):
                storage.write("c", b"3")
        finally:
            gate.shutdown()
            thread.join()


def test_what_is_missing_or_damaged_on_s3_is_named(bucket: str) -> None:
    save(bucket + "/d", range(100), k=1)
    storage = CheckpointStorage(bucket + "/d")
    data = bytearray(storage.read(part_path("user", 0, 0), 1 << 20))
    data[100] ^= 4
    storage.write(part_path("user", 0, 0), bytes(data))
    storage.delete(part_path("user", 1, 0))
    assert [fault.partition(": ")[2][:9] for fault in verify(bucket + "/d").faults] == ["damaged, ", "not there"]
    with pytest.raises(CheckpointError, match="no-such-bucket"):
        CheckpointStorage("s3://no-such-bucket/x", pause=lambda _: None).write("y", b"z")
