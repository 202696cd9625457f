"""Where nodes are, by the cluster map, by kvemb.yaml, and by the markers that are found at its addresses."""

from dataclasses import replace

from kvemb.schema.cluster_map import GONE, IN_FILE, ClusterMap, NodePlace
from kvemb.stores.standalone.nodes_view import places_of

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
