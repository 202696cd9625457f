"""Rows drawn at random: ids from the shards, which know which exist, and their rows from storage."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.connection import Connection
from kvemb.errors import InvalidInputError
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import IdsReply
from kvemb.protocol.verb import EVERYBODY, Verb

MAX_SAMPLED_IDS = 1 << 18
"""Of one `SampleIdsRequest`."""


class SampleIdsRequest(Message):
    """Some ids of a table on this shard, at most `limit`, from anywhere: costs it no look at the others."""

    table: str
    limit: int


SAMPLE_IDS = Verb("SampleIds", SampleIdsRequest, IdsReply, EVERYBODY, repeatable=True)


def sample_ids(connection: Connection, table: str, n: int = MAX_SAMPLED_IDS, timeout_s: float | None = None) -> NDArray[np.uint64]:
    """Return the 64 bits of ids whose rows exist, at most n of each shard, shard by shard: uint64 [m]."""
    questions = connection.require_shards("sample").questions
    replies = questions.ask_each(SAMPLE_IDS, SampleIdsRequest(table, n), timeout_s).values()
    return np.concatenate([np.frombuffer(reply.ids, "<u8") for reply in replies]).astype(np.uint64, copy=False)


def sample(connection: Connection, name: str, n: int, timeout_s: float | None) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """See `Cluster.sample`."""
    if not 1 <= n <= MAX_SAMPLED_IDS:
        raise InvalidInputError(f"a sample of {n} rows: give 1 to {MAX_SAMPLED_IDS}")
    definition = connection.require_shards("sample").questions.get_table(name, timeout_s)
    ids = np.random.default_rng().permutation(sample_ids(connection, name, n, timeout_s))[:n]
    ((rows, versions),) = connection.pull_known([(definition, ids)], timeout_s)
    there = versions != 0  # a row that was erased meanwhile is left out
    return ids[there], rows[there]
