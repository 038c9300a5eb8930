"""Names under which pages are stored: keyed hashes, so that a name tells nothing without the key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

NAME_BYTES = 16
TAG_BYTES = 8
KEY_BYTES = 32


class PageNames:
    """Maps page hashes and tenants to names and tags with a secret key.

    Without the key, whoever reads names cannot test whether a guessed text was stored.

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._pages = hashlib.blake2b(key=key, digest_size=NAME_BYTES, person=b"ramify-page")
        self._tenants = hashlib.blake2b(key=key, digest_size=TAG_BYTES, person=b"ramify-tenant")

    def name(self, page_hash: bytes) -> bytes:
        """16 bytes that name a page."""
        hasher = self._pages.copy()
        hasher.update(page_hash)
        return hasher.digest()

    def names(self, page_hashes: Sequence[bytes]) -> list[bytes]:
        """The name of each page."""
        return [self.name(page_hash) for page_hash in page_hashes]

    def parent_tag(self, parent_hash: bytes) -> bytes:
        """8 bytes of the parent's name, compared at a hit beside the 16 of the page's."""
        return self.name(parent_hash)[:TAG_BYTES]

    def tenant_tag(self, tenant: bytes) -> bytes:
        """8 bytes that tell a tenant's records apart; zeros for no tenant."""
        if not tenant:
            return bytes(TAG_BYTES)
        hasher = self._tenants.copy()
        hasher.update(tenant)
        return hasher.digest()
