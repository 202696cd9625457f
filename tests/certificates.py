"""A certificate authority of the tests: keys and certificates as files, made when they are asked for.

Nothing here is for production: keys lie in the test's folder, unencrypted.
"""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)
_FOR = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


class Issued:
    """A certificate and its key, as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.cert, self.key = folder / f"{name}.crt", folder / f"{name}.key"


class Authority:
    """Issues certificates into a folder.

    Args:
        folder: for its files.
        name: of the authority: two are two.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {name}")])
        builder = _valid(x509.CertificateBuilder().subject_name(subject).issuer_name(subject), expired=False)
        builder = builder.public_key(self._key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._subject = subject
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *uris: str,
        purposes: tuple[str, ...] = ("client", "server"),
        hosts: tuple[str, ...] = ("127.0.0.1", "localhost"),
        expired: bool = False,
    ) -> Issued:
        """Write NAME.crt and NAME.key; over those that are there, each in one step, as a rotation does.

        Args:
            name: of the files, and the common name.
            uris: subject alternative names, who and what the holder may be.
            purposes: what it may be used for.
            hosts: names and addresses at which the holder may serve.
            expired: whether its time is over.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(host) if host[0].isalpha() else x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
        builder = _valid(x509.CertificateBuilder().subject_name(subject).issuer_name(self._subject), expired=expired)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([_FOR[purpose] for purpose in purposes]), critical=False)
        issued = Issued(self.folder, name)
        pkcs8 = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        _replace(issued.key, key.private_bytes(serialization.Encoding.PEM, *pkcs8))
        _replace(issued.cert, builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return issued


def _valid(builder: x509.CertificateBuilder, *, expired: bool) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    first, last = (now - 2 * _DAY, now - _DAY) if expired else (now - _DAY, now + 30 * _DAY)
    return builder.not_valid_before(first).not_valid_after(last)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(path.suffix + ".new")
    new.touch(0o600 if path.suffix == ".key" else 0o644)
    new.write_bytes(data)
    new.replace(path)
