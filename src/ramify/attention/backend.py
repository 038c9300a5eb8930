"""The attention backend protocol, the table of backends, and the selection with its reasons."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError, UnsupportedBackendError

# name → module:class, imported on first use
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
# Not made of torch's own operations.
COMPILED_BACKENDS = ("cpu", "triton", "flashinfer")
_OLD_NAMES = {"tree": "cpu"}


class AttentionBackend(Protocol):
    """Attention over paged K/V. The caller writes a layer's new K/V to its planes before `run`."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None: ...

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """None, or the reason why it cannot serve a model with this `spec` on `device`."""
        ...

    def exactness(self) -> list[Exactness]:
        """Verdicts: how its arithmetic is kept independent of the batch, with the reason."""
        ...

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step: everything that is the same for all layers. Called once per step."""
        ...

    def run(
        self,
        plan: Any,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention output of one layer, [tokens, num_heads, value_dim] in q's dtype.

        Args:
            plan: what `plan` returned for this step.
            q: [tokens, num_heads, head_dim]; rows beyond the batch's are padding, their output
                is zeros.
            planes: `k`, [pages, page_size, num_kv_heads, head_dim], and `v` likewise with value_dim, or
                `latent` and `rope`, [pages, page_size, width]; for int8 and float8 also a scale plane
                for each, float32, `k_scale` [pages, page_size, num_kv_heads] and so on.
            selected: for sparse attention, [tokens, n] int32: the positions that each query sees,
                ascending, then -1. The causal and window masks apply as well.
            sinks: with `spec.sinks`, [num_heads] float32: exp(sink) joins the softmax's
                denominator of each row of a head, once, whatever keys the row sees.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A selected backend, the reason, and why each other backend was not selected."""

    name: str
    backend: AttentionBackend
    reason: str
    rejected: dict[str, str]


def backend_class(name: str) -> type[AttentionBackend]:
    """Import the class of a backend of the table.

    Raises:
        ConfigError: there is no such backend; the message lists them.
    """
    name = _current_name(name)
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend={name!r} does not exist; choose auto, {', '.join(BACKENDS)}"
        )
    module, _, cls = BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), cls)
    return backend


def select_backend(
    backend_name: str, spec: AttentionSpec, device: torch.device, *, last: Sequence[str] = ()
) -> BackendChoice:
    """Build the backend of that name, or for "auto" the first that supports the model on `device`.

    Args:
        last: backends that "auto" tries after all others.

    Raises:
        UnsupportedBackendError: no candidate supports it; the message gives every reason.
    """
    backend_name = _current_name(backend_name)
    order: tuple[str, ...] = (backend_name,)
    if backend_name == "auto":
        order = tuple(sorted(_auto_order(device), key=lambda name: name in last))
    reasons: dict[str, str] = {}
    for name in order:
        cls = backend_class(name)
        reason = cls.supports(spec, device)
        if reason is None:
            chosen_because = "asked for"
            if backend_name == "auto":
                chosen_because = (
                    f"the first of {', '.join(order)} that supports this model on {device.type}"
                )
            rejected = {
                other: backend_class(other).supports(spec, device) or "would do"
                for other in BACKENDS
                if other != name
            }
            return BackendChoice(name, cls(spec, device), chosen_because, rejected)
        reasons[name] = reason
    raise UnsupportedBackendError(backend_name, reasons)


def _current_name(name: str) -> str:
    """Replace a deprecated backend name, with a warning."""
    if name not in _OLD_NAMES:
        return name
    current = _OLD_NAMES[name]
    warnings.warn(
        f"attention_backend={name!r} is deprecated; use {current!r}",
        DeprecationWarning,
        stacklevel=3,
    )
    return current


def _auto_order(device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":
        return ("cpu", "sdpa", "blocked", "eager")
    if device.type == "cuda":
        return ("triton", "flashinfer", "varlen", "flex", "sdpa", "eager")
    return ("sdpa", "eager")
