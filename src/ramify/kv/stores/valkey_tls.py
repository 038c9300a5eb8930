"""TLS to a shared store: its options, read at the start, and what goes wrong in words with a way out."""

from __future__ import annotations

import ssl
from typing import Any

from ramify.errors import ConfigError
from ramify.reasons import reason_of

_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_OPTIONS = (*_FILES, "ssl_password", "ssl_ciphers", "ssl_cert_reqs", "ssl_check_hostname")
# Of X509_verify_cert; the ssl module has no names for them.
_NOT_YET_VALID, _EXPIRED = 9, 10
_OTHER_NAME = frozenset({62, 64})
_UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21})
_PLAIN_SERVER = frozenset(
    {"WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}
)
_WANTS_CERTIFICATE = frozenset(
    {
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
    }
)
NO_HANDSHAKE = "it does not answer to TLS; name its port for TLS, or use valkey:// for a plain one"
CERTIFICATE_WANTED = "ssl_certfile=FILE&ssl_keyfile=FILE in the URL's query"


def take_context(arguments: dict[str, Any], url: str) -> ssl.SSLContext:
    """The context of all connections, of the options of a URL's query, which leave `arguments`.

    The certificate is verified, and so is the name in it, unless `ssl_cert_reqs=none` or
    `ssl_check_hostname=false`.

    Args:
        url: as it is shown.

    Raises:
        ConfigError: an unknown option, a file that cannot be read, or values that contradict each other.
    """
    given = {name: arguments.pop(name) for name in [*arguments] if name.startswith("ssl_")}
    unknown = sorted(given.keys() - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"the store {url!r} has the option {unknown[0]!r}; those of TLS are {', '.join(_OPTIONS)}"
        )
    requirement = given.get("ssl_cert_reqs", "required")
    if requirement not in ("none", "required"):
        raise ConfigError(
            f"the store {url!r} has ssl_cert_reqs={requirement!r}; it is none or required"
        )
    is_verified = requirement == "required"
    context = ssl.create_default_context()
    context.check_hostname = is_verified and given.get("ssl_check_hostname") is not False
    context.verify_mode = ssl.CERT_REQUIRED if is_verified else ssl.CERT_NONE
    try:
        if "ssl_certfile" in given or "ssl_keyfile" in given:
            # Without a file of the key it is in that of the certificate; a password is never asked for.
            context.load_cert_chain(
                given.get("ssl_certfile", ""),
                given.get("ssl_keyfile"),
                lambda: given.get("ssl_password", ""),
            )
        if "ssl_ca_certs" in given or "ssl_ca_path" in given:
            context.load_verify_locations(given.get("ssl_ca_certs"), given.get("ssl_ca_path"))
        if "ssl_ciphers" in given:
            context.set_ciphers(given["ssl_ciphers"])
    except (OSError, ValueError) as error:
        files = ", ".join(f"{name}={given[name]}" for name in _FILES if name in given)
        raise ConfigError(
            f"the store {url!r} cannot use TLS with {files or 'its options'}: {reason_of(error)}; name files in "
            "PEM that this user can read"
        ) from error
    return context


def explain(error: BaseException, host: str) -> str:
    """What went wrong in a handshake, and the way out; empty: nothing of TLS did."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _explain_certificate(cause, host)
    if cause.reason in _PLAIN_SERVER:
        return "it does not speak TLS; name its port for TLS, or use valkey:// for a plain one"
    if cause.reason in _WANTS_CERTIFICATE:
        return (
            f"it refuses this client's certificate, or the lack of one ({cause.reason}); give "
            f"{CERTIFICATE_WANTED}"
        )
    return f"TLS has failed: {cause.reason or cause}"


def _explain_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    code, text = error.verify_code, error.verify_message
    if code in _OTHER_NAME:
        return f"its certificate is not for {host} ({text}); use the name that is in it"
    if code == _EXPIRED:
        return (
            f"its certificate is no longer valid ({text}); renew it, or check this machine's clock"
        )
    if code == _NOT_YET_VALID:
        return f"its certificate is not valid yet ({text}); check this machine's clock"
    if code in _UNKNOWN_AUTHORITY:
        return (
            f"its certificate is of an authority that is not trusted here ({text}); give "
            "ssl_ca_certs=FILE in the URL's query"
        )
    return f"its certificate is refused: {text}"
