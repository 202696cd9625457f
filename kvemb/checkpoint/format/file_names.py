"""Names of things under a checkpoint's URL. Pure.

Every path in a checkpoint follows from table, shard and part. So a manifest that names any other path is refused, and a path can neither
leave the checkpoint nor hide in it.
"""

import re
from hashlib import sha256

from kvemb.errors import InvalidInputError

MANIFEST = "manifest.json"
SAVING = "saving.json"
ROWS, ERASED, IDS = "rows", "erased", "ids"
ROLES = (ROWS, ERASED, IDS)
_SUBFOLDERS = {ROWS: "", ERASED: "_erased/", IDS: "_ids/"}  # readers of whole folders (Arrow, Spark) pass over names with _
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_LONGEST_FOLDER = 198  # of what file systems take: 255 bytes, and fewer where they encrypt names
_NAME = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,254}")


def table_folder(table: str) -> str:
    """Return the folder of a table: its name, with %XX for bytes that mean something else to file systems, URLs or readers of folders.

    No two tables share one. What would be longer than a file system takes ends in a digest, behind a "%-" that no other folder has.

    Example:
        >>> table_folder("user"), table_folder(".."), table_folder("_x"), table_folder("manifest.json")
        ('user', '%2E.', '%5Fx', '%6Danifest.json')
        >>> table_folder("user/id + é"), len(table_folder("/" * 255))
        ('user%2Fid%20%2B%20%C3%A9', 182)
    """
    escaped = "".join(letter if letter in _PLAIN else f"%{byte:02X}" for byte in table.encode() for letter in (chr(byte),))
    if table[0] in "._" or table.endswith(".json"):
        escaped = escaped if escaped[0] == "%" else f"%{ord(table[0]):02X}{escaped[1:]}"
    if len(escaped) <= _LONGEST_FOLDER:
        return escaped
    return f"{escaped[: _LONGEST_FOLDER - 50]}%-{sha256(table.encode()).hexdigest()[:32]}"


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
