"""PyKEEN beside kvemb: it resets weights and makes its optimizer inside of train(), so distribute comes with the first batch."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")
pytest.importorskip("pykeen.pipeline")

import torch
from beside_torch import sgd
from pykeen.models import TransE
from pykeen.pipeline import pipeline
from pykeen.training import SLCWATrainingLoop, TrainingCallback
from pykeen.triples import TriplesFactory

import kvemb
from kvemb.torch import RowCheckpoints, distribute

N_ENTITIES, N_RELATIONS = 120, 12


def triples() -> TriplesFactory:
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, n, 600) for n in (N_ENTITIES, N_RELATIONS, N_ENTITIES)]
    names = {"entity_to_id": {f"e{i}": i for i in range(N_ENTITIES)}, "relation_to_id": {f"r{i}": i for i in range(N_RELATIONS)}}
    return TriplesFactory(mapped_triples=torch.from_numpy(np.stack(columns, axis=1)), **names)


class ToCluster(TrainingCallback):
    """What docs/your-library.md says."""

    def __init__(self, cluster: kvemb.Cluster, name: str, url: str) -> None:
        super().__init__()
        self.cluster, self.name, self.url, self.rows = cluster, name, url, None

    def pre_batch(self, **_: Any) -> None:
        if self.rows is None:
            names = lambda path: f"{self.name}.{path}"  # noqa: E731
            distribute(self.model, self.cluster, optimizer=self.optimizer, min_rows=10, names=names, quiet=True)
            self.rows = RowCheckpoints(self.model, self.url, keep=1)

    def post_epoch(self, **_: Any) -> None:
        self.rows.save()


def run(model: str, callback: TrainingCallback | None, **options: Any) -> tuple[list[float], float]:
    training, testing = triples().split([0.8, 0.2], random_state=0)
    quiet = {"use_tqdm": False}
    result = pipeline(
        training=training,
        testing=testing,
        model=model,
        model_kwargs={"embedding_dim": 8, **options},
        optimizer="SGD",
        optimizer_kwargs={"lr": 0.1},
        training_kwargs={"num_epochs": 3, "use_tqdm_batch": False, **quiet, **({"callbacks": callback} if callback else {})},
        evaluation_kwargs=quiet,
        random_seed=3,
        device="cpu",
    )
    return result.losses, result.get_metric("mrr")


@pytest.mark.parametrize(("model", "options"), [("TransE", {"entity_constrainer": None}), ("ComplEx", {})])
def test_a_pipeline_has_the_losses_and_the_metric_of_torch(
    model: str, options: dict[str, Any], in_step: kvemb.Cluster, name: str, tmp_path: Any
) -> None:
    expected, metric = run(model, None, **options)
    losses, ours = run(model, ToCluster(in_step, name, str(tmp_path)), **options)
    assert len(set(expected)) > 1, "it learns nothing"
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert ours == pytest.approx(metric, rel=1e-3)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_constraint_of_all_rows_after_each_step_is_refused(in_step: kvemb.Cluster, name: str, tmp_path: Any) -> None:
    with pytest.raises(kvemb.KvembError, match="read-only"):
        run("TransE", ToCluster(in_step, name, str(tmp_path)))


def test_who_distributes_before_train_is_told(in_step: kvemb.Cluster, name: str) -> None:
    training = triples()
    model = TransE(triples_factory=training, embedding_dim=8)
    optimizer = sgd(model)
    distribute(model, in_step, optimizer=optimizer, min_rows=10, names=lambda path: f"{name}.{path}", quiet=True)
    with pytest.raises(kvemb.KvembError, match="read-only"):  # it would draw the weights again
        SLCWATrainingLoop(model=model, triples_factory=training, optimizer=optimizer).train(training, num_epochs=1, use_tqdm=False)
