"""`EngineIdentity`: everything beside the request that the bits of K/V and of answers depend on."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields

from ramify.config import ResolvedConfig
from ramify.counts import counted

# What makes two engines run different models, whatever they compute with.
WEIGHT_FIELDS = ("weights", "weight_types", "model")
# Raise it with a change that alters the bits of K/V or of answers.
ARITHMETIC_VERSION = 2
# What the bits of K/V depend on beside their format and the weights.
ARITHMETIC_FIELDS = ("arithmetic_version", "arithmetic", "threads")
NAMED = 4  # differing fields that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Engines with equal identities compute equal bits, as far as `exact` promises it.

    Replicas compare it before one goes on with another's answer, stores of K/V before they read a
    page. Values are texts for people as far as possible, digests where they would be long.
    """

    arithmetic_version: int = ARITHMETIC_VERSION
    weights: str  # digest of the checkpoint's content
    weight_types: str  # digest of the type in which each weight is held
    model: str  # digest of the model's configuration, with positions and windows
    kv_dtype: str
    kv_layout: str
    page_size: int
    exact: bool
    arithmetic: str  # operations, attention backend, torch, CPU; and a digest of each strategy
    threads: int
    sampling: str  # how drafts are verified; with "rejection" tokens depend on the drafts

    @classmethod
    def of_namespace(cls, namespace: bytes, config: ResolvedConfig) -> EngineIdentity:
        """The identity of an engine without a checkpoint: its base namespace stands for the weights."""
        return cls(
            weights=namespace.hex(),
            weight_types="",
            model="",
            kv_dtype="",
            kv_layout="",
            page_size=config.page_size,
            exact=config.requested.attention.exact,
            arithmetic="",
            threads=0,
            sampling=config.requested.speculative.speculative_sampling,
        )

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, a function of all fields."""
        lines = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    def kv_fields(self) -> dict[str, str | int | bool]:
        """The fields that K/V depends on: with `exact` its bits, without only its meaning."""
        values: dict[str, str | int | bool] = asdict(self)
        del values["sampling"]
        for name in () if self.exact else ARITHMETIC_FIELDS:
            del values[name]
        return values

    @property
    def kv_digest(self) -> str:
        """32 hexadecimal digits, a function of `kv_fields`."""
        lines = [f"{name}={value!r}" for name, value in self.kv_fields().items()]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    def differing(self, other: EngineIdentity) -> tuple[str, ...]:
        """Names of the fields that differ."""
        return tuple(
            field.name
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )

    def has_same_weights(self, other: EngineIdentity) -> bool:
        """Whether both run one model, with weights of equal content and type."""
        return not set(WEIGHT_FIELDS) & set(self.differing(other))

    def mismatch(self, other: EngineIdentity) -> str | None:
        """The differing fields with the values here and there, in words; None if there are none."""
        names = self.differing(other)
        if not names:
            return None
        parts = [
            f"{name} is {getattr(self, name)!r} here and {getattr(other, name)!r} there"
            for name in names[:NAMED]
        ]
        more = f", and {counted(len(names) - NAMED, 'more field')}" if len(names) > NAMED else ""
        return "; ".join(parts) + more
