"""JSON log lines of a trainer, as a program would set them up, and those of shards: the same keys."""

import io
import json
import logging
from dataclasses import replace

import pytest

import kvemb
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import DRAINING, SHARDS, MovePlan
from paramserver.__main__ import LogLines


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO, formatter: logging.Formatter, *filters: logging.Filter) -> list[dict[str, object]]:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    for one in filters:
        handler.addFilter(one)
    log = logging.getLogger("kvemb.of_this_test")
    log.propagate = False
    log.addHandler(handler)
    try:
        log.warning("node %s is back", "n:1")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("an error")
    finally:
        log.removeHandler(handler)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_trainers_line_is_an_object_with_its_names(stream: io.StringIO) -> None:
    said, failed = lines(stream, kvemb.json_log_formatter(cluster="ads", trainer="rank-0"))
    assert said.keys() == {"time", "level", "thread", "message", "cluster", "trainer"}
    assert (said["level"], said["cluster"], said["trainer"], said["message"]) == ("WARNING", "ads", "rank-0", "node n:1 is back")
    assert "ValueError: broken" in str(failed["exc_info"])


def test_names_that_are_not_given_are_left_out(stream: io.StringIO) -> None:
    assert lines(stream, kvemb.json_log_formatter())[0].keys() == {"time", "level", "thread", "message"}


def test_a_shards_line_has_the_same_keys_beside_its_own(stream: io.StringIO) -> None:
    of_shard = LogLines(0, json=True, level="info")
    said, _ = lines(stream, of_shard._formatter(), of_shard)
    assert said.keys() == {"time", "level", "thread", "message", "cluster", "shard", "epoch", "map_version", "plan"}


def test_a_shards_line_says_its_epoch_and_its_plan_as_they_are_then(stream: io.StringIO) -> None:
    of_shard, now = LogLines(0, json=True, level="info"), ClusterMap.first(2, 2)
    epochs = iter((3, 4))
    planned = replace(now, version=9, plan=MovePlan(SHARDS, DRAINING, now.slot_shards))
    maps = iter((now, planned))
    of_shard.claimed(lambda: next(epochs), lambda: next(maps))
    before, during = lines(stream, of_shard._formatter(), of_shard)
    assert (before["epoch"], before["map_version"], before["plan"]) == (3, now.version, None)
    assert (during["epoch"], during["map_version"], during["plan"]) == (4, 9, "shards draining")
