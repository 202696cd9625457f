"""The one copy of the cluster map in a Redis Cluster: the highest version counts, and a shard that knows it puts it back."""

from dataclasses import replace
from typing import cast

import pytest

from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.markers import Identity
from kvemb.coordination.replicated_values import ValueCell
from kvemb.errors import NodeLostError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.redis_cluster.cluster_primaries import ShardsMap
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.slot_map import ClusterTopology

FIRST = ClusterMap.first(0, 2)
SECOND, THIRD = (replace(FIRST, version=version) for version in (2, 3))


class Values:
    """The value that lies in the cluster."""

    def __init__(self, copy: bytes | None) -> None:
        self.copy, self.down = copy, False

    def look(self, name: str, deadline: Deadline) -> bytes | None:
        assert name == MAP_NAME
        if self.down:
            raise NodeUnavailableError("node a:1: is down")
        return self.copy

    one = look

    def swap(self, name: str, old: bytes | None, new: bytes, deadline: Deadline) -> bool:
        if self.copy != old:
            return False
        self.copy = new
        return True

    def cell(self, name: str, deadline: Deadline) -> ValueCell:
        return ValueCell("node a:1", name, lambda: self.look(name, deadline), lambda old, new: self.swap(name, old, new, deadline))


class Topology:
    def holder_of(self, name: str) -> str:
        return "node a:1"


def following(values: Values, known: ClusterMap | None = None) -> ShardsMap:
    made = ShardsMap(cast(ClusterValues, values), cast(ClusterTopology, Topology()))
    made.open(Identity(b"c" * 16, b"g" * 8, known), within())
    return made


def within() -> Deadline:
    return Deadline.after(60)


def test_a_newer_copy_is_followed_and_an_older_one_is_not() -> None:
    values = Values(SECOND.encode())
    followed = following(values)
    values.copy = THIRD.encode()
    assert followed.refresh(within())
    for copy in (SECOND.encode(), b"junk", None, THIRD.encode()):
        values.copy = copy
        assert not followed.refresh(within())
        assert followed.now.version == 3


@pytest.mark.parametrize("copy", [None, b"junk", FIRST.encode(), SECOND.encode()])
def test_a_copy_that_is_lost_damaged_or_older_is_put_right(copy: bytes | None) -> None:
    values = Values(copy)
    following(values, known=SECOND).keep(within())
    assert values.copy == SECOND.encode()


def test_a_newer_copy_is_left_alone() -> None:
    values = Values(SECOND.encode())
    followed = following(values)
    values.copy = THIRD.encode()
    assert followed.publish(SECOND, within()) == []
    assert values.copy == THIRD.encode()


def test_a_map_that_cannot_be_written_is_followed_all_the_same_and_said() -> None:
    values = Values(FIRST.encode())
    followed = following(values)
    values.down = True
    assert followed.publish(SECOND, within()) == ["node a:1: is down"]
    assert followed.now is SECOND


def test_without_a_copy_only_who_knows_the_map_can_open() -> None:
    with pytest.raises(NodeLostError, match="no cluster map"):
        following(Values(None))
    assert following(Values(None), known=SECOND).now is SECOND


def test_a_copy_that_is_put_right_is_said_to_have_been_missing_or_damaged(caplog: pytest.LogCaptureFixture) -> None:
    values = Values(None)
    values.cell(MAP_NAME, within()).mend(None, b"whole")
    values.cell(MAP_NAME, within()).mend(b"whole", b"whole again")
    assert [line.split(" was ")[1] for line in caplog.messages] == ["missing and has been put right", "damaged and has been put right"]
