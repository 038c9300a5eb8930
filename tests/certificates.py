"""Certificates of an authority that a test makes; needs the package cryptography."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ramify.cluster.credentials import Credentials, TlsFiles


@dataclass(frozen=True)
class Authority:
    """Signs certificates."""

    key: Any
    certificate: Any

    @classmethod
    def make(cls, name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(key, _signed(name, key, name, key, is_authority=True))

    def credentials(
        self, address: str = "127.0.0.1", *, is_expired: bool = False, **others: Any
    ) -> Credentials:
        """Those of a machine at an address; or of machines with a name, whatever their addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        certificate = _signed(
            "machine", key, issuer, self.key, address=address, is_expired=is_expired
        )
        return Credentials(
            certificate=_pem(certificate),
            key=key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            authority=_pem(self.certificate),
            **others,
        )


def write(credentials: Credentials, folder: Path, name: str | None = None) -> TlsFiles:
    """Write credentials to files of a folder, which is made."""
    folder.mkdir()
    for part in ("certificate", "key", "authority"):
        (folder / part).write_bytes(getattr(credentials, part))
    paths = {part: str(folder / part) for part in ("certificate", "key", "authority")}
    return TlsFiles(**paths, name=name)


def _pem(certificate: Any) -> bytes:
    encoded: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return encoded


def _signed(
    name: str,
    key: Any,
    issuer: str,
    issuer_key: Any,
    *,
    is_authority: bool = False,
    address: str | None = None,
    is_expired: bool = False,
) -> Any:
    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2 if is_expired else 0)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if address is not None:
        name_of: Any = x509.DNSName(address)
        if address[0].isdecimal():
            name_of = x509.IPAddress(ipaddress.ip_address(address))
        names = x509.SubjectAlternativeName([name_of])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
