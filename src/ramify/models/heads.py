"""Split QKV rows into heads, with QK norm and rope: one compiled op, or torch operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ramify.models.builder import LayerBuilder
from ramify.models.config import ModelConfig
from ramify.models.ops.cpu_rope import QKNormRope
from ramify.models.ops.functional import apply_rotary, rms_norm
from ramify.models.ops.probe import sample_rows
from ramify.models.ops.protocol import RowFunction
from ramify.models.rope import RotaryTable

# heads(rows [T, (num_heads + 2 * num_kv_heads) * head_dim], *angles) -> q, k, v [T, heads, head_dim]
Heads = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RotaryHeads:
    """QK norm and rope in place by one compiled op; q, k and v are views of the QKV rows."""

    # a `QKNormRope`; row by row if the probe rejected it
    qk_norm_rope: Callable[[Tensor, Tensor], Tensor]
    counts: tuple[int, int, int]  # heads of q, k, v
    head_dim: int

    def __call__(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [T, sum(counts) * head_dim], positions [T] int64 -> q, k, v [T, heads, head_dim]."""
        q, k, v = (
            self.qk_norm_rope(rows, positions)
            .unflatten(-1, (-1, self.head_dim))
            .split(self.counts, 1)
        )
        return q, k, v


class HeadsBuilder:
    """Builds the `Heads` of each layer: compiled where layer 0's q_proj is packed, else torch."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        self._config, self._build = config, build
        self._rotary = RotaryTable(
            config.rope, head_dim=config.head_dim, max_len=config.max_model_len, dtype=build.dtype
        )
        self.fused = build.fuses(build.weight("model.layers.0.self_attn.q_proj.weight"))
        # heads of q, k, v
        self.counts = config.num_heads, config.num_kv_heads, config.num_kv_heads

    def angles(self, positions: Tensor) -> tuple[Tensor, ...]:
        """What `Heads` take after the rows, computed once per step: positions, or their cos and signed sin."""
        return (positions,) if self.fused else self._rotary.cos_sin(positions)

    def of(self, prefix: str) -> Heads:
        """`Heads` with the QK norms of the layer at `prefix`; they may overwrite the QKV rows."""
        norms = None
        if self._config.qk_norm:
            norms = tuple(self._build.weight(f"{prefix}{name}_norm.weight") for name in "qk")
        return self._rotary_heads(norms) if self.fused else self._torch_heads(norms)

    def _rotary_heads(self, norms: tuple[Tensor, ...] | None) -> Heads:
        config, (num_q, num_k, num_v) = self._config, self.counts
        eps = config.rms_norm_eps
        rope = QKNormRope(
            self._rotary.cos,
            self._rotary.sin,
            num_q=num_q,
            num_k=num_k,
            norms=None if norms is None else (norms[0], norms[1], eps),
        )
        width = (num_q + num_k + num_v) * config.head_dim

        def on_copy(rows: Tensor, positions: Tensor) -> Tensor:
            return rope(rows.clone(), positions)

        def samples() -> tuple[Tensor, ...]:
            rows = sample_rows(width, dtype=self._build.dtype)
            return rows, torch.arange(len(rows)) % config.max_model_len

        operation = "rope" if norms is None else "qk_norm + rope"
        shape = (num_q + num_k, config.head_dim)
        chosen = self._build.rows(operation, on_copy, shape, samples)
        # `rows` probed a form that copies its input; the model can have its own overwritten.
        in_place = rope if chosen is on_copy else chosen
        return RotaryHeads(in_place, self.counts, config.head_dim)

    def _torch_heads(self, norms: tuple[Tensor, ...] | None) -> Heads:
        rope = self._choose_rotary()
        qk_norms = []
        if norms is not None:
            qk_norms = [
                self._norm(weight, num_heads)
                for weight, num_heads in zip(norms, self.counts[:2], strict=True)
            ]

        def heads(rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = rows.unflatten(-1, (-1, self._config.head_dim)).split(self.counts, 1)
            if qk_norms:
                q, k = qk_norms[0](q), qk_norms[1](k)
            return rope(q, cos, sin), rope(k, cos, sin), v

        return heads

    def _norm(self, weight: Tensor, num_heads: int) -> RowFunction:
        norm = partial(rms_norm, weight=weight, eps=self._config.rms_norm_eps)
        shape = (num_heads, self._config.head_dim)

        def samples() -> tuple[Tensor, ...]:
            heads = sample_rows(sum(self.counts), shape[1], dtype=self._build.dtype)
            return (heads[:, :num_heads],)

        return self._build.rows("qk_norm", norm, shape, samples)

    def _choose_rotary(self) -> Callable[..., Tensor]:
        shape = (self._config.num_heads, self._config.head_dim)

        def samples() -> tuple[Tensor, ...]:
            heads = sample_rows(*shape, dtype=self._build.dtype)
            positions = torch.arange(heads.shape[0]) % self._config.max_model_len
            return (heads, *self._rotary.cos_sin(positions))

        return self._build.rows("rope", apply_rotary, shape, samples)
