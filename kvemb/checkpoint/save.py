"""Saving a cluster, seen from the client: tells every shard to save, waits, and writes the manifest once all are done.

An unfinished save leaves `saving.json` and the shards' fragments behind. `resume` goes on with it: shards that were done stay done, the
others are cut again. Without `resume` a new save takes its place.
"""

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvemb.checkpoint.chain import Checkpoint, open_checkpoint
from kvemb.checkpoint.checkpoint_messages import SAVE_CHECKPOINT, SAVE_STATUS, SaveReply, SaveRequest, SaveStatusRequest
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage, absolute_url
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, SAVING, BaseCheckpoint, CheckpointManifest, check_name, fragment_path
from kvemb.checkpoint.format.manifest_json import check_extra, decode_manifest, encode_manifest, read_hex
from kvemb.checkpoint.format.strict_json import MAX_DOCUMENT_BYTES, Fields, decode, encode
from kvemb.checkpoint.writer import SaveInfo, assemble, read_fragment
from kvemb.client.all_shards import AllShards
from kvemb.errors import BaseOutdatedError, CheckpointError, InvalidInputError, ShardUnavailableError, n_of
from kvemb.net.deadline import Deadline, checked_timeout
from kvemb.schema.slots import N_SLOTS

_POLL_S, _LONGEST_POLL_S, _POLL_SHARE, _CALL_S, _AWAY_S, _SILENT_S = 0.01, 0.2, 0.05, 10.0, 60.0, 30.0
log = logging.getLogger("kvemb")

SaveProgress = Callable[[int, int, int], None]
"""Called now and then with (rows done, rows in all, bytes written) of all shards together."""


@dataclass(frozen=True)
class SaveResult:
    """The result of a finished save: its URL, its manifest, and how long it took."""

    url: str
    manifest: CheckpointManifest
    seconds: float


@dataclass(frozen=True)
class Saving:
    """The cluster that is saved: its shards, its name, its id in hex. They are cut by the cluster map in force when the save begins."""

    servers: AllShards
    cluster: str
    cluster_id: str


def save(
    saving: Saving,
    url: str,
    *,
    base: str | None,
    weights_only: bool,
    extra: Mapping[str, Any] | None,
    resume: bool,
    timeout_s: float,
    progress: SaveProgress | None = None,
) -> SaveResult:
    """Save the cluster; see `kvemb.api.cluster.Cluster.save`."""
    begun, timeout_s = time.monotonic(), checked_timeout(timeout_s)
    storage = CheckpointStorage(url)
    if storage.size(MANIFEST) is not None:
        raise CheckpointError(f"{storage!r} holds a checkpoint already; save under another name, or delete it first")
    saving.servers.refresh_map(Deadline.after(timeout_s))
    below = None if base is None else _open_base(saving, storage, base, weights_only)
    info = _info(saving, storage, below, weights_only, check_extra(dict(extra or {})), resume=resume)
    cuts = {} if below is None else {shard: cut.version for shard, cut in enumerate(below.manifest.cuts)}
    shards = saving.servers.numbers
    requests = {shard: SaveRequest(info.save_id, storage.url, cuts.get(shard, 0), weights_only, timeout_s) for shard in shards}
    with _said_when_slow(f"{storage!r}: shards have not begun to save; their logs and `kvemb status` say what they wait for"):
        saving.servers.call_each(SAVE_CHECKPOINT, requests, Deadline.after(timeout_s))
    info = replace(info, cut_s=math.ceil(time.time()))
    _require_same_shares(saving.servers, info, timeout_s)
    _wait(saving.servers, info.save_id, shards, progress)
    manifest = _finish(storage, info, shards, below)
    told = dict.fromkeys(shards, SaveStatusRequest(info.save_id, True))
    saving.servers.try_each(
        SAVE_STATUS, told, Deadline.after(_CALL_S)
    )  # for their figures; a shard that does not hear it reports the one before
    return SaveResult(storage.url, manifest, time.monotonic() - begun)


@contextmanager
def _said_when_slow(text: str) -> Iterator[None]:
    timer = threading.Timer(_SILENT_S, log.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _require_same_shares(servers: AllShards, info: SaveInfo, timeout_s: float) -> None:
    """Refuse to go on when slots have changed their shard while the shards were cut one after the other; once all are cut, none does."""
    servers.refresh_map(Deadline.after(timeout_s))
    if servers.cluster_map.shard_runs != info.slots:
        raise CheckpointError("slots moved between shards while the save began, so that a row may be in two shares or in none; save again")


def _open_base(saving: Saving, storage: CheckpointStorage, base: str, weights_only: bool) -> Checkpoint:
    """Open the base and refuse one that this checkpoint cannot be built on."""
    url = absolute_url(base)
    if url.rpartition("/")[0] != storage.url.rpartition("/")[0] or url == storage.url:
        raise InvalidInputError(f"base {url}: a checkpoint and its base lie beside each other; {storage.url} is to be the new one")
    check_name(url.rpartition("/")[2])
    check_name(storage.url.rpartition("/")[2])
    below = open_checkpoint(url)
    manifest = below.manifest
    shares = manifest.slots, manifest.n_shards
    if manifest.cluster_id != saving.cluster_id or shares != (saving.servers.cluster_map.shard_runs, 1 + max(saving.servers.numbers)):
        raise BaseOutdatedError(
            f"{below.storage!r}: of cluster {manifest.cluster_id} with {n_of(manifest.n_shards, 'shard')}, which may have owned "
            "other rows; not a base for this one. Save without a base."
        )
    if manifest.weights_only != weights_only:
        raise InvalidInputError("weights_only must be as in the base")
    return below


def _info(
    saving: Saving, storage: CheckpointStorage, below: Checkpoint | None, weights_only: bool, extra: dict[str, Any], *, resume: bool
) -> SaveInfo:
    """Return the fields that all shards share: as noted by the save that is resumed, or new and noted."""
    base = None if below is None else BaseCheckpoint(below.storage.url.rpartition("/")[2], below.manifest.save_id)
    save_id, created_s, slots = secrets.token_hex(16), int(time.time()), saving.servers.cluster_map.shard_runs
    if resume:
        fields = _noted(storage)
        same = (saving.cluster_id, weights_only, "" if base is None else base.save_id)
        if same != (fields.text("cluster_id"), fields.flag("weights_only"), fields.text("base")):
            raise InvalidInputError(f"{storage!r}: the save to be resumed is of another cluster, or was begun with other options")
        if fields.integers("slots", None, N_SLOTS - 1) != slots:
            raise CheckpointError(
                f"{storage!r}: slots moved between shards since the save that is to be resumed began, so that a row may be in two shares "
                "or in none. Begin again, without resume"
            )
        save_id, created_s = fields.text("save_id"), fields.integer("created_s", 0, 1 << 53)
    info = SaveInfo(save_id, saving.cluster, saving.cluster_id, created_s, weights_only, base, extra, slots)
    if not resume:
        note = {"save_id": save_id, "created_s": created_s, "cluster_id": saving.cluster_id, "weights_only": weights_only}
        storage.write(SAVING, encode({**note, "base": "" if base is None else base.save_id, "slots": list(slots)}))
    return info


def _noted(storage: CheckpointStorage) -> Fields:
    """Return the notes of the save that is to be resumed."""
    begin = f"{storage!r}: there is nothing to resume: {{}}. Begin again, without resume"
    if storage.size(SAVING) is None:
        raise CheckpointError(begin.format("no save was begun here, or it was ended before it had noted anything"))
    noted = storage.read(SAVING, MAX_DOCUMENT_BYTES)
    try:
        fields = decode(noted, storage.where(SAVING)).only("save_id", "created_s", "cluster_id", "weights_only", "base", "slots")
        read_hex(fields, "save_id")
    except CheckpointError as error:
        raise CheckpointError(begin.format(f"what the save noted of itself cannot be used ({error})")) from error
    return fields


def _wait(servers: AllShards, save_id: str, shards: Sequence[int], progress: SaveProgress | None) -> None:
    """Poll until every one of these shards is done; report those that make no progress. Each shard ends its own waits in time."""
    heard = dict.fromkeys(shards, time.monotonic())
    stalled = Stalled()
    asked = dict.fromkeys(shards, SaveStatusRequest(save_id, False))
    begun = time.monotonic()
    while True:
        replies = servers.try_each(SAVE_STATUS, asked, Deadline.after(_CALL_S))
        now = time.monotonic()
        for shard, reply in replies.items():
            if isinstance(reply, SaveReply):
                heard[shard] = now
                _check(shard, reply)
            elif not isinstance(reply, ShardUnavailableError) or now - heard[shard] > _AWAY_S:
                raise reply
        stalled.look(replies, now)
        known = [reply for reply in replies.values() if isinstance(reply, SaveReply)]
        if progress is not None and len(known) == len(shards):
            progress(sum(r.rows_done for r in known), sum(r.rows for r in known), sum(r.bytes_done for r in known))
        if all(reply.state == "done" for reply in known) and len(known) == len(shards):
            return
        time.sleep(min(max(_POLL_S, _POLL_SHARE * (now - begun)), _LONGEST_POLL_S))


class Stalled:
    """Reports the shards that make no progress. It is given their answers, by shard, and the time."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}

    def look(self, replies: Mapping[int, SaveReply | Exception], now: float) -> None:
        """Compare how far the shards are with how far they were."""
        for shard, reply in replies.items():
            if not isinstance(reply, SaveReply) or reply.state != "running":
                continue
            reached = reply.rows_done, reply.bytes_done
            before, since = self._seen.get(shard, (reached, now))
            if reached == before and now - since >= _SILENT_S:
                where = f"{reply.rows_done:,} of {reply.rows:,} rows, {reply.bytes_done / 1e6:.1f} MB written"
                log.warning("shard %d has saved nothing for %.0f s (%s); its log says what it waits for", shard, now - since, where)
                since = now
            self._seen[shard] = reached, since if reached == before else now


def _require_same_tables(storage: CheckpointStorage, manifest: CheckpointManifest, below: Checkpoint) -> None:
    """Refuse a base that has a table which was dropped since."""
    for saved in below.manifest.tables:
        now = manifest.table(saved.definition.name)
        if now is None or now.definition.key != saved.definition.key:
            raise BaseOutdatedError(
                f"{storage!r}: table {saved.definition.name!r} of the base {below.storage!r} was dropped since; save a full checkpoint"
            )


def _check(shard: int, reply: SaveReply) -> None:
    if reply.state == "failed":
        raise CheckpointError(
            f"shard {shard}: {reply.error}. Nothing counts before the manifest is there; save again, or go on with resume"
        )
    if reply.state not in ("running", "done"):
        raise CheckpointError(f"shard {shard} knows nothing of the save: it was restarted meanwhile. Save again, or go on with resume")


def _finish(storage: CheckpointStorage, info: SaveInfo, shards: Sequence[int], below: Checkpoint | None) -> CheckpointManifest:
    """Put the fragments together, check that every file exists, and write the manifest."""
    found = {shard: read_fragment(storage, shard) for shard in shards}
    fragments = [fragment for fragment in found.values() if fragment is not None]
    if len(fragments) < len(found):
        shard = next(number for number, fragment in found.items() if fragment is None)
        raise CheckpointError(
            f"{storage.where(fragment_path(shard))}: shard {shard} says that it is done, but nothing is here; the URL must mean the same "
            "place on the machines of all shards and of this process, and all must be of one minor version (docs/upgrade.md)"
        )
    manifest = assemble(info, fragments)
    if below is not None:
        _require_same_tables(storage, manifest, below)
    data = encode_manifest(manifest)
    decode_manifest(data, storage.where(MANIFEST))
    there = set(storage.names())
    for entry in manifest.files:
        if entry.path not in there or storage.size(entry.path) != entry.size_bytes:
            raise CheckpointError(f"{storage.where(entry.path)}: missing or cut off, although its shard has written it")
    if below is not None and open_checkpoint(below.storage.url).manifest.save_id != below.manifest.save_id:
        raise CheckpointError(f"{below.storage!r}: the base was replaced while this checkpoint was built on it")
    wanted = {entry.path for entry in manifest.files}
    for path in sorted(there - wanted):  # of an earlier try
        if path.endswith(".parquet"):
            storage.delete(path)
    storage.write(MANIFEST, data)
    for path in [*(fragment_path(shard) for shard in shards), SAVING]:
        storage.delete(path)
    return manifest
