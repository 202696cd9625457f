"""Lists the checkpoints under a URL, finds the one of a moment, and deletes those that are no longer needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage, shown
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, CheckpointManifest, fragment_path
from kvemb.checkpoint.format.manifest_json import decode_manifest
from kvemb.checkpoint.format.strict_json import MAX_DOCUMENT_BYTES
from kvemb.errors import CheckpointError, InvalidInputError


@dataclass(frozen=True)
class Listed:
    """One checkpoint: its name, its URL, and its manifest or the reason why it has none."""

    name: str
    url: str
    manifest: CheckpointManifest | None
    problem: str = ""


_UNFINISHED = ("not finished", "no checkpoint")
Known = dict[str, CheckpointManifest]
"""Manifests that were read before, by name: a manifest does not change."""


def list_checkpoints(url: str, known: Known | None = None) -> list[Listed]:
    """List the checkpoints right below a URL, oldest first, broken ones last; or the one at the URL itself."""
    storage, known = CheckpointStorage(url), {} if known is None else known
    if storage.size(MANIFEST) is not None:
        return [_look_at(storage)]
    found = [
        Listed(name, one_url, known[name]) if name in known else _look_at(CheckpointStorage(one_url))
        for name in storage.folders()
        for one_url in [f"{storage.url}/{name}"]
    ]
    known.clear()
    known.update({one.name: one.manifest for one in found if one.manifest is not None})
    return sorted(found, key=lambda one: (one.manifest is None, one.manifest.created_s if one.manifest else 0, one.name))


def checkpoint_at(url: str, moment: datetime) -> str:
    """Return the URL of the newest checkpoint in a folder that holds nothing which was pushed after a moment.

    Exports without the optimizer's state count only where there is nothing else. The time is that of the machine which saved.

    Raises:
        CheckpointError: there is none so old, or one of the folder is damaged, so that it may be the one.
    """
    there = list_checkpoints(url)
    if broken := [one for one in there if one.manifest is None and one.problem not in _UNFINISHED]:
        raise CheckpointError(
            f"{shown(broken[0].url)}: {broken[0].problem}. It may be that of {moment}: name the one to load by its own URL"
        )
    whole = [(one.manifest.cut_s, one.url, one.manifest) for one in there if one.manifest is not None and one.manifest.cut_s is not None]
    whole = [one for one in whole if not one[2].weights_only] or whole
    if len(clusters := sorted({manifest.cluster for _, _, manifest in whole})) > 1:
        raise InvalidInputError(f"{shown(url)}: clusters {', '.join(clusters)} have saved here; name the checkpoint by its own URL")
    found = [one for one in whole if one[0] <= moment.timestamp()]
    if not found:
        first = (
            f"the first one is of {datetime.fromtimestamp(min(whole)[0]).astimezone()}" if whole else "there is none that says its moment"
        )
        raise CheckpointError(f"{shown(url)}: no checkpoint of {moment} or before: {first}")
    return max(found, key=lambda one: one[:2])[1]


def prune(url: str, *, keep: int, like: CheckpointManifest | None = None, dry_run: bool = False, known: Known | None = None) -> list[str]:
    """Delete old checkpoints below a URL: of every cluster and kind all but the newest `keep` and those that they are built on.

    There are two kinds, which count apart: with the optimizer's state, from which training goes on, and weights-only exports. Checkpoints
    that cannot be loaded (unfinished, damaged, or without their base) neither count nor go: they may be a save under way, or a last copy.

    Returns:
        The names of those that were deleted, or would be.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise InvalidInputError(f"keep is {keep!r}: at least 1 checkpoint is kept")
    if CheckpointStorage(url).size(MANIFEST) is not None:
        raise InvalidInputError("prune: give the folder that holds the checkpoints, not one of them")
    there = {one.name: one.manifest for one in list_checkpoints(url, known) if one.manifest is not None}
    gone = _superseded(there, keep, like)
    for name in [] if dry_run else gone:
        _delete(CheckpointStorage(f"{url.rstrip('/')}/{name}"), there[name])
        (known or {}).pop(name, None)
    return gone


def _superseded(there: Mapping[str, CheckpointManifest], keep: int, like: CheckpointManifest | None) -> list[str]:
    """Return the names of those that may go, a checkpoint before its base; `there` is in the order of time."""
    chains = {name: _chain(name, there) for name in there}
    kinds: dict[tuple[str, bool], list[str]] = {}
    for name, chain in chains.items():
        if chain and (like is None or _kind(there[name]) == _kind(like)):
            kinds.setdefault(_kind(there[name]), []).append(name)
    needed = {below for names in kinds.values() for name in names[-keep:] for below in chains[name]}
    old = {name for names in kinds.values() for name in names} - needed
    return [name for name in reversed(list(there)) if name in old]


def _kind(manifest: CheckpointManifest) -> tuple[str, bool]:
    return manifest.cluster, manifest.weights_only


def _chain(name: str, there: Mapping[str, CheckpointManifest]) -> list[str]:
    """Return a checkpoint's name and those of all that it is built on; [] where one of them is missing or was replaced."""
    chain = [name]
    while (base := there[chain[-1]].base) is not None:
        if base.name not in there or there[base.name].save_id != base.save_id or base.name in chain:
            return []
        chain.append(base.name)
    return chain


def _look_at(storage: CheckpointStorage) -> Listed:
    name = storage.url.rpartition("/")[2]
    try:
        if storage.size(MANIFEST) is None:
            return Listed(name, storage.url, None, _UNFINISHED[0 if storage.names() else 1])
        return Listed(name, storage.url, decode_manifest(storage.read(MANIFEST, MAX_DOCUMENT_BYTES), storage.where(MANIFEST)))
    except CheckpointError as error:
        return Listed(name, storage.url, None, str(error))


def _delete(storage: CheckpointStorage, manifest: CheckpointManifest) -> None:
    """Delete the manifest, then the files that it names: those that remain are no checkpoint any more."""
    storage.delete(MANIFEST)
    for path in [entry.path for entry in manifest.files] + [fragment_path(cut.shard) for cut in manifest.cuts]:
        storage.delete(path)
    storage.delete_empty_folders()
