"""The shard's cache of records: rows that it wrote lately need not be fetched again (`kvemb.record_cache`).

A shard is the only writer of its rows, so what it wrote is what storage holds, as long as the write was answered; rows of a batch that
was not answered are dropped (`forget`) and fetched. Whole records are kept, with memcached's tokens. Apply thread only.
"""

from kvemb.record_cache import MIN_ROWS, CacheBudget, RecordCache

__all__ = ["MIN_ROWS", "CacheBudget", "RecordCache"]
