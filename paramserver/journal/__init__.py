"""A shard's journal: the changes that it has promised to apply, on local disk before the promise."""

from .entry import BatchEntry, Entry, EventEntry, SessionEntry, Watermark, decode_entry, encode_entry
from .log_reader import last_batch
from .segment import START, Position
from .write_ahead_log import Journal

__all__ = [
    "START",
    "BatchEntry",
    "Entry",
    "EventEntry",
    "Journal",
    "Position",
    "SessionEntry",
    "Watermark",
    "decode_entry",
    "encode_entry",
    "last_batch",
]
