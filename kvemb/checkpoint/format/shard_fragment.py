"""What one shard has finished of a save: shard-<i>.json beside the data, while the save is under way. Pure: bytes in, values out.

It is what makes a save resumable. A shard that is done stays done when the save is tried again. Of one that was broken off, the files whose
bytes have not changed stay.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvemb.checkpoint.format.checkpoint_manifest import BaseCheckpoint, CheckpointManifest, Cut, FileEntry, SavedTable
from kvemb.checkpoint.format.manifest_json import MAX_FILES, file_fields, read_cut, read_file, read_hex
from kvemb.checkpoint.format.strict_json import decode, encode
from kvemb.errors import CheckpointError, InvalidInputError
from kvemb.schema.table_def import TableDef

FORMAT = "kvemb-checkpoint-shard"


@dataclass(frozen=True)
class Fragment:
    """What one shard has finished of a save.

    Args:
        save_id: of the save.
        cut: where the shard was cut.
        done: whether `files` are all there are.
        tables: definition and optimizer step of every table at the cut.
        files: finished files.
    """

    save_id: str
    cut: Cut
    done: bool
    tables: tuple[tuple[TableDef, int], ...]
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class SaveInfo:
    """What is the same for all shards of a save; see `CheckpointManifest`."""

    save_id: str
    cluster: str
    cluster_id: str
    created_s: int
    weights_only: bool
    base: BaseCheckpoint | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    slots: tuple[int, ...] = ()


def encode_fragment(fragment: Fragment) -> bytes:
    """Return the bytes of a fragment."""
    cut = fragment.cut
    return encode(
        {
            "format": FORMAT,
            "save_id": fragment.save_id,
            "cut": {"shard": cut.shard, "epoch": cut.epoch, "k": cut.k},
            "done": fragment.done,
            "tables": [{"definition": definition.to_dict(), "step": step} for definition, step in fragment.tables],
            "files": [file_fields(file) for file in fragment.files],
        }
    )


def decode_fragment(data: bytes, where: str) -> Fragment:
    """Read a fragment.

    Raises:
        CheckpointError: damaged or of another format.
    """
    fields = decode(data, where).only("format", "save_id", "cut", "done", "tables", "files")
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT))
    tables = []
    for item in fields.objects("tables", MAX_FILES):
        try:
            tables.append((TableDef.from_dict(item.only("definition", "step").object("definition")), item.integer("step", 0, 1 << 53)))
        except (InvalidInputError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise item.wrong("definition", f"a table definition ({error})") from error
    cut = fields.maybe("cut")
    if cut is None:
        raise fields.wrong("cut", "a cut")
    files = tuple(read_file(item) for item in fields.objects("files", MAX_FILES))
    return Fragment(read_hex(fields, "save_id"), read_cut(cut), fields.flag("done"), tuple(tables), files)


def assemble(info: SaveInfo, fragments: Iterable[Fragment]) -> CheckpointManifest:
    """Put the shards' shares together. A number of which there is none is of a shard that has left: it has no rows.

    Raises:
        CheckpointError: a shard is not done, one that has slots is missing, or the shards do not have the same tables.
    """
    found = {share.cut.shard: share for share in fragments}
    some = min(found.values(), key=lambda share: share.cut.shard)
    gone = tuple((definition, 0) for definition, _ in some.tables)
    shares = [found.get(number, Fragment(info.save_id, Cut(number, 0, 0), True, gone, ())) for number in range(max(found) + 1)]
    for number, share in enumerate(shares):
        missing = number not in found and number in (info.slots[1::2] or range(len(shares)))
        if missing or not share.done or share.save_id != info.save_id:
            raise CheckpointError(f"save {info.save_id}: shard {number} is not done")
    by_name = [{definition.name: (definition, step) for definition, step in share.tables} for share in shares]
    names = sorted({name for tables in by_name for name in tables})
    for number, tables in enumerate(by_name):
        lacking = [name for name in names if name not in tables]
        if lacking:  # a table that was created while the save began
            raise CheckpointError(f"save {info.save_id}: shard {number} did not know table {lacking[0]!r} yet; save again")
        if any(tables[name][0].key != by_name[0][name][0].key for name in names):
            raise CheckpointError(f"save {info.save_id}: a table was dropped and created again while the save began; save again")
    return CheckpointManifest(
        save_id=info.save_id, cluster=info.cluster, cluster_id=info.cluster_id, created_s=info.created_s, weights_only=info.weights_only,
        cuts=tuple(share.cut for share in shares),
        tables=tuple(SavedTable(by_name[0][name][0], tuple(tables[name][1] for tables in by_name)) for name in names),
        files=tuple(sorted((file for share in shares for file in share.files), key=_file_order)),
        base=info.base, extra=dict(info.extra), slots=info.slots,
    )  # fmt: skip


def _file_order(file: FileEntry) -> tuple[str, str, int, int]:
    return file.table, file.role, file.shard, file.part
