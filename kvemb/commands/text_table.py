"""Rows of text in columns that stand below each other. Pure."""

from collections.abc import Iterable


def text_table(rows: Iterable[tuple[object, ...]]) -> str:
    """Return the lines, each column as wide as its widest cell.

    Example:
        >>> print(text_table([("NAME", "ROWS"), ("user", 3)]))
        NAME  ROWS
        user  3
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts)
