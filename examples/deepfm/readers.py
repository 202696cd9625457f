"""Read a click log from a libsvm/libfm file or a Criteo-format TSV; gzip if the name ends in .gz.

What must not live here: the model, batches. A file is read in blocks of whole lines; a block is parsed by a few array
operations. If anything in a block is off, its lines are looked at one by one, only to name the first bad one.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from deepfm import criteo, libsvm
from deepfm.clicks import Clicks, concatenate
from kvemb.errors import InvalidInputError

BLOCK_BYTES = 8 << 20
LABELS = (b"0", b"1", b"-1", b"+1")  # a line may hold no features


def read_clicks(path: str | Path) -> Clicks:
    """Read a whole file. The format is recognised by the first line that is not blank.

    Args:
        path: libsvm/libfm (`label id:value …`, labels 0/1 or -1/1, ids any int64, # comments) or Criteo TSV (label, 13
            numbers, 26 categories, tab-separated, empty allowed).

    Raises:
        InvalidInputError: no such file, an unknown format, or a bad line; the message begins with file:line.
    """
    parts: list[Clicks] = []
    parse = None
    n_lines = 0
    try:
        for block in _blocks(Path(path)):
            if parse is None and block.strip():
                parse = _parser_of(block, path, n_lines)
            if parse is not None:
                parts.append(parse(block, str(path), n_lines + 1))
            n_lines += block.count(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    if not parts:
        raise InvalidInputError(f"{path}: holds no lines")
    return concatenate(parts)


def format_of(path: str | Path) -> str:
    """Return "libsvm" or "Criteo", by the first line that is not blank.

    Raises:
        InvalidInputError: no such file, no lines, or neither format.
    """
    n_before = 0
    try:
        for block in _blocks(Path(path)):
            if block.strip():
                return "Criteo" if _parser_of(block, path, n_before) is criteo.parse else "libsvm"
            n_before += block.count(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    raise InvalidInputError(f"{path}: holds no lines")


def _unreadable(path: str | Path, error: Exception) -> InvalidInputError:
    return InvalidInputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _parser_of(block: bytes, path: str | Path, n_before: int) -> Callable[[bytes, str, int], Clicks]:
    """Recognise the format by its first line."""
    lines = block.split(b"\n")
    at = next(number for number, line in enumerate(lines) if line.strip())
    if lines[at].count(b"\t") == criteo.N_COLUMNS - 1:
        return criteo.parse
    label, *features = lines[at].split(b"#")[0].split() or [b"0"]
    if all(b":" in feature for feature in features) and (features or label in LABELS):
        return libsvm.parse
    raise InvalidInputError(
        f"{path}:{n_before + at + 1}: neither 'label id:value …' (libsvm) nor {criteo.N_COLUMNS} tab-separated columns "
        f"(Criteo): {lines[at][:60]!r}"
    )


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield blocks of whole lines, each line with its newline."""
    opener = gzip.open if path.name.endswith(".gz") else open
    with cast(IO[bytes], opener(path, "rb")) as file:
        rest = b""
        while data := file.read(BLOCK_BYTES):
            head, newline, tail = data.rpartition(b"\n")
            if newline:
                yield rest + head + newline
                rest = tail
            else:
                rest += data
        if rest:
            yield rest + b"\n"
