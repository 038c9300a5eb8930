"""Who may talk to a replica: a shared secret, certificates of both sides, or this machine only."""

from __future__ import annotations

import hmac
import ipaddress
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import Struct

from ramify.errors import ConfigError, MissingPackageError
from ramify.reasons import reason_of

SECRET_HEADER = "ramify-secret"  # noqa: S105 - a name
MIN_SECRET_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What both sides of a connection show each other.

    Args:
        secret: the same text at both sides; sent with each connection, so use certificates as well
            where others can read the network.
        certificate, key, authority: PEM of this side's certificate, its key, and of the authority
            that signed the certificates of both sides. All or none.
        name: that certificates of replicas have, in place of the address of each.

    Raises:
        ConfigError: a secret is too short or cannot be sent, or certificates are incomplete.
    """

    secret: str | None = field(default=None, repr=False)
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authority: bytes | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.secret is not None and len(self.secret) < MIN_SECRET_CHARS:
            raise ConfigError(
                f"the cluster's secret has {len(self.secret)} characters, but at least "
                f"{MIN_SECRET_CHARS} are needed; make one with `openssl rand -hex 32`"
            )
        if self.secret is not None and not (self.secret.isascii() and self.secret.isprintable()):
            raise ConfigError(
                "the cluster's secret is not one line of printable ASCII, which is all that a "
                "connection can send; make one with `openssl rand -hex 32`"
            )
        pems = {"certificate": self.certificate, "key": self.key, "authority": self.authority}
        missing = [name for name, pem in pems.items() if pem is None]
        if missing and len(missing) < len(pems):
            raise ConfigError(
                f"TLS needs certificate, key and authority, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; give all three or none"
            )
        if self.name is not None and missing:
            raise ConfigError(
                f"{self.name!r} is the name of replicas' certificates, but without certificate, key and "
                "authority none are shown; give all three, or no name"
            )

    @classmethod
    def from_files(
        cls,
        secret: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        authority: Path | None = None,
        *,
        name: str | None = None,
    ) -> Credentials:
        """Credentials that are read from files.

        Args:
            name: see the class.

        Raises:
            ConfigError: a file cannot be read, or holds no certificate or key, or another key than that
                of the certificate; else as the class.
        """
        try:
            credentials = cls(
                secret=None if secret is None else secret.read_text("utf-8").strip(),
                certificate=None if certificate is None else certificate.read_bytes(),
                key=None if key is None else key.read_bytes(),
                authority=None if authority is None else authority.read_bytes(),
                name=name,
            )
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"a file of the cluster's credentials cannot be read: {reason_of(error)}"
            ) from error
        if certificate is not None and key is not None and authority is not None:
            _check_files(certificate, key, authority)
        return credentials

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted, and both sides show certificates."""
        return self.certificate is not None

    def check_address(self, host: str) -> None:
        """Refuse to listen where others can connect, without anything that keeps them out.

        Raises:
            ConfigError: the address is not of this machine only, and there are no credentials.
        """
        if self.secret is None and not self.has_tls and not is_loopback(host):
            raise ConfigError(
                f"a replica at {host} would compute for everybody who can reach it; give it a secret "
                "(--cluster-secret FILE) or certificates, or listen at 127.0.0.1"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a connection sends before its first message."""
        return () if self.secret is None else ((SECRET_HEADER, self.secret),)

    def is_authentic(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Whether a connection has sent the secret, if there is one."""
        if self.secret is None:
            return True
        sent = next((value for name, value in metadata if name == SECRET_HEADER), "")
        text = sent if isinstance(sent, str) else ""
        return hmac.compare_digest(text.encode(), self.secret.encode())

    def server_credentials(self) -> Any:
        """For a replica with certificates, which asks its peers for theirs."""
        grpc = import_grpc()
        assert self.key is not None and self.certificate is not None
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, require_client_auth=True
        )

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """For a connection to a replica: the name that its certificate has."""
        return () if self.name is None else (("grpc.ssl_target_name_override", self.name),)

    def channel_credentials(self) -> Any:
        """For a connection to a replica with certificates."""
        return import_grpc().ssl_channel_credentials(self.authority, self.key, self.certificate)


class TlsFiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths of PEM files, and the `name` of `Credentials`. Each process reads them when it starts."""

    certificate: str
    key: str
    authority: str
    name: str | None = None

    def credentials(self, secret: str | None = None) -> Credentials:
        """The credentials that they hold, with a secret.

        Raises:
            ConfigError: see `Credentials.from_files`.
        """
        paths = (Path(self.certificate), Path(self.key), Path(self.authority))
        return replace(Credentials.from_files(None, *paths, name=self.name), secret=secret)


def _check_files(certificate: Path, key: Path, authority: Path) -> None:
    """Raise ConfigError unless these are PEM, and the key is that of the certificate.

    gRPC says nothing of it: with a wrong file it cannot listen, or no peer can connect.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would else be asked for at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{certificate} and {key} are no certificate in PEM and its key without a password: {error}"
        ) from error
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise ConfigError(f"{authority} is no certificate in PEM: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def import_grpc() -> Any:
    """The package grpc.

    Raises:
        MissingPackageError: it is not installed.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it logs each closed connection
    try:
        import grpc
        import grpc.aio
    except ImportError:
        raise MissingPackageError("grpcio", "cluster") from None
    return grpc
