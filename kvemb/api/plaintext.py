"""Prevents plain text over a network by accident: a section without `tls` has addresses of this machine, or says `insecure: true`.

Called where a process starts to use a cluster.
"""

import logging

from kvemb.config import Config
from kvemb.errors import ConfigError
from kvemb.net.name_lookup import is_loopback

log = logging.getLogger("kvemb")
_WHAT = {"storage": "rows and passwords", "parameter_servers": "gradients, and orders to erase or load,"}


def require_encrypted(config: Config, listen: str = "") -> None:
    """Refuse plain text beyond this machine, unless the file says `insecure: true`; then say so loudly."""
    sections = (("storage", config.storage, config.storage.nodes), ("parameter_servers", config.servers, config.servers.shards))
    for at, section, addresses in sections:
        asked = [*addresses, *([listen] if listen and at == "parameter_servers" else [])]
        beyond = [address for address in asked if not is_loopback(address)]
        if section.tls is not None or not beyond:
            continue
        if not section.insecure:
            raise ConfigError(
                f"{at}.tls: missing, and {beyond[0]} is not an address of this machine's own: {_WHAT[at]} would go over the network in the "
                f"clear, for anybody to read and to send. Give {at}.tls (docs/security.md), or, on a network that nothing else reaches, "
                f"{at}.insecure: true"
            )
        log.warning(
            "INSECURE: %s.insecure is true: %s go to %s unencrypted; any machine that reaches it may do all", at, _WHAT[at], beyond[0]
        )
