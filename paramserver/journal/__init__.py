"""A shard's journal: what it has promised to apply, on local disk, before it says so."""

from paramserver.journal.entry import BatchEntry, Entry, SessionEntry, Watermark, decode, encode
from paramserver.journal.journal import Journal
from paramserver.journal.segment import START, Position

__all__ = ["START", "BatchEntry", "Entry", "Journal", "Position", "SessionEntry", "Watermark", "decode", "encode"]
