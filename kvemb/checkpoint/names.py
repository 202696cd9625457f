"""Names of things under a checkpoint's URL. Pure.

Every path in a checkpoint follows from table, shard and part, so a manifest that names any other path is refused, and a path can neither
leave the checkpoint nor hide in it.
"""

import re

from kvemb.errors import InvalidInputError

MANIFEST = "manifest.json"
SAVING = "saving.json"
ROWS, ERASED, IDS = "rows", "erased", "ids"
ROLES = (ROWS, ERASED, IDS)
_SUBFOLDERS = {ROWS: "", ERASED: "_erased/", IDS: "_ids/"}  # readers of whole folders (Arrow, Spark) pass over names with _
_NAME = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,254}")


def table_folder(table: str) -> str:
    """Return the folder of a table: its name, but for names that mean something else to file systems or readers of folders.

    Example:
        >>> table_folder("user"), table_folder(".."), table_folder("_x"), table_folder("manifest.json")
        ('user', '%2E.', '%5Fx', '%6Danifest.json')
    """
    plain = table[0] not in "._" and not table.endswith(".json")
    return table if plain else f"%{ord(table[0]):02X}{table[1:]}"


def part_path(table: str, shard: int, part: int, role: str = ROWS) -> str:
    """Return the path of a data file below the checkpoint's URL.

    Example:
        >>> part_path("user", 1, 0), part_path("user", 0, 2, ERASED)
        ('user/shard-1-part-0.parquet', 'user/_erased/shard-0-part-2.parquet')
    """
    return f"{table_folder(table)}/{_SUBFOLDERS[role]}shard-{shard}-part-{part}.parquet"


def fragment_path(shard: int) -> str:
    """Return the path of what one shard has finished while a save is under way."""
    return f"shard-{shard}.json"


def check_name(name: object) -> str:
    """Return the name of a checkpoint among its siblings, or refuse it: one step of a path, without tricks.

    Raises:
        InvalidInputError: anything else.

    Example:
        >>> check_name("step-1000")
        'step-1000'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"checkpoint name {name!r}: use 1 to 255 characters out of A-Z a-z 0-9 . _ = + @ -, no dot in front")
    return name
