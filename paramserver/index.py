"""The row index: every existing id of one table on this shard, with the version its row must have (`kvemb.row_index`)."""

from kvemb.row_index import RowIndex

__all__ = ["RowIndex"]
