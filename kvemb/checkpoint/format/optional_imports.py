"""The two optional libraries, imported on first use: with an error that says how to get them."""

from importlib import import_module
from typing import Any

from kvemb.errors import ConfigError


def require_extra(module: str) -> Any:
    """Import pyarrow, fsspec or a module of theirs.

    Raises:
        ConfigError: it is not installed.

    Example:
        >>> require_extra("fsspec.core").__name__
        'fsspec.core'
        >>> require_extra("pyarrow_of_tomorrow")
        Traceback (most recent call last):
        kvemb.errors.ConfigError: checkpoints need pyarrow_of_tomorrow, which is not installed: pip install 'kvemb[checkpoint]'
    """
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ConfigError(f"checkpoints need {name}, which is not installed: pip install 'kvemb[checkpoint]'") from None
