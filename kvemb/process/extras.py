"""Libraries that only some verbs need: imported on first use, or named with the command that installs them, also beside a clone."""

import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any

from kvemb.errors import ConfigError

_OF_EXTRA = re.compile(r"""^([^;]+?)\s*;.*extra\s*==\s*['"]([\w-]+)['"]""")


def require_extra(module: str, *, what: str = "checkpoints and files of other programs", extra: str = "checkpoint") -> Any:
    """Import a module of a library that an extra of kvemb installs."""
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(lacks(module.partition(".")[0], what=what, extra=extra)) from None


def lacks(name: str, *, what: str, extra: str) -> str:
    """Say that a library is missing, in which environment, and how it gets there."""
    return f"{what} need {name}, not installed in {sys.prefix}: {install_line(extra)}"


def missing_for_checkpoints() -> str:
    """Say what this process lacks for saves and loads; "" for nothing. Imports nothing: a shard needs them when it saves."""
    absent = [name for name in ("pyarrow", "fsspec") if find_spec(name) is None]
    return lacks(" and ".join(absent), what="saves and loads", extra="checkpoint") if absent else ""


def install_line(extra: str) -> str:
    """Return the command that installs what an extra names: its packages, and not kvemb itself, which may come from a clone."""
    try:
        found = [_OF_EXTRA.match(line) for line in requires("kvemb") or ()]
    except PackageNotFoundError:  # run from a checkout that was not installed
        found = []
    packages = [f"'{one[1]}'" for one in found if one and one[2] == extra]
    return f"pip install {' '.join(packages) or extra}"
