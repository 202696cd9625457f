"""What lies under a URL: checkpoints beside each other, and which of them may go."""

from dataclasses import dataclass

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest
from kvemb.checkpoint.format.file_names import MANIFEST, fragment_path
from kvemb.checkpoint.format.manifest_json import decode_manifest
from kvemb.checkpoint.format.strict_json import MAX_DOCUMENT_BYTES
from kvemb.errors import CheckpointError, InvalidInputError


@dataclass(frozen=True)
class Listed:
    """One checkpoint: its name, its URL, and its manifest or why there is none."""

    name: str
    url: str
    manifest: CheckpointManifest | None
    problem: str = ""


def list_checkpoints(url: str) -> list[Listed]:
    """List the checkpoints right below a URL, oldest first, broken ones last; or the one that is there itself.

    Raises:
        CheckpointError: the URL cannot be read.
    """
    storage = CheckpointStorage(url)
    if storage.size(MANIFEST) is not None:
        return [_look_at(storage)]
    found = [_look_at(CheckpointStorage(f"{storage.url}/{name}")) for name in storage.folders()]
    return sorted(found, key=lambda one: (one.manifest is None, one.manifest.created_s if one.manifest else 0, one.name))


def prune(url: str, *, keep: int) -> list[str]:
    """Delete old checkpoints below a URL: all but the newest `keep` and what those are built on.

    Unfinished and damaged ones are left alone: they may be somebody's save under way, or somebody's last copy.

    Args:
        url: the folder that holds the checkpoints.
        keep: at least 1.

    Returns:
        The names of those that were deleted.

    Raises:
        CheckpointError: something could not be deleted. What is left is whole or has no manifest any more. A checkpoint goes before what it
            is built on, so that no chain is ever broken.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise InvalidInputError(f"keep is {keep!r}: at least 1 checkpoint is kept")
    if CheckpointStorage(url).size(MANIFEST) is not None:
        raise InvalidInputError("prune: give the folder that holds the checkpoints, not one of them")
    whole = {one.name: one.manifest for one in list_checkpoints(url) if one.manifest is not None}
    needed: set[str] = set()
    for name in list(whole)[-keep:]:
        while name in whole and name not in needed:
            needed.add(name)
            base = whole[name].base
            name = base.name if base is not None else ""
    # Newest first: a checkpoint goes before what it is built on.
    gone = [name for name in reversed(list(whole)) if name not in needed]
    for name in gone:
        _delete(CheckpointStorage(f"{url.rstrip('/')}/{name}"), whole[name])
    return gone


def _look_at(storage: CheckpointStorage) -> Listed:
    name = storage.url.rpartition("/")[2]
    try:
        if storage.size(MANIFEST) is None:
            return Listed(name, storage.url, None, "not finished" if storage.names() else "no checkpoint")
        return Listed(name, storage.url, decode_manifest(storage.read(MANIFEST, MAX_DOCUMENT_BYTES), storage.where(MANIFEST)))
    except CheckpointError as error:
        return Listed(name, storage.url, None, str(error))


def _delete(storage: CheckpointStorage, manifest: CheckpointManifest) -> None:
    """Delete what the manifest names, itself first: what is left then is no checkpoint any more."""
    storage.delete(MANIFEST)
    for path in [entry.path for entry in manifest.files] + [fragment_path(cut.shard) for cut in manifest.cuts]:
        storage.delete(path)
    storage.delete_empty_folders()
