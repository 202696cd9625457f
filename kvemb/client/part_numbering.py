"""The parts of pushes: which shard gets which rows, under which sequence, by which stream. Under the session's lock."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from kvemb.client.ack import Ack, PartAck
from kvemb.client.all_shards import AllShards
from kvemb.client.introduction import Introduction
from kvemb.client.outbox import Sent
from kvemb.client.push_sender import PushSender
from kvemb.datapath.prefetched_rows import PrefetchedRows
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import HelloReply, PushPart
from kvemb.protocol.shard_routing import route, split
from kvemb.schema.cluster_map import ClusterMap


class Numbered(NamedTuple):
    """A part that has its sequence at a shard."""

    stream: PushSender
    body: PushPart
    part: PartAck


class Serials(NamedTuple):
    """Of the shards' map by which a push was routed, of the registry of tables, and of the newest load, as it names them."""

    shards: int
    tables: int
    load: int


class PartNumbering:
    """Numbers one trainer's steps, and its parts at each shard.

    Args:
        streams: to the shards that it has sent parts to; it adds to them.
        trouble: says why a shard is late.
        refused: called when a shard has refused a part that may go anew.

    Attributes:
        step: the last one.
        inherited: the last step that our predecessor took part in at any shard.
        behind: shards that await an earlier step than the others, which our predecessor took part in elsewhere.
    """

    def __init__(
        self,
        servers: AllShards,
        streams: dict[int, PushSender],
        introduction: Introduction,
        *,
        trouble: Callable[[int, Deadline], str],
        refused: Callable[[], None],
        sync: bool,
    ) -> None:
        self._servers, self._streams, self._introduction, self._trouble = servers, streams, introduction, trouble
        self._refused, self._sync = refused, sync
        self.step = self.inherited = 0
        self.behind: dict[int, int] = {}

    def begin(self, replies: dict[int, HelloReply]) -> None:
        """Go on where the shards say that our predecessor has ended."""
        for shard in replies:
            self.stream(shard, introduced=True)
        self.step = self.inherited = max(0, *(reply.first_step - 1 for reply in replies.values()))
        writing = self._servers.cluster_map.writing_shards  # no trainer pushes to the others: they stay where they are
        firsts = {shard: reply.first_step for shard, reply in replies.items() if shard in writing}
        self.behind = {shard: first for shard, first in firsts.items() if 0 < first <= self.step}

    def catch_up(self, ack: Callable[[str, list[PartAck]], Ack], deadline: Deadline) -> None:
        """Take part with nothing in the steps that only some shards have had of our predecessor: from the next step on all are level."""
        for shard in list(self.behind):
            stream = self.stream(shard)
            while (step := self.behind[shard]) <= self.step:
                stream.wait_room(deadline)
                serials = Serials(self._servers.cluster_map.shards_serial, 0, self._servers.load_serial)
                body = self._part(stream.next_sequence(), [], False, step, serials)
                part = PartAck(stream.where, 0, partial(self._trouble, shard), stream.channel.say_trouble)
                stream.send(body.sequence, Sent(body.encode(), part, ack(f"empty part of step {step}", [part])))
                self.behind[shard] += 1
            del self.behind[shard]

    def stream(self, shard: int, *, introduced: bool = False) -> PushSender:
        """Return the stream to a shard; one that has joined since gets our hello before its first part."""
        stream = self._streams.get(shard)
        if stream is None:
            stream = PushSender(
                self._servers.channels[shard],
                self._introduction.again_to(shard, self.stream),
                self._refused,
                heard=self._servers.heard,
                introduced=introduced,
                recovers=not self._sync,
            )
            self._streams[shard] = stream
        elif (channel := self._servers.channels.get(shard, stream.channel)) is not stream.channel:
            stream.use(channel)
        return stream

    def number(
        self,
        wanted: dict[int, list[TableRows]],
        prefetched_of: list[list[list[PrefetchedRows]]],
        step: int,
        serials: Serials,
    ) -> list[Numbered]:
        """Give each shard's share of a push, and its share of the prefetched rows if there are any, the next sequences there."""
        numbered: list[Numbered] = []
        for shard, tables in wanted.items():
            stream = self.stream(shard)
            messages = _with_prefetched(split(tables), prefetched_of[shard]) if prefetched_of else [(rows, []) for rows in split(tables)]
            first = stream.next_sequence()
            for index, (message, prefetched) in enumerate(messages):
                more = index + 1 < len(messages)
                body = self._part(first + index, message, more, step, serials, prefetched)
                n_rows = sum(len(rows.ids) for rows in message)
                part = PartAck(stream.where, n_rows, partial(self._trouble, shard), stream.channel.say_trouble, prefetched)
                numbered.append(Numbered(stream, body, part))
        return numbered

    def _part(
        self,
        sequence: int,
        tables: list[TableRows],
        more: bool,
        step: int,
        serials: Serials,
        prefetched: Sequence[PrefetchedRows] = (),
    ) -> PushPart:
        questions = [rows.to_message() for rows in prefetched]
        return PushPart(
            trainer=self._introduction.trainer,
            incarnation=self._introduction.incarnation,
            sequence=sequence,
            step=step,
            more=more,
            tables=tables,
            digest=digest_tables(tables, questions),
            prefetched=questions,
            map_serial=serials.shards,
            tables_serial=serials.tables,
            load_serial=serials.load,
        )


def shares(tables: Sequence[TableRows], cluster_map: ClusterMap, always: Collection[int]) -> dict[int, list[TableRows]]:
    """Return the parts of a push for each shard; those of `always` get one in any case, as in each step of a sync job."""
    routed = [route(rows, cluster_map) for rows in tables]
    of_shards = [[share[shard] for share in routed] for shard in range(cluster_map.n_shards)]
    return {shard: share for shard, share in enumerate(of_shards) if shard in always or any(len(rows.ids) for rows in share)}


def send(numbered: Sequence[Numbered], ack: Ack) -> None:
    """Hand the parts of a push to their streams."""
    for stream, body, part in numbered:
        placements = {rows.table: rows.placement for rows in body.tables}
        stream.send(body.sequence, Sent(body.encode(), part, ack, placements))


def _with_prefetched(
    messages: list[list[TableRows]], prefetched: list[list[PrefetchedRows]]
) -> list[tuple[list[TableRows], list[PrefetchedRows]]]:
    """Let prefetched rows travel with the last rows of a push, and in messages of their own after them where one is not enough."""
    pairs = [(tables, list[PrefetchedRows]()) for tables in messages[:-1]]
    return [*pairs, *zip_longest(messages[-1:], prefetched or [[]], fillvalue=[])]
