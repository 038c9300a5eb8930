"""Payloads of records: plain with a checksum, or encrypted, the tag of AES-GCM in its place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from ramify.errors import ConfigError, MissingPackageError
from ramify.kv.stores.page_names import KEY_BYTES
from ramify.kv.stores.segment_format import (
    CHECKSUM_BYTES,
    ENCRYPTED,
    HEADER_BYTES,
    RecordHeader,
    header_fields,
    seed_of,
)
from ramify.reasons import reason_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12
# The nonce, with zeros up to a multiple of 16.
_PREFIX_BYTES = 16
_MIN_KEY_FILE_BYTES = 16
_MAX_KEY_FILE_BYTES = 65536


class PayloadCodec(Protocol):
    """Makes records of pages, and pages of records that it has verified."""

    # Added to the length of a page.
    extra_bytes: int
    flags: int
    # Whether a stored payload is the page itself, so that it can be read to where it belongs.
    in_place: bool

    def encode(
        self, name: bytes, parent_tag: bytes, tenant_tag: bytes, page: memoryview, segment_id: bytes
    ) -> tuple[RecordHeader, Sequence[memoryview | bytes]]:
        """The header of a page's record, and its payload in pieces."""
        ...

    def decode(
        self, header: RecordHeader, stored: memoryview, page: memoryview, segment_id: bytes
    ) -> bool:
        """Verify a payload and write the page; whether it is intact.

        Args:
            stored: the payload, with CHECKSUM_BYTES writable bytes behind it, unless `in_place`
                and `stored` is `page`.
        """
        ...


class PlainPayload:
    """The page itself; the checksum covers the header's fields too, which binds it to its name."""

    extra_bytes = 0
    flags = 0
    in_place = True

    def encode(
        self, name: bytes, parent_tag: bytes, tenant_tag: bytes, page: memoryview, segment_id: bytes
    ) -> tuple[RecordHeader, Sequence[memoryview | bytes]]:
        """See PayloadCodec."""
        fields = header_fields(name, parent_tag, tenant_tag, 0, page.nbytes)
        checksum = _checksum(fields, page, segment_id)
        return RecordHeader(name, parent_tag, tenant_tag, 0, page.nbytes, checksum), [page]

    def decode(
        self, header: RecordHeader, stored: memoryview, page: memoryview, segment_id: bytes
    ) -> bool:
        """See PayloadCodec."""
        fields = header_fields(
            header.name, header.parent_tag, header.tenant_tag, header.flags, header.payload_bytes
        )
        payload = stored[: header.payload_bytes]
        if _checksum(fields, payload, segment_id) != header.checksum:
            return False
        if stored is not page:
            np.copyto(np.frombuffer(page, np.uint8), np.frombuffer(payload, np.uint8))
        return True


def _checksum(fields: bytes, payload: memoryview, segment_id: bytes) -> bytes:
    hasher = xxhash.xxh3_128(fields, seed=seed_of(segment_id))
    hasher.update(payload)
    return hasher.digest()


class EncryptedPayload:
    """AES-256-GCM with a key of each segment and a random nonce before the payload.

    Args:
        cache_key: 32 bytes, of `read_cache_key`.

    Raises:
        MissingPackageError: `cryptography` is not installed.
    """

    extra_bytes = _PREFIX_BYTES
    flags = ENCRYPTED
    in_place = False

    def __init__(self, cache_key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise MissingPackageError("cryptography", "encryption") from error
        self._cipher, self._invalid_tag, self._cache_key = AESGCM, InvalidTag, cache_key

    def _segment_cipher(self, segment_id: bytes) -> AESGCM:
        # A key for each segment keeps the number of random nonces under one key small.
        key = hashlib.blake2b(
            segment_id, key=self._cache_key, digest_size=KEY_BYTES, person=b"ramify-segment"
        ).digest()
        return self._cipher(key)

    def encode(
        self, name: bytes, parent_tag: bytes, tenant_tag: bytes, page: memoryview, segment_id: bytes
    ) -> tuple[RecordHeader, Sequence[memoryview | bytes]]:
        """See PayloadCodec."""
        length = _PREFIX_BYTES + page.nbytes
        fields = header_fields(name, parent_tag, tenant_tag, ENCRYPTED, length)
        prefix = os.urandom(_NONCE_BYTES).ljust(_PREFIX_BYTES, b"\0")
        sealed = memoryview(
            self._segment_cipher(segment_id).encrypt(prefix[:_NONCE_BYTES], page, fields)
        )
        tag = bytes(sealed[page.nbytes :])
        header = RecordHeader(name, parent_tag, tenant_tag, ENCRYPTED, length, tag)
        return header, [prefix, sealed[: page.nbytes]]

    def decode(
        self, header: RecordHeader, stored: memoryview, page: memoryview, segment_id: bytes
    ) -> bool:
        """See PayloadCodec."""
        fields = header_fields(
            header.name, header.parent_tag, header.tenant_tag, header.flags, header.payload_bytes
        )
        end = header.payload_bytes
        stored[end : end + CHECKSUM_BYTES] = header.checksum
        try:
            self._segment_cipher(segment_id).decrypt_into(
                stored[:_NONCE_BYTES],
                stored[_PREFIX_BYTES : end + CHECKSUM_BYTES],
                fields,
                page,
            )
        except self._invalid_tag:
            return False
        return True


def encode_record(
    codec: PayloadCodec,
    name: bytes,
    parent_tag: bytes,
    tenant_tag: bytes,
    page: memoryview,
    segment_id: bytes,
) -> tuple[RecordHeader, list[memoryview | bytes]]:
    """The header of a page's record, and the record in pieces without its padding."""
    header, pieces = codec.encode(name, parent_tag, tenant_tag, page, segment_id)
    return header, [header.encode(segment_id), *pieces]


def record_payload_bytes(codec: PayloadCodec, page_bytes: int) -> int:
    """Length of the payload of every record of such pages."""
    return page_bytes + codec.extra_bytes


def decode_record(
    codec: PayloadCodec,
    head: bytes | memoryview,
    stored: memoryview,
    page: memoryview,
    name: bytes,
    parent_tag: bytes,
    segment_id: bytes,
) -> bool:
    """Verify that a record holds this page after this parent, and write the page.

    Args:
        head: 64 bytes or more from the record's beginning.
        stored: its payload; see PayloadCodec.decode.
    """
    header = RecordHeader.decode(head[:HEADER_BYTES], segment_id)
    if header is None or header.flags != codec.flags:
        return False
    if header.payload_bytes != record_payload_bytes(codec, page.nbytes):
        return False
    if header.name != name or header.parent_tag != parent_tag:
        return False
    return codec.decode(header, stored, page, segment_id)


def read_cache_key(path: Path) -> bytes:
    """The key that a key file gives, 32 bytes derived from all of its content.

    Raises:
        ConfigError: the file cannot be read, is shorter than 16 bytes, or others may read it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_KEY_FILE_BYTES + 1)
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the cache key {path} cannot be read: {reason_of(error, path)}"
        ) from error
    if not _MIN_KEY_FILE_BYTES <= len(content) <= _MAX_KEY_FILE_BYTES:
        raise ConfigError(
            f"the cache key {path} has {len(content)} bytes, at least {_MIN_KEY_FILE_BYTES} and at "
            f"most {_MAX_KEY_FILE_BYTES} are needed; make one with: head -c 32 /dev/urandom > {path}"
        )
    if mode & 0o077:
        raise ConfigError(
            f"the cache key {path} can be read by others (mode {mode & 0o777:o}); run: chmod 600 {path}"
        )
    return hashlib.blake2b(content, digest_size=KEY_BYTES, person=b"ramify-cachekey").digest()


def cache_key_tag(cache_key: bytes) -> str:
    """16 hexadecimal digits that tell cache keys apart and do not reveal them."""
    return hashlib.blake2b(key=cache_key, digest_size=8, person=b"ramify-keytag").hexdigest()


def derived_name_key(cache_key: bytes) -> bytes:
    """The key of names where the cache key is the only secret: in a shared store."""
    return hashlib.blake2b(key=cache_key, digest_size=KEY_BYTES, person=b"ramify-names").digest()
