"""Asking the shards to save, without shards."""

from pathlib import Path

import pytest

from kvemb.checkpoint.save import Saving, save
from kvemb.errors import ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import SaveRequest


class NoShard:
    """One shard, which does not answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, float]] = []

    def __len__(self) -> int:
        return 1

    def call_each(self, method: str, requests: list[SaveRequest], reply_type: object, deadline: Deadline) -> None:
        self.asked.append((method, requests[0].timeout_s, deadline.timeout_s))
        raise ShardUnavailableError("shard 0: no answer")


def test_shards_and_caller_have_the_same_time_for_the_cut(tmp_path: Path) -> None:
    shards = NoShard()
    saving = Saving(shards, "demo", "00" * 16)  # type: ignore[arg-type]
    with pytest.raises(ShardUnavailableError):
        save(saving, str(tmp_path / "a"), base=None, weights_only=False, extra=None, resume=False, timeout_s=7.0)
    assert shards.asked == [("Save", 7.0, 7.0)]
