"""Parse libsvm/libfm text: `label id:value id:value …`, any number of features per line. Files are opened by `readers`."""

import re

import numpy as np
from numpy.typing import NDArray

from deepfm.clicks import Clicks
from kvemb.errors import InvalidInputError

_COMMENT = re.compile(rb"#[^\n]*")


def parse(block: bytes, path: str, first_line: int) -> Clicks:
    """Parse whole lines; blank ones are skipped, and what follows a # is a comment.

    Args:
        block: text in which every line ends with a newline.
        path, first_line: where the block stands, for messages.

    Raises:
        InvalidInputError: naming file, line and what is wrong with it.

    Example:
        >>> log = parse(b"-1 3:1 7:0.5\\n+1 3:2\\n", "train.txt", 1)
        >>> log.labels.tolist(), log.offsets.tolist(), log.ids.tolist(), log.values.tolist()
        ([0.0, 1.0], [0, 2, 3], [3, 7, 3], [1.0, 0.5, 2.0])
    """
    text = _COMMENT.sub(b"", block) if b"#" in block else block
    parsed = _parse(text)
    if parsed is None:
        raise _blame(text, path, first_line)
    return parsed


def _parse(text: bytes) -> Clicks | None:
    """Parse text, or return None if any of it is malformed."""
    raw = np.frombuffer(text, np.uint8)
    blank = raw <= ord(" ")
    begins = np.flatnonzero(~blank & np.concatenate([np.ones(1, np.bool_), blank[:-1]])) if len(raw) else np.empty(0, int)
    line_of = np.searchsorted(np.flatnonzero(raw == ord("\n")), begins)
    is_label = np.diff(line_of, prepend=-1) != 0
    colons = np.flatnonzero(raw == ord(":"))
    colons_before = np.searchsorted(colons, np.append(begins, len(raw)))
    words = np.array(text.replace(b":", b" ").split(), dtype=np.bytes_)
    # As many words as that only if neither side of a colon is empty.
    if (np.diff(colons_before) != ~is_label).any() or len(words) != len(begins) + len(colons):
        return None
    word_of = np.arange(len(begins)) + colons_before[:-1]
    try:
        labels = words[word_of[is_label]].astype(np.float64)
        ids = words[word_of[~is_label]].astype(np.int64)
        with np.errstate(over="ignore"):
            values = words[word_of[~is_label] + 1].astype(np.float32)
    except (ValueError, OverflowError):
        return None
    if not (np.isin(labels, (-1, 0, 1)).all() and np.isfinite(values).all()):
        return None
    return Clicks((labels > 0).astype(np.float32), _offsets(is_label), ids, values)


def _offsets(is_label: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where the features of each line begin, from which words are labels."""
    at = np.append(np.flatnonzero(is_label), len(is_label))
    return (at - np.arange(len(at))).astype(np.int64)


def _blame(text: bytes, path: str, first_line: int) -> InvalidInputError:
    """Find the first bad line and say what is wrong with it."""
    for number, line in enumerate(text.split(b"\n"), first_line):
        if _parse(line + b"\n") is None:
            return InvalidInputError(f"{path}:{number}: {_fault(line)}")
    raise AssertionError("a block is malformed, but none of its lines is")


def _fault(line: bytes) -> str:
    label, *features = line.decode("utf-8", "replace").split()
    if label not in ("0", "1", "-1", "+1") and _parse(label.encode() + b"\n") is None:
        return f"label {label!r}, expected 0 or 1, or -1 or 1"
    for feature in features:
        if _parse(f"0 {feature}\n".encode()) is None:
            return f"feature {feature!r}, expected id:value, a 64-bit integer and a finite number"
    return f"malformed: {line[:60]!r}"
