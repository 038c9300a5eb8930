"""What an attention backend is, the table of all of them, and the choice with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.errors import ConfigError, UnsupportedBackendError

# name → module:class, imported on use
BACKENDS: dict[str, str] = {
    "eager": "ramify.attention.eager:EagerBackend",
    "tree": "ramify.attention.tree:TreeBackend",
    "sdpa": "ramify.attention.sdpa:SdpaBackend",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a model asks of attention, the same for every step.

    `windows[layer]` is how many of the last tokens a query sees, itself included, or None for
    all. `soft_cap` squashes scores as `cap * tanh(score / cap)`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    windows: tuple[int | None, ...]
    scale: float
    soft_cap: float | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads


class AttentionBackend(Protocol):
    """Attends over pages. K/V of the step are in the planes before `run` is called."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None: ...

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """None, or the reason why this backend cannot serve the model on that device."""
        ...

    def plan(self, batch: AttentionBatch) -> Any:
        """Everything about a step that is the same for all layers; once per step."""
        ...

    def run(self, plan: Any, layer: int, q: Tensor, planes: Mapping[str, Tensor]) -> Tensor:
        """Attention output of one layer, [tokens, num_heads, head_dim] in q's dtype.

        Args:
            plan: what `plan` returned for this step.
            q: [tokens, num_heads, head_dim]; more rows than the batch has are padding, and
                come back as zeros.
            planes: `k` and `v`, [pages, page_size, num_kv_heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A selected backend, why, and for every other one why not."""

    name: str
    backend: AttentionBackend
    why: str
    others: dict[str, str]


def backend_class(name: str) -> type[AttentionBackend]:
    """The class behind a name of the table.

    Raises:
        ConfigError: there is no such backend; the message lists them.
    """
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend={name!r} does not exist; choose auto, {', '.join(BACKENDS)}"
        )
    module, _, cls = BACKENDS[name].partition(":")
    found: type[AttentionBackend] = getattr(import_module(module), cls)
    return found


def select_backend(asked: str, spec: AttentionSpec, device: torch.device) -> Choice:
    """The backend to use: the one asked for, or with "auto" the best that supports the model.

    Raises:
        UnsupportedBackendError: it cannot serve; the message gives every reason.
    """
    order = _preference(device) if asked == "auto" else (asked,)
    reasons: dict[str, str] = {}
    for name in order:
        cls = backend_class(name)
        reason = cls.supports(spec, device)
        if reason is None:
            why = (
                "asked for"
                if asked != "auto"
                else (f"the first of {', '.join(order)} that supports this model on {device.type}")
            )
            others = {
                other: backend_class(other).supports(spec, device) or "would do"
                for other in BACKENDS
                if other != name
            }
            return Choice(name, cls(spec, device), why, others)
        reasons[name] = reason
    raise UnsupportedBackendError(asked, reasons)


def _preference(device: torch.device) -> tuple[str, ...]:
    # on CPU tree comes first, exact or not: it takes all decoding requests in one call per block
    return ("tree", "sdpa", "eager") if device.type == "cpu" else ("sdpa", "tree", "eager")
