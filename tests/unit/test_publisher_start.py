"""What a publisher waits for before it has begun, how long, and what it does not wait for."""

import time

import pytest

from kvemb.api import Cluster
from kvemb.errors import KvembError, NodeLostError, NodeRefusesError, NodeUnavailableError, ShardUnavailableError
from kvemb.projection.projected_rows import ALL_SLOTS
from kvemb.projection.projection_target import ProjectionTarget, TargetUrl
from kvemb.projection.publisher import Projection, Publisher

PATIENCE_S = 0.5


def tries_until_it_gives_up(error: KvembError, caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """Start a publisher whose cluster cannot be reached; how often it has tried, and how often it has said that it waits."""
    target, n_tries = ProjectionTarget("127.0.0.1:1", TargetUrl.parse("redis://127.0.0.1:1").access({}, "", None), ALL_SLOTS), 0

    def connect() -> Cluster:
        nonlocal n_tries
        n_tries += 1
        raise error

    publisher = Publisher(Projection(("user",)), target, connect, patience_s=PATIENCE_S, report=lambda line: None)
    begun_s = time.monotonic()
    with pytest.raises(type(error)):
        publisher.run()
    assert n_tries == 1 or time.monotonic() - begun_s > PATIENCE_S
    return n_tries, sum("the publisher waits: " in line for line in caplog.messages)


@pytest.mark.parametrize("kind", [NodeUnavailableError, ShardUnavailableError])
def test_what_is_away_is_waited_for_with_one_message_and_not_for_ever(kind: type[KvembError], caplog: pytest.LogCaptureFixture) -> None:
    n_tries, n_said = tries_until_it_gives_up(kind("it is away"), caplog)
    assert n_tries > 1
    assert n_said == 1


@pytest.mark.parametrize("kind", [NodeRefusesError, NodeLostError])
def test_what_cannot_be_used_as_it_is_ends_the_publisher_at_once(kind: type[KvembError], caplog: pytest.LogCaptureFixture) -> None:
    assert tries_until_it_gives_up(kind("it is there, and will not do"), caplog) == (1, 0)
