"""The attention shape of a model: heads, widths, dtypes, windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ramify.attention.exactness import BATCHED, Exactness, dtype_name
from ramify.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of a model: the same for every step.

    `windows[layer]` is the number of last tokens that a query sees, itself included; None: all.
    `soft_cap` squashes scores: `cap * tanh(score / cap)`.

    `kind="mla"` is absorbed attention over the planes `latent` and `rope` instead of `k` and `v`:
    one K/V head with key `[latent, rope]` (`head_dim` wide) and value `latent` (`value_dim` wide).
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
    value_dim: int | None = None  # width of a value; None: `head_dim`
    kv_dtype: torch.dtype | None = None  # of the planes; None: `dtype`; int8 and float8 have scales
    kind: Literal["mha", "mla"] = "mha"
    layout: Literal["nhd", "vectorised"] = "nhd"
    sparse: bool = False  # `run` gets the visible positions of every query as `selected`
    sinks: bool = False  # `run` gets a logit per head that joins the softmax's denominator

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def plane_dtype(self) -> torch.dtype:
        """The dtype that K/V is stored in."""
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
    """None for plain MHA: `k` and `v` planes of one width, floats, in NHD pages, all keys read."""
    if spec.kind != "mha":
        return f"kind={spec.kind}: no K and V planes"
    if spec.sparse:
        return "sparse: it reads every key"
    if spec.layout != "nhd":
        return f"layout={spec.layout}"
    if not spec.plane_dtype.is_floating_point or spec.plane_dtype.itemsize < 2:
        return f"kv_dtype={spec.plane_dtype}: it reads no scales"
    if spec.v_head_dim != spec.head_dim:
        return f"value_dim={spec.v_head_dim} beside head_dim={spec.head_dim}"
    return None


def reason_no_sinks(spec: AttentionSpec) -> str | None:
    """The reason of a backend that computes no attention sinks; None for a model without sinks."""
    return "attention sinks: its softmax has only the keys" if spec.sinks else None


def reason_not_half(spec: AttentionSpec) -> str | None:
    """The reason of a backend for half precision; None if queries and K/V are both bfloat16 or float16."""
    if spec.dtype in (torch.bfloat16, torch.float16) and spec.plane_dtype == spec.dtype:
        return None
    return f"dtype={spec.dtype} with K/V in {spec.plane_dtype}: both must be the same half"


def reason_no_cuda(device: torch.device) -> str | None:
    """The reason of any backend if `device` is CUDA and torch finds none; else None."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "device cuda: this torch finds no CUDA device"
    return None


def unprobed_exactness(spec: AttentionSpec, strategy: str, reason: str) -> list[Exactness]:
    """The exactness report of a backend that probes nothing."""
    shape = (spec.num_kv_heads, spec.head_dim)
    return [Exactness("attention", shape, dtype_name(spec.plane_dtype), strategy, reason)]


def not_exact(spec: AttentionSpec) -> list[Exactness]:
    """The exactness report of a backend that is used with `exact=False` only."""
    return unprobed_exactness(spec, BATCHED, "exact=False")
