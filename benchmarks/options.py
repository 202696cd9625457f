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
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def fraction(text: str) -> float:
    """Read a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def positive(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
