"""Attention over paged, shared K/V. Names resolve on first use: importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.attention.backend import AttentionBackend, AttentionSpec, select_backend
    from ramify.attention.batch import AttentionBatch, Extend
    from ramify.attention.planner import RadixAttentionPlanner, RadixSequence

_HOMES = {
    "AttentionBackend": "backend",
    "AttentionBatch": "batch",
    "AttentionSpec": "backend",
    "Extend": "batch",
    "RadixAttentionPlanner": "planner",
    "RadixSequence": "planner",
    "select_backend": "backend",
}

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "Extend",
    "RadixAttentionPlanner",
    "RadixSequence",
    "select_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
