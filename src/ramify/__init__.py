"""Ramify: LLM inference that never computes the same prefix twice.

Names resolve on first use, so that importing the package loads neither torch nor a model.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ramify.errors import MissingPackageError

if TYPE_CHECKING:
    from ramify.attention.blocks.attention_block import RadixAttentionBlock
    from ramify.attention.blocks.paged_kv_cache import RadixAttentionWithPagedKVCache
    from ramify.attention.planner import RadixAttentionPlanner
    from ramify.attention.sequence import RadixSequence
    from ramify.cache import CacheKey, PrefixCache
    from ramify.engine.async_llm import AsyncLLM
    from ramify.engine.llm import LLM
    from ramify.engine.sessions.session import AsyncSession, Session
    from ramify.errors import RamifyError
    from ramify.outputs import FinishReason, RequestOutput
    from ramify.params import SamplingParams, StructuredOutput

__version__ = "0.2.0"

# How long a thread of torch's OpenMP pool (libgomp) spins for work before it sleeps. libgomp's own
# 300,000 turns hold a core for milliseconds that another program, or the thread waited for, needs.
# libgomp reads this when torch loads it.
OMP_SPIN_COUNT = 1_000
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(OMP_SPIN_COUNT))

_HOMES = {
    "AsyncLLM": "ramify.engine.async_llm",
    "LLM": "ramify.engine.llm",
    "AsyncSession": "ramify.engine.sessions.session",
    "CacheKey": "ramify.cache",
    "FinishReason": "ramify.outputs",
    "PrefixCache": "ramify.cache",
    "RadixAttentionBlock": "ramify.attention.blocks.attention_block",
    "RadixAttentionPlanner": "ramify.attention.planner",
    "RadixAttentionWithPagedKVCache": "ramify.attention.blocks.paged_kv_cache",
    "RadixSequence": "ramify.attention.sequence",
    "RamifyError": "ramify.errors",
    "RequestOutput": "ramify.outputs",
    "SamplingParams": "ramify.params",
    "StructuredOutput": "ramify.params",
    "Session": "ramify.engine.sessions.session",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncSession",
    "CacheKey",
    "FinishReason",
    "PrefixCache",
    "RadixAttentionBlock",
    "RadixAttentionPlanner",
    "RadixAttentionWithPagedKVCache",
    "RadixSequence",
    "RamifyError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "Session",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        missing = MissingPackageError.of(error)
        if missing is None:
            raise
        raise missing from error
