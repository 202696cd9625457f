"""What several unit tests share: two scripted shards and a client of theirs, and data folders that are closed in the end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paramserver.shard_process.data_dir import DataDir
from tests.unit.fake_shard import Connections, FakeShard


@pytest.fixture
def shards() -> list[FakeShard]:
    return [FakeShard(), FakeShard()]


@pytest.fixture
def connect(shards: list[FakeShard]) -> Iterator[Connections]:
    connections = Connections(shards)
    yield connections
    connections.close()


@pytest.fixture
def folder() -> Iterator[Callable[[Path, int], DataDir]]:
    """Opens data folders and closes them after the test."""
    opened: list[DataDir] = []

    def open_folder(root: Path, shard: int) -> DataDir:
        opened.append(DataDir(root, shard))
        return opened[-1]

    yield open_folder
    for data in opened:
        data.close()
