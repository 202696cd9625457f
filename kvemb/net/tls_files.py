"""Keys and certificates as they are in their files now: read again when a file changes, which is how they are renewed without a stop."""

import os
import time
from pathlib import Path

from kvemb.errors import ConfigError
from kvemb.net.tls_config import TlsConfig

_LOOK_S = 1.0
Stamp = tuple[tuple[int, int, int], ...]


class TlsFiles:
    """The files of a section `tls`. Thread-safe: at worst two threads look at once."""

    def __init__(self, config: TlsConfig, at: str) -> None:
        self.config, self.at = config, at
        self._stamp: Stamp = ()
        self._looked_s = float("-inf")

    def stamp(self) -> Stamp:
        """Return a value that changes with the files, read once a second at most; a file missing amid its renewal leaves it as it was."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            try:
                self._stamp = tuple(_stamp_of(path) for path in self._paths())
            except OSError:
                if not self._stamp:
                    self._stamp = ((0, 0, 0),)
        return self._stamp

    def require_own(self, who: str) -> None:
        """Raise unless this process has a certificate."""
        if not self.config.own:
            raise ConfigError(
                f"{self.at}.cert: {who} needs a certificate and its key; give cert and key, or cert_env and key_env, and set those."
                f"{self.config.lacks}"
            )
        for name in ("ca", "cert", "key"):
            self.read(name)

    def read(self, name: str) -> bytes | None:
        """Return a file's content ("ca", "cert", "key"); None where none is named."""
        path = getattr(self.config, name)
        if path is None:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.at}.{name}: {path}: {error.strerror}") from error

    def tokens(self) -> tuple[str, ...]:
        """Return the tokens that are good now, the one to show first."""
        if self.config.token is not None:
            return (self.config.token,)
        assert self.config.token_file is not None
        try:
            lines = Path(self.config.token_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.at}.token_file: {self.config.token_file}: {getattr(error, 'strerror', None) or 'not text'}"
            ) from error
        if not lines:
            raise ConfigError(f"{self.at}.token_file: {self.config.token_file}: holds no token; one a line")
        return tuple(lines)

    def _paths(self) -> list[str]:
        config = self.config
        return [path for path in (config.ca, config.cert, config.key, config.token_file) if path is not None]


def _stamp_of(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino
