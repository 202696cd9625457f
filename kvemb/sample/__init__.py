"""Rows of a table drawn at random."""
