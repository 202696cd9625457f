"""Ranks of one job that share their rows: each unique row of a batch is pulled by one of them, and pushed by one.

Strategy: a hash of its id gives each row one rank, its owner. Before a batch is used, every rank sends the unique ids of its share to
their owners. An owner pulls the unique ids of all ranks, once, and sends rows and versions back. In the step gradients go to the owners,
which sum them by id and push each row once. Sums are taken in the order of ranks, as a shard takes them in that of incarnations.

Both are collectives, which every rank must call equally often and in one order:

* Rows go by a group of their own, in one thread, a round for each batch. A rank ends a run by a round in which it says so; from then on
  every rank pulls for itself until its next run. So ranks may have different numbers of batches, or leave their loops early.
* Gradients go by the caller's group, in the thread that trains, for batches whose rows were shared; those of others are pushed as they are.
* Rows that are pulled outside of a round (not foreseen, or pulled again by the rule of consistency) are pulled by the rank alone.

Messages are int32 words: of each table one record after another, of ids and versions two words, of rows dim words.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from kvemb.arrays.hashing import digest64, mix64
from kvemb.arrays.ids import to_caller, unique_ascending
from kvemb.arrays.segment_sum import group_by_id
from kvemb.errors import InvalidInputError, KvembError, RankLostError, StorageError

from ...bridge.batches_ahead import AheadOptions
from ...bridge.pushed_steps import merge_parts
from ...bridge.shared_lookups import Asked
from ...lookahead.cluster_ports import GradientPart, PullPort, TablePort
from ...lookahead.pool_sizes import AUTO
from ...lookahead.pull_threads import PullThreads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # a torch without it can do all else

Counts = NDArray[np.int64]
"""Numbers of records, [tables, ranks]: of those that go to each rank, or come from it."""
Words = NDArray[np.int32]
CAPACITY = 2
"""Batches ahead unless said otherwise. It must be the same on all ranks, so nothing is measured."""
_LONGEST_S = 600.0  # a round must fail before the wait for its batch does, see `Pipeline`
_ENDED = -1  # in the place of a count: this rank's run is over, or its step does not name the table


class RankExchange:
    """The rows and gradients that the ranks of a group exchange. Making one is a collective: every rank of the group makes it.

    `pull_versions` and `asking`'s question belong to `threads`, of which there is one; all else to the thread that trains. It does not
    survive fork().
    """

    def __init__(self, group: "ProcessGroup", tables: Mapping[str, TablePort], pulls: PullPort, settings: str) -> None:
        self._group, self._pulls = group, pulls
        self._tables = [tables[name] for name in sorted(tables)]
        self._rank, self._world = group.rank(), group.size()
        self._n_rounds, self._over = 0, True
        self._lost: RankLostError | None = None
        self._device, backend = _backend_of(group)
        described = f"{settings}; tables {', '.join(f'{t.name!r} (dim {t.dim}, {t.definition.id_dtype} ids)' for t in self._tables)}"
        self._check_same(described)
        timeout = min(backend.options._timeout, timedelta(seconds=_LONGEST_S))
        with self._together():
            self._lookups: ProcessGroup = distributed.new_group(
                distributed.get_process_group_ranks(group), timeout=timeout, backend=backend.name(), use_local_synchronization=True
            )
        self.threads = PullThreads(1)
        """Runs the rounds of rows, in order."""

    @property
    def n_rounds(self) -> int:
        """How many rounds of this run brought rows."""
        return self._n_rounds

    def begin(self) -> None:
        """Begin a run. Rounds of the one before are over, but for its end."""
        self.threads.submit(self._begin)

    def _begin(self) -> None:
        self._n_rounds, self._over = 0, False

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Read batches, and end the run when there are no more: the other ranks may wait for their next rows before a step of this one."""
        try:
            yield from batches
        finally:
            self.end(wait=False)

    def asking(self, asked: Callable[[Any], list[Asked]]) -> Callable[[Any], list[Asked]]:
        """Return the question of a loader that has a round for every batch, be nothing asked for. A wrong batch ends the run."""
        nothing = [(self._tables[0], np.empty(0, np.uint64))]

        def ask(batch: Any) -> list[Asked]:
            try:
                return asked(batch) or nothing
            except BaseException:
                self._end()
                raise

        return ask

    def end(self, *, wait: bool) -> None:
        """End the run, and let the other ranks know. Once is enough; more do nothing."""
        told = self.threads.submit(self._end)
        if wait:
            told.result()

    def _end(self) -> None:
        with suppress(KvembError):  # a rank that has gone needs no end
            if not self._over:
                self._round_of(np.full((len(self._tables), self._world), _ENDED, np.int64))
        self._over = True

    def pull_versions(
        self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True
    ) -> Mapping[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """Fetch rows and versions of unique ids of several tables, together with the other ranks. See `ClusterPort.pull_versions`."""
        if self._over:
            return self._pulls.pull_versions(ids, stored=stored)
        wanted = [ids.get(table.name, np.empty(0, np.uint64)).view(np.uint64) for table in self._tables]
        orders, counts = _by_owner(wanted, self._world)
        asked = self._round_of(counts)
        if self._over:
            return self._pulls.pull_versions(ids, stored=stored)
        self._n_rounds += 1
        # what each table is asked for by all ranks: words [m, 2], then the answers [m, 2 + dim]
        theirs = self._swap(self._lookups, [_words(one[order]) for one, order in zip(wanted, orders, strict=True)], counts, asked)
        answers, error = self._answers([_longs(one) for one in theirs], stored)
        one = np.ones((1, self._world), np.int64)
        failed = np.full((self._world, 1), error is not None, np.int32)
        states, *rows = self._swap(self._lookups, [failed, *answers], np.concatenate([one, asked]), np.concatenate([one, counts]))
        if error is not None:
            raise error
        if states.any():
            raise StorageError(f"rank {int(states.argmax())} could not pull its share of this batch's rows; its own error says why")
        return {table.name: _rows_of(got, order) for table, got, order in zip(self._tables, rows, orders, strict=True) if table.name in ids}

    def merge(self, parts: Mapping[str, GradientPart]) -> dict[str, GradientPart]:
        """Exchange the gradients of a step: the parts of this rank for the sums of the rows that it owns.

        Tables of which no rank has a part have none; tables that are not exchanged stay as they are.

        Raises:
            RankLostError: a rank ended, or did not answer in time; nothing of this step was pushed by this rank.
        """
        mine = [parts.get(table.name) or merge_parts([], table.dim) for table in self._tables]
        orders, counts = _by_owner([ids for ids, _, _ in mine], self._world)
        named = np.array([[table.name in parts] for table in self._tables])
        theirs = self._counts(self._group, np.where(named, counts, _ENDED))
        # words [n, 2 + 2 + dim] of each row: id, version, gradient
        records = [
            np.concatenate([_words(ids), _words(versions), grads.view(np.int32)], axis=1).take(order, axis=0)
            for (ids, grads, versions), order in zip(mine, orders, strict=True)
        ]
        swapped = self._swap(self._group, records, counts, np.maximum(theirs, 0))
        known = {table.name for table in self._tables}
        merged = {name: part for name, part in parts.items() if name not in known}
        for table, got, came in zip(self._tables, swapped, theirs, strict=True):
            if (came != _ENDED).any():
                merged[table.name] = _summed(got)
        return merged

    def _round_of(self, counts: Counts) -> Counts:
        """Begin a round: exchange how much this rank asks each other one for; the run is over if a rank says so."""
        asked = self._counts(self._lookups, counts)
        self._over = bool((asked == _ENDED).any())
        return asked

    def _answers(self, asked: Sequence[NDArray[np.uint64]], stored: bool) -> tuple[list[Words], Exception | None]:
        """Pull the rows that all ranks ask this one for: versions and rows of each table; if that fails, zeros and the error."""
        unique = [unique_ascending(ids) for ids in asked]
        wanted = {
            table.name: to_caller(one.ids, table.definition.id_dtype)
            for table, one in zip(self._tables, unique, strict=True)
            if len(one.ids)
        }
        try:
            pulled = self._pulls.pull_versions(wanted, stored=stored) if wanted else {}
        except Exception as error:  # the others wait for an answer
            return [np.zeros((len(ids), 2 + table.dim), np.int32) for table, ids in zip(self._tables, asked, strict=True)], error
        answers = []
        for table, one in zip(self._tables, unique, strict=True):
            rows, versions = pulled.get(table.name, (np.empty((0, table.dim), np.float32), np.empty(0, np.uint64)))
            record = np.concatenate([_words(versions), rows.view(np.int32)], axis=1)
            answers.append(record if one.inverse is None else record.take(one.inverse, axis=0))
        return answers, None

    def _swap(self, group: "ProcessGroup", records: Sequence[Words], sent: Counts, coming: Counts) -> list[Words]:
        """Send records int32 [n, words] of each table to ranks, and return those that came, in the order of ranks."""
        widths = np.array([[record.shape[1]] for record in records])
        ends = np.cumsum(sent, axis=1)
        order = [(rank, at) for rank in range(self._world) for at in range(len(records))]
        blocks = [records[at][ends[at, rank] - sent[at, rank] : ends[at, rank]] for rank, at in order]
        array = np.concatenate([block.reshape(-1) for block in blocks])
        words_sent, words_coming = sent * widths, coming * widths
        got = self._all_to_all(group, array, words_sent.sum(axis=0).tolist(), words_coming.sum(axis=0).tolist())
        came = np.split(got, np.cumsum(words_coming.T.reshape(-1))[:-1])  # the tables of rank 0, those of rank 1, ...
        return [np.concatenate(came[at :: len(records)]).reshape(-1, width) for at, width in enumerate(widths[:, 0])]

    def _counts(self, group: "ProcessGroup", counts: Counts) -> Counts:
        """Tell each rank how many records it will get; return how many will come from each."""
        each = [len(counts)] * self._world
        return self._all_to_all(group, np.ascontiguousarray(counts.T).reshape(-1), each, each).reshape(self._world, -1).T

    def _all_to_all(self, group: "ProcessGroup", array: NDArray[Any], sent: list[int], coming: list[int]) -> NDArray[Any]:
        given = torch.from_numpy(array).to(self._device)
        got = torch.empty(sum(coming), dtype=given.dtype, device=self._device)
        with self._together():
            distributed.all_to_all_single(got, given, coming, sent, group=group)
        array = got.cpu().numpy()
        return array

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Name what torch raises while ranks wait for one another, now and from now on: after it, ranks are no longer at one place."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except RuntimeError as error:
            self._lost = RankLostError(
                f"rank {self._rank} of {self._world}: another rank has ended, or did not answer within the group's timeout, while rows or "
                f"gradients were exchanged ({error}). This rank has pushed nothing of the step. End all ranks, and start the job again"
            )
            raise self._lost from error

    def _check_same(self, described: str) -> None:
        ours = np.uint64(digest64(described)).view(np.int64)
        each = [1] * self._world
        different = np.flatnonzero(self._all_to_all(self._group, np.full(self._world, ours), each, each) != ours)
        if len(different):
            raise InvalidInputError(
                f"rank {self._rank} and rank {different[0]} prepared differently: give all ranks of an exchange the same tables and "
                f"options. Here: {described}"
            )


def ordered(options: AheadOptions, cluster: Any) -> AheadOptions:
    """Return the options of a loader whose rows are exchanged: pulled in the order of batches, as far ahead on every rank."""
    if cluster.mode != "sync":
        raise InvalidInputError(
            f"exchange needs a cluster in sync mode, this one is {cluster.mode}: only there do the ranks take each step together. Leave "
            "exchange out, or set parameter_servers.mode to sync"
        )
    if options.get("executor") is not None or options.get("threads_num", AUTO) not in (AUTO, 1):
        raise InvalidInputError("exchange pulls in one thread, so that all ranks do so in one order: leave executor and threads_num out")
    kept = options.copy()
    kept["threads_num"] = 1
    if kept.get("capacity", AUTO) == AUTO:
        kept["capacity"] = CAPACITY
    return kept


def check_group(group: object) -> "ProcessGroup":
    """Return a group of ranks that this process is one of."""
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise InvalidInputError(
            f"exchange is {group!r}; give a group of torch.distributed that this process is in, e.g. torch.distributed.group.WORLD after "
            "init_process_group"
        )
    return group


def _backend_of(group: "ProcessGroup") -> tuple[str, Any]:
    """Return the device whose memory a group takes, and its backend: the CPU's, if it has one, for rows are there."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):
            return device, group._get_backend(torch.device(device))
    raise InvalidInputError("exchange: the group has a backend neither for the CPU nor for CUDA; give one of gloo or nccl")


def _by_owner(wanted: Sequence[NDArray[np.uint64]], world: int) -> tuple[list[NDArray[np.intp]], Counts]:
    """Return of each table the order that sorts its ids by their owner, and how many go to each rank."""
    owners = [(mix64(ids) % np.uint64(world)).astype(np.uint16) for ids in wanted]
    counts = np.array([np.bincount(owner, minlength=world) for owner in owners], np.int64)
    return [np.argsort(owner, kind="stable") for owner in owners], counts


def _words(longs: NDArray[np.uint64]) -> Words:
    return longs.view(np.int32).reshape(-1, 2)


def _longs(words: Words) -> NDArray[np.uint64]:
    return np.ascontiguousarray(words).view(np.uint64).reshape(-1)


def _rows_of(records: Words, order: NDArray[np.intp]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
    """Take answers apart, and undo the order in which ids went out: rows [n, dim] and versions [n]."""
    rows, versions = np.empty((len(records), records.shape[1] - 2), np.float32), np.empty(len(records), np.uint64)
    rows[order], versions[order] = records[:, 2:].view(np.float32), _longs(records[:, :2])
    return rows, versions


def _summed(records: Words) -> GradientPart:
    """Sum gradients by id, those of a row in the order of ranks; of the versions seen the oldest counts."""
    groups = group_by_id(_longs(records[:, :2]))
    with np.errstate(over="ignore", invalid="ignore"):  # infinities: the push refuses what comes of them, and says where
        grads = groups.sum(np.ascontiguousarray(records[:, 4:]).view(np.float32))
    return groups.ids, grads, groups.minimum(_longs(records[:, 2:4]))
