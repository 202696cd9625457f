"""Which kvemb this process runs: shards and clients compare it."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the installed version, "" in a source tree that was never installed."""
    try:
        return version("kvemb")
    except PackageNotFoundError:
        return ""
