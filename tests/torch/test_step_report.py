"""Steps of the torch bridge report themselves: rows, waits, losses, staleness."""

import io
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster
from torch import nn

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.local_cluster import LocalCluster
from tests.warm_clusters import warm
from trainer import StepReport, prefetch
from trainer.report.step_report import current_report
from trainer.torch import Embedding, SparseOptimizer, prepare

IDS = torch.arange(40).reshape(4, 10)


class Scalars:
    def __init__(self) -> None:
        self.kept: dict[str, list[float]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.kept.setdefault(tag, []).append(scalar_value)


@pytest.fixture
def sync() -> Iterator[LocalCluster]:
    with warm("valkey", mode="sync", trainers=1) as local:
        yield local


def test_a_training_loop_is_reported_without_a_change(sync: LocalCluster) -> None:
    writer, stream = Scalars(), io.StringIO()
    with kvemb.connect(sync.url, trainer="a") as cluster:
        table = cluster.create_table("user", dim=4, optimizer=kvemb.optim.sgd())
        model = nn.Sequential(Embedding(table), nn.Linear(4, 1))
        sparse, dense = SparseOptimizer(model), torch.optim.SGD(model[1].parameters(), lr=0.1)
        with StepReport(writer=writer, every=2, stream=stream) as report:
            for ids in IDS:
                loss = model(ids).square().mean()
                report.loss(loss)
                loss.backward()
                sparse.step()
                dense.step()
                dense.zero_grad()
        total = report.total
    assert (total.n_steps, total.rows_looked_up, total.rows_ahead, total.rows_pushed) == (4, 40, 0, 40)
    assert min(total.lookup_s, total.push_s, total.release_s, total.compute_s) > 0
    assert total.lookup_s + total.push_s + total.window_s + total.release_s + total.compute_s == pytest.approx(total.total_s)
    assert report.mean_staleness.n == 4
    assert writer.kept["kvemb/loss"][-1] == pytest.approx(float(loss.detach()))
    assert writer.kept["kvemb/staleness"] == [0.0, 0.0]
    assert {tag: len(values) for tag, values in writer.kept.items()} == dict.fromkeys(writer.kept, 2)
    assert stream.getvalue().startswith("4 steps of ")


def test_a_step_counts_once_whether_it_pushes_or_not() -> None:
    cluster = MemoryCluster()
    model = Embedding(cluster.table("user", 4))
    optimizer = SparseOptimizer(model)
    with StepReport(stream=io.StringIO()) as report:
        for ids in IDS[:2]:  # accumulated: one step of two lookups
            model(ids).sum().backward()
        optimizer.step()
        assert (report.last.n_steps, report.last.rows_looked_up) == (1, 20)
        optimizer.step()  # async mode: without gradients nothing is pushed
        assert (report.total.n_steps, report.mean_staleness.n) == (2, 1)
        optimizer.step(lambda: model(IDS[3]).sum())
        assert report.total.n_steps == 3
    assert current_report() is None
    optimizer.step()
    assert report.total.n_steps == 3


def test_waits_of_a_prefetching_loop_are_reported() -> None:
    cluster = MemoryCluster()
    table = cluster.table("user", 4)
    batches = [{"user": ids.numpy()} for ids in IDS]
    with StepReport(stream=io.StringIO()) as report:
        for _, pulled in prefetch(batches, need=lambda batch: batch, pull=cluster.pull_versions, threads_num=1, capacity=1):
            assert pulled["user"][0].shape == (10, 4)
            report.step()
    assert (report.total.n_steps, table.n_pulls) == (4, 4)
    assert min(report.total.ahead_s, report.total.loader_s) > 0
    assert report.total.lookup_s == 0


def test_reading_the_batch_that_is_watched_and_batches_that_are_skipped_counts_as_the_loaders_time() -> None:
    model = Embedding(MemoryCluster().table("user", 4))
    optimizer, report = SparseOptimizer(model), StepReport(stream=io.StringIO())

    def slowly() -> Iterator[torch.Tensor]:
        for ids in [*IDS, *IDS[:1]]:
            time.sleep(0.1)
            yield ids

    for i, ids in enumerate(prepare(model, slowly(), report=report, threads_num=1, capacity=1)):
        if i >= 4:
            model(ids).sum().backward()
            optimizer.step()
    assert report.total.n_steps == 1
    assert report.total.loader_s >= 0.5, "all five of them, one by one"


@pytest.mark.parametrize("own", [False, True])
def test_an_evaluation_inside_of_a_reported_loop_does_not_end_its_report(own: bool) -> None:
    stream, model = io.StringIO(), Embedding(MemoryCluster().table("user", 4))
    optimizer, report = SparseOptimizer(model), StepReport(stream=stream)
    evaluated = prepare(model, list(IDS), report=StepReport(stream=stream) if own else report, threads_num=1, capacity=1)
    for i, ids in enumerate(prepare(model, list(IDS), report=report, threads_num=1, capacity=1)):
        model(ids).sum().backward()
        optimizer.step()
        if i == 1:
            with torch.no_grad():
                for other in evaluated:
                    model(other)
    assert report.total.n_steps == 4
    assert stream.getvalue().splitlines() == [report.summary()], "one line, at the end"
    assert current_report() is None


def test_a_prepared_loader_puts_its_report_in_force_while_it_is_iterated() -> None:
    stream, model = io.StringIO(), Embedding(MemoryCluster().table("user", 4))
    optimizer, report = SparseOptimizer(model), StepReport(stream=stream)
    loader = prepare(model, list(IDS), report=report, threads_num=1, capacity=1)
    for epoch in (1, 2):
        for ids in loader:
            assert current_report() is report
            model(ids).sum().backward()
            optimizer.step()
        assert current_report() is None
        assert report.total.n_steps == 4 * epoch
        assert stream.getvalue().splitlines()[epoch - 1 :] == [report.summary()]
    assert (report.total.rows_ahead, report.total.rows_looked_up) == (70, 10)  # all but the first batch, which is watched
    for _ in loader:
        break
    loader.close()  # the loop has left it already
    assert current_report() is None
    with pytest.raises(InvalidInputError, match="report is int"):
        prepare(model, list(IDS), report=3)  # type: ignore[arg-type]
