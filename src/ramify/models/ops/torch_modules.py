"""Operations that `TorchOps` binds, made of row functions: linears, rope, QK norm, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.models.ops.functional import deinterleave_rope
from ramify.models.ops.protocol import Attended, ForwardStep, Heads, RowOp


@dataclass(frozen=True, slots=True)
class ComposedLinear:
    """A `Linear` of separate operations: norm, matrix, activation, addition of the residual."""

    norm: RowOp | None
    matrix: RowOp
    activation: Callable[..., Tensor] | None  # of the result's `num_parts` parts
    num_parts: int = 1

    def __call__(
        self,
        x: Tensor,
        step: ForwardStep | None = None,  # noqa: ARG002 - for adapters
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `Linear`."""
        y = self.matrix(x if self.norm is None else self.norm(x))
        if self.activation is not None:
            y = self.activation(*y.chunk(self.num_parts, -1))
        return y if residual is None else residual.add_(y)


@dataclass(frozen=True, slots=True)
class TorchHeadLinear:
    """A `HeadLinear` by one batched matmul."""

    weight: Tensor
    op: RowOp

    def __call__(self, x: Tensor) -> Tensor:
        """See `HeadLinear`."""
        return self.op(x)


@dataclass(frozen=True, slots=True)
class TorchRope:
    """A `Rope` over the step's cos and sin number `table`."""

    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    table: int
    dim: int
    interleaved: bool

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """See `Rope`."""
        rotated, rest = x[..., : self.dim], x[..., self.dim :]
        if self.interleaved:
            rotated = deinterleave_rope(rotated)
        rotated = self.rotate(rotated, *step.angles[self.table])
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


@dataclass(frozen=True, slots=True)
class TorchQKNormRope:
    """QKV rows -> q, k, v [T, heads, head_dim], with QK norm and rope."""

    heads: Heads
    norms: tuple[RowOp, RowOp] | None
    rope: TorchRope
    norms_after_rope: bool = False

    def __call__(self, qkv: Tensor, step: ForwardStep) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (num_q + 2 * num_kv) * head_dim]."""
        q, k, v = qkv.unflatten(-1, (-1, self.heads.head_dim)).split(self.heads.counts, 1)
        if self.norms is not None and not self.norms_after_rope:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = self.rope(q, step), self.rope(k, step)
        if self.norms is not None and self.norms_after_rope:
            q, k = self.norms[0](q), self.norms[1](k)
        return q, k, v


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """A `SelfAttention`: QKV rows to heads, then the step's attention."""

    layer: int
    qk_norm_rope: Callable[[Tensor, ForwardStep], tuple[Tensor, Tensor, Tensor]]
    sinks: Tensor | None = None  # [num_q] float32

    def __call__(self, qkv: Tensor, step: ForwardStep) -> Attended:
        """See `SelfAttention`."""
        q, k, v = self.qk_norm_rope(qkv, step)
        out = step.pruned_attention(self.layer, q, k, v, sinks=self.sinks)
        return Attended(out.flatten(1), (k, v))
