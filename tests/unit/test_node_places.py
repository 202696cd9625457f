"""Where nodes are, by the cluster map, by kvemb.yaml, and by the markers that are found at its addresses."""

from dataclasses import replace

import numpy as np
import pytest

from kvemb.config import StorageConfig
from kvemb.errors import InvalidInputError, NodeSuspectError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import GONE, IN_FILE, ClusterMap, NodePlace
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import ABORTING, NODES, MovePlan
from kvemb.stores.row_io import ReadPart
from kvemb.stores.standalone.mapped_nodes import SeenNodes
from kvemb.stores.standalone.nodes_view import NodesView, places_of
from kvemb.stores.standalone.redis_store import RedisStore

FIRST = ClusterMap.first(3, 1, ("a:1", "b:1", "c:1"))


def test_a_node_that_moved_and_lost_its_rows_is_where_the_file_says_it_at_its_place() -> None:
    assert places_of(FIRST, ["a:1", "new:1", "c:1"], {"a:1": 0, "new:1": None, "c:1": 2}) == ("a:1", "new:1", "c:1")
    assert places_of(FIRST, ["a:1", "new:1", "c:1"], {"c:1": 2}) == ("a:1", "new:1", "c:1")


def test_a_node_that_is_down_is_not_sought_at_whatever_address_a_file_in_another_order_has_at_its_place() -> None:
    places = (NodePlace("a:1", IN_FILE), NodePlace("", GONE), NodePlace("c:1", IN_FILE))  # b:1 has left
    after = replace(FIRST, places=places)
    assert places_of(after, ["b:1", "a:1", "c:1"], {"c:1": 2}) == ("a:1", "", "c:1")
    assert places_of(after, ["b:1", "c:1"], {"c:1": 2}) == ("a:1", "", "c:1")
    assert places_of(after, ["new:1", "c:1"], {"c:1": 2, "new:1": None}) == ("a:1", "", "c:1")


def test_a_repair_whose_rows_were_chosen_before_a_plan_went_on_is_tried_again_and_fails_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore(StorageConfig("redis", ("a:1",)), "shard:0")
    aborting = MovePlan(NODES, ABORTING, FIRST.slot_nodes, (), (), 0)
    monkeypatch.setattr(store.repair, "keys_of", lambda address, keys: np.zeros(len(keys), bool))
    part = ReadPart(RowKeys(b"tag", np.arange(3, dtype=np.uint64)), 16, 16)
    with pytest.raises(InvalidInputError):
        store.repair.read("a:1", "nonce", [part], Deadline.after(1))
    store._links.view = NodesView(replace(FIRST, plan=aborting), ("a:1", "b:1", "c:1"))
    with pytest.raises(NodeSuspectError):
        store.repair.read("a:1", "nonce", [part], Deadline.after(1))


def test_a_look_that_ends_after_a_node_has_joined_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore(StorageConfig("redis", ("a:1", "b:1", "c:1")), "shard:0")
    links = store.nodes._links
    links.view = NodesView(FIRST, ("a:1", "b:1", "c:1"))
    joined = replace(FIRST, version=FIRST.version + 1, places=(*FIRST.places, NodePlace("d:1", IN_FILE)))

    def overtaken(seen: SeenNodes, before: NodesView, known: ClusterMap, deadline: Deadline) -> tuple[ClusterMap, tuple[str, ...]]:
        links.view = NodesView(joined, ("a:1", "b:1", "c:1", "d:1"))
        return before.map, before.places

    monkeypatch.setattr(SeenNodes, "places", overtaken)
    assert store.nodes._refresh_map(Deadline.after(1)), "there is a newer map than the one that it began with"
    assert store.nodes.cluster_map is joined
    assert store.nodes.addresses == ("a:1", "b:1", "c:1", "d:1")
