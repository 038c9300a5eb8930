"""What an attention backend is, the table of all of them, and the choice with its reasons."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a model asks of attention, the same for every step.

    `windows[layer]` is how many of the last tokens a query sees, itself included, or None for
    all. `soft_cap` squashes scores as `cap * tanh(score / cap)`.

    With `kind="mla"` attention is absorbed: one K/V head whose key is a token's latent followed by
    its rotary part (`head_dim` in all) and whose value is the latent (`value_dim`); the planes are
    `latent` and `rope` instead of `k` and `v`.
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
    value_dim: int | None = None  # of a value, where it is not that of a key
    kv_dtype: torch.dtype | None = None  # of the planes, None: `dtype`; int8 and float8 have scales
    kind: Literal["mha", "mla"] = "mha"
    layout: Literal["nhd", "vectorised"] = "nhd"
    sparse: bool = False  # `run` is told for every query which positions it sees

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def plane_dtype(self) -> torch.dtype:
        """What K/V is stored in."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def v_head_dim(self) -> int:
        """Width of a head's output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def gqa_group_size(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads


def reason_not_plain_mha(spec: AttentionSpec) -> str | None:
    """None for keys and values of one width as floats, page after page, all of them read."""
    if spec.kind != "mha":
        return f"kind={spec.kind}: no K and V planes"
    if spec.sparse:
        return "sparse: it reads every key"
    if spec.layout != "nhd":
        return f"layout={spec.layout}"
    if not spec.plane_dtype.is_floating_point or spec.plane_dtype.itemsize < 2:
        return f"kv_dtype={spec.plane_dtype}: it knows no scales"
    if spec.v_head_dim != spec.head_dim:
        return f"value_dim={spec.v_head_dim} beside head_dim={spec.head_dim}"
    return None


def unprobed_exactness(spec: AttentionSpec, strategy: str, reason: str) -> list[Exactness]:
    """What a backend without probes says of its exactness."""
    shape = (spec.num_kv_heads, spec.head_dim)
    dtype = str(spec.plane_dtype).removeprefix("torch.")
    return [Exactness("attention", shape, dtype, strategy, reason)]


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
