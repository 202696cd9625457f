"""Checks of numbers given on the command line, for argparse's `type`."""

import argparse
from collections.abc import Callable
from functools import partial


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on.

    Example:
        >>> whole(1)("3")
        3
    """
    return partial(_at_least, least)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value
