"""Bridges of frameworks that are not installed here, and what hands them on, are left out of the search for doctests."""

from importlib.util import find_spec

_ABSENT = [name for name in ("jax", "keras", "tensorflow", "torch") if find_spec(name) is None]
collect_ignore_glob = [pattern for name in _ABSENT for pattern in (f"trainer/{name}/*", f"kvemb/{name}.py")]
