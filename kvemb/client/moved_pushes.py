"""Pushes that came to shards by an older cluster map, put together again to be routed by the one in force. Pure.

What was refused of one push is one push again, under its step: rows of its tables side by side, whichever shards had refused them. What
must not live here: who sends it (`kvemb.client.push_session`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvemb.client.ack import Ack, PartAck
from kvemb.client.outbox import Sent
from kvemb.datapath.prefetched_rows import PrefetchedRows
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import PushPart


@dataclass(frozen=True, eq=False)
class MovedPush:
    """What shards refused of one push.

    Args:
        ack: the push's.
        step: its number.
        serial: of the newest map that it was routed by.
        shards: which have refused it.
        parts: of the ack: new ones are to take their place.
        tables: rows of each table, ids ascending.
        prefetched: rows that the trainer holds, one entry per table.
    """

    ack: Ack
    step: int
    serial: int
    shards: frozenset[int]
    parts: tuple[PartAck, ...]
    tables: tuple[TableRows, ...]
    prefetched: tuple[PrefetchedRows, ...]


def put_together(refused: Iterable[tuple[int, Sent]]) -> list[MovedPush]:
    """Return the pushes of these parts, of each the shard that has refused it first, in the order in which they were made."""
    by_ack: dict[int, list[tuple[int, Sent]]] = {}
    for shard, sent in refused:
        by_ack.setdefault(id(sent.ack), []).append((shard, sent))
    return sorted((_push(parts) for parts in by_ack.values()), key=lambda push: push.step)


def _push(parts_of: Sequence[tuple[int, Sent]]) -> MovedPush:
    shards, refused = frozenset(shard for shard, _ in parts_of), [sent for _, sent in parts_of]
    bodies = [PushPart.decode(sent.data) for sent in refused]
    tables: dict[str, list[TableRows]] = {}
    prefetched: dict[str, list[PrefetchedRows]] = {}
    for sent, body in zip(refused, bodies, strict=True):
        for rows in body.tables:
            tables.setdefault(rows.table, []).append(replace(rows, placement=sent.placements[rows.table]))
        for held in sent.part.prefetched:
            prefetched.setdefault(held.definition.key, []).append(held)
    parts = tuple(sent.part for sent in refused)
    joined = tuple(_joined(rows) for rows in tables.values()), tuple(_held(rows) for rows in prefetched.values())
    return MovedPush(refused[0].ack, bodies[0].step, max(body.map_serial for body in bodies), shards, parts, *joined)


def _joined(pieces: Sequence[TableRows]) -> TableRows:
    some = [rows for rows in pieces if len(rows.ids)] or pieces[:1]
    ids = np.concatenate([rows.ids for rows in some])
    rows, versions = np.concatenate([rows.rows for rows in some]), np.concatenate([rows.versions for rows in some])
    return replace(some[0], ids=ids, rows=rows, versions=versions).take(np.argsort(ids, kind="stable"))


def _held(pieces: Sequence[PrefetchedRows]) -> PrefetchedRows:
    ids, versions = (np.concatenate([getattr(rows, name) for rows in pieces]) for name in ("ids", "versions"))
    return replace(pieces[0], ids=ids, versions=versions)
