"""The ranks of a torch.distributed job as trainers of a cluster: each takes its place, and all places of the run before are taken over.

A launcher (torchrun, Ray) starts all ranks anew after a failure, perhaps fewer or more. Strategy: the ranks deal all places that there may
be among themselves, the unused ones too, so that no shard listens to a process of an earlier run any more. They meet, and the unused places
are given up: a sync job goes on with as many trainers as there are ranks.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import distributed

from kvemb.config import load
from kvemb.errors import InvalidInputError

from .lookup.parameter_walks import n_ranks

if TYPE_CHECKING:
    from kvemb.api import Cluster


def connect_rank(source: str | os.PathLike[str] | Mapping[str, Any], *, places: int | None = None, job: str = "trainer") -> "Cluster":
    """Connect this rank as trainer `<job>-<rank>`, and take over every place of an earlier run.

    Every rank calls it, after init_process_group, and once: each call takes the places from the connections of the one before.
    When it returns, no shard takes anything from any process of an earlier run of this job, were it still alive: rows that are loaded
    then stay as they are until a rank pushes. Load the newest checkpoint now, on one rank, also if none failed: rows may be ahead of it.
    Without torch.distributed it is a job of one rank.

    Args:
        source: as of `kvemb.connect`.
        places: the largest number of ranks that the job has had or will have. Only of an async cluster: there it is the number of ranks
            unless given. A sync cluster has `parameter_servers.trainers` places, and steps wait for those that are ranks.
        job: the trainers' names begin so. Two jobs of one cluster need two; with certificates, a name that this one's may take.

    Returns:
        The open cluster of this rank.

    Raises:
        InvalidInputError: there are more ranks than places, or `places` is given for a sync cluster.
        KvembError: as `kvemb.connect` and `Cluster.take_place` raise it. Other ranks then wait for this one, until the launcher ends them.

    Example:
        torch.distributed.init_process_group("gloo")
        with connect_rank("kvemb.yaml") as cluster:
            ...
    """
    from kvemb.api.connector import connect

    rank, world = (distributed.get_rank(), distributed.get_world_size()) if n_ranks() > 1 else (0, 1)
    numbers = range(rank, _n_places(source, world, places), world)
    with ExitStack() as opened:
        own, *spare = [opened.enter_context(connect(source, trainer=f"{job}-{number}")) for number in numbers]
        for one in (own, *spare):
            one.take_place()
        if world > 1:
            distributed.barrier()  # nobody pushes or leaves before all places are taken: no step is made of an earlier run's pushes
        for one in spare:
            one.close()
        opened.pop_all()
    return own


def _n_places(source: str | os.PathLike[str] | Mapping[str, Any], world: int, given: int | None) -> int:
    n_trainers = load(source, os.environ).servers.trainers
    if n_trainers and given is not None:
        raise InvalidInputError(f"places is {given!r}: leave it out, this cluster's sync job has {n_trainers} (parameter_servers.trainers)")
    n_places = n_trainers or (world if given is None else given)
    if isinstance(n_places, bool) or not isinstance(n_places, int) or n_places < world:
        where = "parameter_servers.trainers" if n_trainers else "places"
        raise InvalidInputError(f"{where} is {n_places!r}, and the job has {world} ranks: give the largest number that it may have")
    return n_places
