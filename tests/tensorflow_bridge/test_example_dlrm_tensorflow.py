"""The DLRM program in TensorFlow: from the same first weights, on the same batches, it learns what torch's own modules learn."""

import re
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("torch.nn")

import dlrm_tensorflow
import dlrm_torch
import tensorflow as tf
import torch
from dlrm.data import Lines
from dlrm.local_bags import LocalBags
from dlrm.model import DLRM
from dlrm.planted_clicks import KEYS, planted_clicks
from memory_cluster import MemoryCluster, MemoryTable

import kvemb
import kvemb.tensorflow as kt
from kvemb.schema.table_def import TableDef
from kvemb.torch import EmbeddingBagConfig

N_LINES, CUT, N_IDS, DIM, BATCH, RATE = 6000, 5000, 2000, 4, 250, 0.02
FIGURES = re.compile(r"^epoch 1: train logloss ([\d.]+), valid logloss ([\d.]+), AUC ([\d.]+)$", re.MULTILINE)


def on_torchs_own_rows(tables: dict[str, MemoryTable]) -> tuple[DLRM, list[torch.optim.Optimizer]]:
    """A model on the first rows that the tables have, and its optimizers."""
    bags = LocalBags([EmbeddingBagConfig(name=key, embedding_dim=DIM, num_embeddings=N_IDS) for key in KEYS])
    model = DLRM(bags, n_features=len(KEYS), dim=DIM)
    with torch.no_grad():
        for key, bag in zip(KEYS, bags.bags, strict=True):
            bag.weight.copy_(torch.from_numpy(tables[key].pull(np.arange(N_IDS))))
    return model, [torch.optim.Adagrad(of, lr=RATE) for of in (bags.parameters(), model.dense_parameters())]


def with_weights_of(other: DLRM, tables: dict[str, MemoryTable]) -> dlrm_tensorflow.DLRM:
    model = dlrm_tensorflow.DLRM(tables, DIM)
    for weight, first in zip([*model.bottom, *model.top], other.dense_parameters(), strict=True):
        weight.assign(first.detach().numpy().T)
    return model


@pytest.mark.timeout(300)
def test_it_gets_the_losses_and_the_auc_of_torchs_own_modules() -> None:
    torch.manual_seed(0)
    rule, first = kvemb.optim.adagrad(lr=RATE), kvemb.init.uniform(-(N_IDS**-0.5), N_IDS**-0.5)
    cluster = MemoryCluster("sync")
    tables = {key: MemoryTable(cluster, TableDef(key, DIM, rule, first, num_ids=N_IDS)) for key in KEYS}
    cluster.tables.update(tables)
    plain, optimizers = on_torchs_own_rows(tables)
    model = with_weights_of(plain, tables)
    clicks = planted_clicks(N_LINES, N_IDS, seed=0)
    log, valid = Lines(*clicks).split(N_LINES - CUT)
    starts = range(0, CUT, BATCH)

    step = dlrm_tensorflow.stepped(model, kt.RowsOptimizer(list(tables.values())), RATE)
    batches = kt.prepare(step, [tuple(tf.constant(of[at : at + BATCH]) for of in clicks) for at in starts], consistency="exact")
    losses = [float(step(*batch)) for batch in batches]
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns until this is set
        of_torch = [dlrm_torch.train(plain, [log[list(range(at, at + BATCH))]], optimizers, None) for at in starts]
    assert "not foreseen" not in batches.report
    np.testing.assert_allclose(losses[:10], of_torch[:10], rtol=1e-3)  # later steps magnify what float32 rounded

    predict = kt.function(lambda numbers, ids: tf.sigmoid(model(numbers, ids)))
    told = dlrm_tensorflow.evaluated(predict, clicks, CUT, BATCH), dlrm_torch.evaluate(plain, valid, BATCH)
    auc, auc_of_torch = (float(one.rpartition(" ")[2]) for one in told)
    assert auc_of_torch > 0.55
    assert auc == pytest.approx(auc_of_torch, abs=0.01)


@pytest.mark.timeout(300)
def test_the_program_trains_and_tells_how_well(capsys: pytest.CaptureFixture[str], require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    small = ["--store", "redis", "--lines", "2000", "--ids", "2000", "--dim", "4", "--batch-size", "200"]
    assert dlrm_tensorflow.main(small) == 0
    told = capsys.readouterr().out
    assert len(FIGURES.findall(told)) == 1
    assert "not foreseen" not in told
    assert dlrm_tensorflow.main([*small, "--consistency", "exact"]) == 1
    assert "sync" in capsys.readouterr().err
