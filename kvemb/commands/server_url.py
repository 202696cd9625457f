"""A server that a verb is given beside the cluster's: redis://[USER@]HOST:PORT, and the environment variable of its password."""

import os
from urllib.parse import urlsplit

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError


def given_server(option: str, url: str, password_env: str) -> tuple[StorageConfig, bool]:
    """Return address and credentials of a server, and whether its connections are encrypted.

    Args:
        option: its name, for messages.
        url: redis://[USER@]HOST[:PORT], or rediss://.
        password_env: names the variable that holds the password; "" for none.

    Raises:
        ConfigError: it is another one, a user has no password, or its variable is not set.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.path.strip("/") or parts.query or parts.password is not None:
        raise ConfigError(f"{option}: give redis://[USER@]HOST:PORT, or rediss://; --password-env names the variable that holds a password")
    if password_env and password_env not in os.environ:
        raise ConfigError(f"--password-env: the environment variable {password_env} is not set")
    if parts.username and not password_env:
        raise ConfigError(f"{option}: user {parts.username!r} has no password: --password-env names the variable that holds it")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = f"{host}:{parts.port or 6379}"
    storage = StorageConfig("redis", (address,), username=parts.username, password=os.environ.get(password_env))
    return storage, parts.scheme == "rediss"
