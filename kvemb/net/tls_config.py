"""The sections `tls` of kvemb.yaml: which files hold keys and certificates, and the token of clients without any. Reads no file.

Different processes hold different certificates. So a section names the same path on every machine, or the environment variable that names
it where several of them share a machine. Secrets are in no repr.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvemb.errors import ConfigError

_FILES = ("ca", "cert", "key")


@dataclass(frozen=True)
class TlsConfig:
    """A section `tls`, checked."""

    ca: str | None = None  # file with the certificates of trusted authorities; None for those that the system trusts
    # cert, key: files with this process's own certificate (and those between it and the authority) and its private key. In the file,
    # `cert_env` and `key_env` name environment variables that hold the paths instead.
    cert: str | None = None
    key: str | None = None
    # shown to shards in a certificate's place, from the environment variable that `token_env` names
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None  # the same in a file, read again when it changes. Shards take every line of it, others show the first.
    unset: tuple[str, ...] = ()  # the environment variables that `cert_env` and `key_env` name, and that are not set

    @property
    def lacks(self) -> str:
        """A sentence on variables that are not set, to stand after an error that this may explain; "" for none."""
        return f" Environment variables that are not set: {', '.join(self.unset)}." if self.unset else ""

    @property
    def has_token(self) -> bool:
        """Whether clients show a token instead of a certificate."""
        return self.token is not None or self.token_file is not None

    @property
    def own(self) -> tuple[str, ...]:
        """The files with this process's certificate and key; none where it has none."""
        return () if self.cert is None or self.key is None else (self.cert, self.key)

    def starting_at(self, folder: Path) -> "TlsConfig":
        """Return the same with relative paths taken from a folder."""
        paths = {name: getattr(self, name) for name in (*_FILES, "token_file")}
        moved: dict[str, Any] = {name: str(folder / path) for name, path in paths.items() if path is not None}
        return replace(self, **moved)


def parse_tls(section: object, at: str, environ: Mapping[str, str], *, tokens: bool) -> TlsConfig | None:
    """Check a section `tls`."""
    if section is None:
        return None
    known = {"ca", "cert", "key", "cert_env", "key_env"} | ({"token_env", "token_file"} if tokens else set())
    if not isinstance(section, Mapping):
        raise ConfigError(f"{at}: got {type(section).__name__}, expected a mapping with {', '.join(sorted(known))}")
    for key, value in section.items():
        if key not in known:
            raise ConfigError(f"{at}.{key}: unknown key; known here: {', '.join(sorted(known))}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{at}.{key}: got {type(value).__name__}, expected text")
    for name in ("cert", "key", "token"):
        if (name in section and f"{name}_env" in section) or (name == "token" and {"token_env", "token_file"} <= set(section)):
            raise ConfigError(f"{at}.{name}_env: give the one or the other, not both")
    if tokens and "ca" not in section:
        raise ConfigError(f"{at}.ca: missing; give the file of the authority that signed the shards' certificates")
    # An unset variable is no error yet: a client with a token needs no certificate, and shards are told what they lack.
    cert, key = (section.get(name) or environ.get(section.get(f"{name}_env", ""), None) for name in ("cert", "key"))
    if (cert is None) != (key is None):
        raise ConfigError(f"{at}: a certificate and its key go together; got {'cert' if cert else 'key'} alone")
    named = (section[name] for name in ("cert_env", "key_env") if name in section)
    unset = tuple(name for name in named if name not in environ)
    return TlsConfig(section.get("ca"), cert, key, _token(section, at, environ), section.get("token_file"), unset)


def _token(section: Mapping[str, str], at: str, environ: Mapping[str, str]) -> str | None:
    if "token_env" not in section:
        return None
    name = section["token_env"]
    if not environ.get(name):
        raise ConfigError(f"{at}.token_env: the environment variable {name} is not set")
    return environ[name]
