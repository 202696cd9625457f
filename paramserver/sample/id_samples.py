"""Gives some ids of a table that exist on one shard."""

import random
from typing import ClassVar

from kvemb.errors import InvalidInputError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import IdsReply
from kvemb.protocol.verb import Handled
from kvemb.sample.row_sample import MAX_SAMPLED_IDS, SAMPLE_IDS, SampleIdsRequest

from ..capability import Capability


class IdSamples(Capability):
    """The ids of a sample, those of one shard."""

    def sample_ids(self, request: SampleIdsRequest, deadline: Deadline) -> IdsReply:
        """Give some ids of a table that exist on this shard."""
        if not 1 <= request.limit <= MAX_SAMPLED_IDS:
            raise InvalidInputError(f"limit is {request.limit}; give 1 to {MAX_SAMPLED_IDS}")
        state = self._parts.tables.state(self._parts.registry.find(request.table))
        return IdsReply(state.some(request.limit, random.random()).astype("<u8").tobytes())

    verbs: ClassVar[Handled] = {SAMPLE_IDS: sample_ids}
