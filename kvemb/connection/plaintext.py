"""Nothing goes over a network in the clear by accident: where a section has no `tls`, its addresses are of this machine, or it says so.

Called where a process starts to use a cluster. What must not live here: connections.
"""

import ipaddress
import logging

from kvemb.config import Config
from kvemb.errors import ConfigError

log = logging.getLogger("kvemb")
_WHAT = {"storage": "rows and passwords", "parameter_servers": "gradients, and orders to erase or load,"}


def require_encrypted(config: Config, listen: str = "") -> None:
    """Refuse plain text beyond this machine, unless the file says `insecure: true`; then say so loudly.

    Args:
        config: the whole kvemb.yaml.
        listen: where a shard listens, when that is not its address in the file.

    Raises:
        ConfigError: naming the section, the address, and both ways out.
    """
    sections = (("storage", config.storage, config.storage.nodes), ("parameter_servers", config.servers, config.servers.shards))
    for at, section, addresses in sections:
        asked = [*addresses, *([listen] if listen and at == "parameter_servers" else [])]
        beyond = [address for address in asked if not is_loopback(address)]
        if section.tls is not None or not beyond:
            continue
        if not section.insecure:
            raise ConfigError(
                f"{at}.tls: missing, and {beyond[0]} is not an address of this machine's own: {_WHAT[at]} would go over the network in the "
                f"clear, for anybody to read and to send. Give {at}.tls (docs/security.md), or, on a network that nobody else reaches, "
                f"{at}.insecure: true"
            )
        log.warning(
            "INSECURE: %s.insecure is true: %s go to %s unencrypted, and whoever reaches it may do anything", at, _WHAT[at], beyond[0]
        )


def is_loopback(address: str) -> bool:
    """Whether "host:port" cannot be reached from other machines.

    Example:
        >>> is_loopback("127.0.0.1:7070"), is_loopback("[::1]:7070"), is_loopback("0.0.0.0:7070"), is_loopback("ps-0:7070")
        (True, True, False, False)
    """
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
