"""Texts that a client keeps and sends back without reading them: `encrypted_content` of items.

They are encoded, not encrypted: the client may know its own conversation. A client that makes one
up gains nothing, as it could send the text itself.
"""

from __future__ import annotations

import base64

PREFIX = "ramify1."  # tells our texts from those of other servers, which are skipped


def encode_opaque(text: str) -> str:
    """Encode a text as ASCII."""
    return PREFIX + base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()


def decode_opaque(encoded: str) -> str | None:
    """The text of `encode_opaque`; None if this server did not encode it."""
    if not encoded.startswith(PREFIX):
        return None
    try:
        raw = base64.b64decode(encoded[len(PREFIX) :].encode(), altchars=b"-_", validate=True)
        return raw.decode()
    except ValueError:
        return None
