"""Writes rows whose slots move to their other node (docs/adr/0081).

On storage with compare-and-swap a row is written under the token that is known of it there, or as a new row. Where nothing is known, and
after a conflict, it is looked at first. One that is newer there is left alone: the write to its first node will tell who has written it.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvemb.net.deadline import Deadline
from kvemb.schema.record import HEADER_SIZE, stored_versions
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.store import OtherNodes

from ..model.second_tokens import SecondTokens
from .storage_retry import MAX_CONFLICT_ROUNDS

Mask = NDArray[np.bool_]


class SecondWrite:
    """Writes to the other nodes of one version of the map.

    Args:
        second: those nodes.
        deadline: of one call that begins now.
        cas: whether writes are compare-and-swap.
    """

    def __init__(self, second: OtherNodes, deadline: Callable[[], Deadline], *, cas: bool) -> None:
        self._second, self._deadline, self._cas = second, deadline, cas

    def run(self, part: WritePart, known: SecondTokens | None) -> int:
        """Write those rows of a part that have another node; return how many of them changed between every look and write."""
        at = np.flatnonzero(self._second.has(part.keys))
        if not len(at):
            return 0
        here = taken(part, at)
        moving = WritePart(here.keys.of_any_rows(), here.records)
        if not self._cas:
            self._second.write([moving], self._deadline())
            return 0
        if known is None:
            return self._write(moving, np.zeros(len(at), np.uint64), np.ones(len(at), bool))[0]
        tokens = known.tokens[at]
        known.tokens[at] = 0  # until they are written
        left, tokens = self._write(moving, tokens, (tokens == 0) & (not known.may_be_new))
        known.tokens[at] = tokens
        return left

    def _write(self, part: WritePart, tokens: NDArray[np.uint64], look: Mask) -> tuple[int, NDArray[np.uint64]]:
        """Write rows under these tokens, those that `look` says after a look; return how many are left, and the new tokens."""
        learnt = np.zeros(len(tokens), np.uint64)
        at = np.arange(len(tokens))
        for _ in range(MAX_CONFLICT_ROUNDS):
            write = np.ones(len(at), bool)
            if look.any():
                tokens[look], write[look] = self._look(taken(part, np.flatnonzero(look)))
            at, tokens, part = at[write], tokens[write], taken(part, np.flatnonzero(write))
            if not len(at):
                break
            result = self._second.write([WritePart(part.keys, part.records, tokens)], self._deadline())[0]
            assert result.tokens is not None
            learnt[at[result.stored]] = result.tokens[result.stored]
            left = np.flatnonzero(~result.stored)
            at, tokens, part = at[left], tokens[left], taken(part, left)
            if not len(at):
                break
            look = np.ones(len(at), bool)
        return len(at), learnt

    def _look(self, part: WritePart) -> tuple[NDArray[np.uint64], Mask]:
        """Return the tokens that rows have there, 0 for those that are not there, and which of them are not newer there."""
        read = ReadPart(part.keys, part.records.shape[1], HEADER_SIZE, tokens=True, foreign=True)
        seen = self._second.read([read], self._deadline())[0].in_key_order()
        assert seen.tokens is not None
        assert seen.foreign is not None
        older: Mask = ~seen.found | (stored_versions(seen.records) <= stored_versions(part.records))
        return np.where(seen.found | seen.foreign, seen.tokens, np.uint64(0)), older


def taken(part: WritePart, rows: Mask | NDArray[np.intp]) -> WritePart:
    """Return the rows of a part that `rows` selects."""
    at = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.intp, copy=False)
    if len(at) == len(part.keys):
        return part
    records = part.records[at] if len(part.records) == len(part.keys) else part.records
    return WritePart(part.keys.take(at), records, None if part.tokens is None else part.tokens[at])
