"""Golden vectors of docs/storage-format.md, made by kvemb's own code. As a program it writes golden.json beside this file.

All bytes are hex, and numbers of 64 bits are decimal text. A test holds the file equal to what this program makes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import kvemb.init
import kvemb.optim
from kvemb.arrays.hashing import digest64, mix64
from kvemb.arrays.rounding import round_nearest
from kvemb.coordination.markers import Marker
from kvemb.coordination.registry_format import Dropped, encode_registry
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import FLIPPED, NODES, MovePlan
from kvemb.schema.record import make_version
from kvemb.schema.slots import slot_tags
from kvemb.schema.table_def import TableDef

FILE = Path(__file__).with_name("golden.json")
IDS = np.array([0, 1, 2, 12345, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)

TABLES = (
    TableDef("user", 4, kvemb.optim.sgd(0.1), kvemb.init.uniform()),
    TableDef(
        "ünit/of 16 bits", 6, kvemb.optim.adam(amsgrad=True), kvemb.init.uniform(-1.0, 3.0),
        dtype="float16", id_dtype="uint64", seed=2**62,
    ),
    TableDef(
        "compact", 3,
        kvemb.optim.chain(kvemb.optim.l2(0.1), kvemb.optim.clip_by_norm(1.0), kvemb.optim.rmsprop(momentum=0.9, centered=True)),
        kvemb.init.xavier_uniform(), dtype="bfloat16", reduce="mean", n_buckets=1 << 20, layout="compact", life=1, tag_attempt=1,
    ),
    TableDef("one bucket", 2, kvemb.optim.sgd(momentum=0.5, nesterov=True), kvemb.init.constant(0.5), n_buckets=1),
    TableDef("before 0.1", 2, kvemb.optim.ftrl(), kvemb.init.normal(), init_algorithm=1),
    TableDef(
        "columns", 8, kvemb.optim.rowwise_adagrad(),
        kvemb.init.columns((3, kvemb.init.zeros()), (5, kvemb.init.truncated_normal(std=0.1))),
    ),
    TableDef("dense", 4, kvemb.optim.adagrad(), kvemb.init.uniform(), num_ids=1000),
)  # fmt: skip


def table_vectors(definition: TableDef) -> dict[str, Any]:
    ids = IDS[np.uint64(definition.num_ids) > IDS] if definition.num_ids else IDS
    rows, made = definition.initial_rows(ids), definition.record
    state = np.zeros((len(ids), made.state_size), np.float32)
    records = made.encode(ids, make_version(1, 2), round_nearest(rows, definition.dtype), state)
    keys, single = definition.keys(ids, pages=True), RowKeys(definition.tag, ids).encode()
    encoded, slots = keys.encode(), definition.placement.slots(ids)
    vectors = [
        {
            "id": str(definition.shown_id(int(ids[i]))),
            "slot": int(slots[i]),
            "key": bytes(encoded[i]).decode(),
            "memcached_key": bytes(single[i]).decode(),
            "initial_float32": rows[i].astype("<f4").tobytes().hex(),
            "record": records[i].tobytes().hex(),
        }
        for i in range(len(ids))
    ]
    if definition.pages is None:
        for i, vector in enumerate(vectors):
            vector |= {"bucket": int(keys.buckets[i]), "field": bytes(keys.fields()[i]).hex()}
    return {
        "definition": msgpack.packb(definition.to_dict()).hex(),
        "schema": definition.schema,
        "tag": definition.tag.decode(),
        "record_bytes": made.size_bytes,
        "rows_per_page": None if definition.pages is None else definition.pages.rows_per_page,
        "rows": vectors,
    }


def map_vectors(cluster_map: ClusterMap) -> dict[str, Any]:
    former = cluster_map.former
    return {
        "bytes": cluster_map.encode().hex(),
        "version": cluster_map.version,
        "serial": cluster_map.serial,
        "digest": str(cluster_map.digest),
        "nodes_of_slots_0_8191_8192_16383": cluster_map.slot_nodes[[0, 8191, 8192, 16383]].tolist(),
        "former_serial_and_digest": None if former is None else [former.serial, str(former.digest)],
    }


def vectors() -> dict[str, Any]:
    """Return everything that golden.json holds."""
    first = ClusterMap.first(2, 2, ("10.0.0.1:6379", "10.0.0.2:6379"))
    later = replace(first, serial=2, version=4, slot_nodes=1 - first.slot_nodes, n_node_moves=1)
    moving = replace(later, plan=MovePlan(NODES, FLIPPED, first.slot_nodes))
    marker = Marker(bytes(range(16)), 1, bytes(8), first.digest, first.serial, "a" * 40)
    some = slot_tags()
    return {
        "mix64": {str(word): str(int(mix64(np.array([word], np.uint64))[0])) for word in IDS.tolist()},
        "digest64": [
            [list(parts), str(digest64(*parts))] for parts in (("user", 7), ("id check", "ünit"), ("n", 0), ("n", 128), ("n", 2**62))
        ],
        "slot_tags": {str(slot): some[slot].decode() for slot in (0, 1, 8192, 16383)},
        "tables": {definition.name: table_vectors(definition) for definition in TABLES},
        "maps": [map_vectors(one) for one in (first, moving)],
        "marker": {"whole": marker.encode().hex(), "repaired": replace(marker, repair="0" * 16).encode().hex()},
        "registry": encode_registry(3, TABLES[:1], [Dropped(TABLES[3], True)]).hex(),
    }


def text() -> str:
    """Return golden.json as it is to be."""
    return json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
