"""`SegmentOptions`: options of a disk tier, and the identity and the form of its payloads that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ramify.errors import ConfigError
from ramify.kv.stores.payload_codec import (
    EncryptedPayload,
    PayloadCodec,
    PlainPayload,
    cache_key_tag,
)
from ramify.kv.stores.segment_format import FORMAT_VERSION, Geometry
from ramify.kv.stores.store_identity import StoreIdentity, Value

SEGMENT_BYTES = 256 << 20
MIN_BUDGET_SEGMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions:
    """Options of a disk tier.

    Args:
        identity: fields that the bytes of a page depend on beside its tokens; another value of any
            of them is another sub-directory.
        budget_bytes: of disk blocks, for all identities in the directory.
        segment_bytes: of a full segment file; smaller in tests.
        read_only: share the pages of another process, write nothing.
        cache_key: encrypts the pages (`payload_codec.read_cache_key`); None: they are plain.
    """

    directory: Path
    identity: Mapping[str, Value]
    page_bytes: int
    budget_bytes: int
    segment_bytes: int = SEGMENT_BYTES
    read_only: bool = False
    cache_key: bytes | None = None

    def validate(self, geometry: Geometry) -> None:
        """Refuse values that cannot work.

        Raises:
            ConfigError: a page has no bytes, does not fit into a segment, or the budget is below two.
        """
        if self.page_bytes < 1 or geometry.num_slots < 1:
            raise ConfigError(
                f"a page of {self.page_bytes} bytes does not fit into a segment of "
                f"{self.segment_bytes}; use a smaller page_size"
            )
        if not self.read_only and self.budget_bytes < MIN_BUDGET_SEGMENTS * self.segment_bytes:
            raise ConfigError(
                f"--cache-disk is {self.budget_bytes} bytes, but at least "
                f"{MIN_BUDGET_SEGMENTS} segments of {self.segment_bytes} bytes are needed; "
                f"raise it to {MIN_BUDGET_SEGMENTS * self.segment_bytes} or more"
            )


def codec_of(cache_key: bytes | None) -> PayloadCodec:
    """How payloads are stored with this key.

    Raises:
        MissingPackageError: `cryptography` is not installed.
    """
    return PlainPayload() if cache_key is None else EncryptedPayload(cache_key)


def identity_of(options: SegmentOptions) -> StoreIdentity:
    """The identity of a directory's pages: the caller's fields, and those of the files."""
    encryption = "none" if options.cache_key is None else cache_key_tag(options.cache_key)
    return StoreIdentity(
        {
            **options.identity,
            "page_bytes": options.page_bytes,
            "segment_bytes": options.segment_bytes,
            "file_format": FORMAT_VERSION,
            "encryption": encryption,
        }
    )
