"""A small certificate authority for trials and tests: keys and certificates as files. Needs the extra `certificates`.

Nothing here is for production: keys, the authority's too, lie in one folder, unencrypted.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvemb.errors import ConfigError

_DAY = datetime.timedelta(days=1)
_OWN_DAYS = 365.0
_FOR = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


class Issued:
    """A certificate and its key, as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.cert, self.key = folder / f"{name}.crt", folder / f"{name}.key"


class Authority:
    """Issues certificates into a folder, by the authority of that name there, if there is one: no process must trust a new one."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ca, key = folder, folder / f"{name}.pem", folder / f"{name}.key"
        self._subject = _name(f"authority {name}")
        if self.ca.exists():
            self._key = _own_key(self.ca, key)
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = {**dict.fromkeys(_USAGES, False), "key_cert_sign": True, "crl_sign": True}
        builder = _builder(self._subject, self._subject, self._key, _OWN_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        _replace(key, _pem(self._key))
        _replace(self.ca, builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *uris: str,
        purposes: tuple[str, ...] = ("client", "server"),
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        days: float = 30.0,
    ) -> Issued:
        """Write NAME.crt and NAME.key; over those that are there, each in one step, as a rotation does."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [_host(host) for host in hosts]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(_name(name), self._subject, key, days).add_extension(signer, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([_FOR[purpose] for purpose in purposes]), critical=False)
        issued = Issued(self.folder, name)
        _replace(issued.key, _pem(key))
        _replace(issued.cert, builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return issued


_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign",
    "encipher_only", "decipher_only",
)  # fmt: skip


def _own_key(ca: Path, path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{ca} is an authority whose key cannot be read from {path}: {error}. Nothing was changed; take another folder"
        ) from error
    found = x509.load_pem_x509_certificate(ca.read_bytes()).public_key()
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != found:
        raise ConfigError(f"{ca} is an authority of another key than {path}. Nothing was changed; take another folder")
    return key


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    last = datetime.datetime.now(datetime.UTC) + days * _DAY
    first = min(datetime.datetime.now(datetime.UTC), last) - _DAY
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(first).not_valid_after(last)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(path.suffix + ".new")
    new.unlink(missing_ok=True)
    new.touch(0o600 if path.suffix == ".key" else 0o644, exist_ok=False)
    new.write_bytes(data)
    new.replace(path)
