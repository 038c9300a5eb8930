"""`StoreIdentity`: all that the bytes of a page depend on beside its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = str | int | bool


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """All that the bytes of a page depend on beside its tokens: fields of text and numbers."""

    fields: Mapping[str, Value] = field(hash=False)

    @property
    def digest(self) -> bytes:
        """16 bytes, a function of all fields."""
        lines = [f"{name}={self.fields[name]!r}" for name in sorted(self.fields)]
        return hashlib.blake2b(
            "\n".join(lines).encode(), digest_size=16, person=b"ramify-store"
        ).digest()

    def differing(self, other: StoreIdentity) -> list[str]:
        """Names of the fields that differ, sorted."""
        names = self.fields.keys() | other.fields.keys()
        return sorted(name for name in names if self.fields.get(name) != other.fields.get(name))
