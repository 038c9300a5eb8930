"""What every engine is driven through, ours and the peers' alike. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is loaded with."""

    folder: Path  # of the model: holds a checkpoint per dtype, and what was made of it for peers
    dtype: str  # float32 or bfloat16
    threads: int
    max_len: int  # tokens of the longest request, output included
    kv_tokens: int  # what a pool that shares prefixes must hold
    token_bytes: int  # K/V of one token
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        """The Hugging Face checkpoint in this dtype."""
        return self.folder / self.dtype

    @property
    def kv_bytes(self) -> int:
        """Memory of such a pool."""
        return self.kv_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """One batch answered. Times in seconds since the whole batch was handed over."""

    tokens: list[list[int]]
    first_s: list[float]  # of each request's first token; empty where the engine does not tell
    last_s: list[float]
    facts: dict[str, float] = field(default_factory=dict)  # what only some engines know


@dataclass(frozen=True, slots=True)
class Resources:
    """What an engine took to load, and holds."""

    load_s: float  # from the start of its process until it can answer
    peak_bytes: int  # largest resident memory of its process so far, pages of mapped files included
    token_weight_bytes: int  # weights that one decode step reads, as they lie in memory


class Engine(Protocol):
    """A loaded engine. Greedy, end of sequence ignored, token ids in and out."""

    version: str
    note: str  # what a reader of its figures must know

    def prepare(self, num_requests: int, request_tokens: int) -> None:
        """Off the clock, before a workload: its requests at once, and the tokens of the longest."""

    def generate(self, prompts: Prompts, num_new: int) -> Answer:
        """`num_new` tokens for every prompt."""

    def close(self) -> None:
        """End whatever was started."""


@runtime_checkable
class MeasuredEngine(Engine, Protocol):
    """An engine that says what it took to load."""

    def resources(self) -> Resources:
        """Time and memory; starts what a first `prepare` would start."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine of the tables; `engines.MODULE.load(Setup)` makes it in a process of its own."""

    name: str
    title: str
    module: str
    environment: str = ""  # folder among the peers' environments; empty is the one of Ramify
    options: Mapping[str, Any] = field(default_factory=dict)


class AbsentError(Exception):
    """This engine cannot be measured here; the message says why and what would change that."""
