"""Where storage nodes are now: kvemb.yaml, read again by a process that runs on while a node is replaced at another address.

The one place that says where addresses come from while a program runs. Whether a node found there is the one it should be, its marker
says (`kvemb.stores`). What must not live here: anything about connections.
"""

import os
import time

from kvemb.config import Config, load
from kvemb.errors import ConfigError

_PAUSE_S = 1.0


class NodesInFile:
    """Tells the storage nodes' addresses by a kvemb.yaml as it is now. Thread-safe: at worst two threads read the file at once.

    Args:
        source: path or file:// URL.
        config: what it held when the program connected.
    """

    def __init__(self, source: str | os.PathLike[str], config: Config) -> None:
        text = os.fspath(source)
        self._source = text if "://" in text else os.path.abspath(text)  # the program may go to another folder
        self._config = config
        self._known = config.storage.nodes, ""
        self._read_at = float("-inf")

    def __call__(self) -> tuple[str, ...]:
        """Return the addresses, read at most a second ago.

        Raises:
            ConfigError: the file cannot be used, or says more than that nodes are at other addresses.
        """
        if time.monotonic() - self._read_at >= _PAUSE_S:
            self._known = self._read()
            self._read_at = time.monotonic()
        nodes, trouble = self._known
        if trouble:
            raise ConfigError(trouble)
        return nodes

    def _read(self) -> tuple[tuple[str, ...], str]:
        """Return the addresses, or why there are none."""
        before = self._config
        try:
            now = load(self._source, os.environ)
        except ConfigError as error:  # perhaps somebody is writing it
            return (), f"kvemb.yaml was read again for the nodes' addresses, and cannot be used: {error}"
        got, expected = ((c.cluster, c.storage.kind) for c in (now, before))
        if got != expected:
            return (), (
                f"{self._source} was read again for the nodes' addresses: (cluster, storage kind) is {got!r}, "
                f"expected {expected!r}. A program that runs follows nodes to other addresses only: put it back, or connect again."
            )
        return now.storage.nodes, ""
