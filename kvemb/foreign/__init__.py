"""Rows from elsewhere, and for elsewhere: files of other programs, read block by block as rows of a table, and written from them."""
