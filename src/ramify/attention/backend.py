"""What an attention backend is, the table of all of them, and the choice with its reasons."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError, UnsupportedBackendError

# name → module:class, imported on use
BACKENDS: dict[str, str] = {
    "eager": "ramify.attention.backends.eager:EagerBackend",
    "cpu": "ramify.attention.backends.cpu:CpuBackend",
    "blocked": "ramify.attention.backends.blocked:BlockedBackend",
    "sdpa": "ramify.attention.backends.sdpa:SdpaBackend",
    "triton": "ramify.attention.backends.triton:TritonBackend",
    "flashinfer": "ramify.attention.backends.flashinfer:FlashInferBackend",
    "varlen": "ramify.attention.backends.varlen:VarlenBackend",
    "flex": "ramify.attention.backends.flex:FlexBackend",
}
_OLD_NAMES = {"tree": "cpu"}


class AttentionBackend(Protocol):
    """Attends over pages. K/V of the step are in the planes before `run` is called."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None: ...

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """None, or the reason why this backend cannot serve the model on that device."""
        ...

    def exactness(self) -> list[Exactness]:
        """How its arithmetic is kept from depending on the batch, and why so."""
        ...

    def plan(self, batch: AttentionBatch) -> Any:
        """Everything about a step that is the same for all layers; once per step."""
        ...

    def run(
        self,
        plan: Any,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Attention output of one layer, [tokens, num_heads, value_dim] in q's dtype.

        Args:
            plan: what `plan` returned for this step.
            q: [tokens, num_heads, head_dim]; more rows than the batch has are padding, and
                come back as zeros.
            planes: `k` and `v`, [pages, page_size, num_kv_heads, head_dim], or `latent` and `rope`,
                [pages, page_size, width]; for int8 and float8 also a scale plane for each, float32,
                `k_scale` [pages, page_size, num_kv_heads] and so on.
            selected: for sparse attention, [tokens, n] int32: the positions that each query sees,
                ascending, -1 after the last. Causality and window hold besides.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A selected backend, why, and for every other one why not."""

    name: str
    backend: AttentionBackend
    reason: str
    rejected: dict[str, str]


def backend_class(name: str) -> type[AttentionBackend]:
    """The class behind a name of the table.

    Raises:
        ConfigError: there is no such backend; the message lists them.
    """
    name = _present_name(name)
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend={name!r} does not exist; choose auto, {', '.join(BACKENDS)}"
        )
    module, _, cls = BACKENDS[name].partition(":")
    found: type[AttentionBackend] = getattr(import_module(module), cls)
    return found


def select_backend(backend_name: str, spec: AttentionSpec, device: torch.device) -> BackendChoice:
    """The backend to use: the one asked for, or with "auto" the best that supports the model.

    Raises:
        UnsupportedBackendError: it cannot serve; the message gives every reason.
    """
    backend_name = _present_name(backend_name)
    order = _auto_order(device) if backend_name == "auto" else (backend_name,)
    reasons: dict[str, str] = {}
    for name in order:
        cls = backend_class(name)
        reason = cls.supports(spec, device)
        if reason is None:
            why = (
                "asked for"
                if backend_name != "auto"
                else (f"the first of {', '.join(order)} that supports this model on {device.type}")
            )
            others = {
                other: backend_class(other).supports(spec, device) or "would do"
                for other in BACKENDS
                if other != name
            }
            return BackendChoice(name, cls(spec, device), why, others)
        reasons[name] = reason
    raise UnsupportedBackendError(backend_name, reasons)


def _present_name(name: str) -> str:
    if name not in _OLD_NAMES:
        return name
    present = _OLD_NAMES[name]
    warnings.warn(
        f"attention_backend={name!r} is deprecated; use {present!r}",
        DeprecationWarning,
        stacklevel=3,
    )
    return present


def _auto_order(device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":
        return ("cpu", "sdpa", "blocked", "eager")
    if device.type == "cuda":
        return ("triton", "flashinfer", "varlen", "flex", "sdpa", "eager")
    return ("sdpa", "eager")
