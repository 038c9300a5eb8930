"""`CpuOps`: the operations of `TorchOps`, with our compiled CPU kernels wherever there is one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ramify.models.config import RopeConfig
from ramify.models.ops.cpu_layers import FusedLayers
from ramify.models.ops.cpu_linear import PackedLinear, packed_gemm_supports
from ramify.models.ops.cpu_rope import QKNormRope
from ramify.models.ops.layer_loop import LayerLoop
from ramify.models.ops.probe import sample_rows
from ramify.models.ops.protocol import (
    Activation,
    DecoderLayer,
    Heads,
    LayerStack,
    Linear,
    Norm,
    Shard,
)
from ramify.models.ops.quantized import QuantizedWeight
from ramify.models.ops.torch_linear import probe_counts
from ramify.models.ops.torch_ops import SplitAttention, TorchOps


class CpuOps(TorchOps):
    """Packed GEMM with norm, activation and residual inside, QK norm + rope in place, fused layers.

    Anything without a kernel (quantised weights, norms with an offset, MLA) is `TorchOps`.
    """

    name = "cpu"

    @classmethod
    def supports(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """None, or why the kernels cannot compute this dtype on this device."""
        return packed_gemm_supports(dtype, device)

    @property
    def row_multiple(self) -> int:
        """1: the kernels' sums do not depend on the number of rows; other operations pad themselves."""
        return 1

    def linear(
        self,
        *names: str,
        norm: Norm | None = None,
        activation: Activation | None = None,
        shard: Shard = "none",
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """See `Ops`: one kernel, or a kernel between torch operations that it has no form of."""
        torch_linear = partial(
            super().linear, *names, norm=norm, activation=activation, shard=shard, dtype=dtype
        )
        weight, bias = self._matrix(names, dtype)
        if isinstance(weight, QuantizedWeight):
            return torch_linear()
        inner_norm = norm if norm is not None and _has_kernel(norm) else None
        norm_weight = None
        if inner_norm is not None:
            norm_weight = self.weight(f"{inner_norm.name}.weight"), inner_norm.eps
        is_gated = activation == "silu_mul"
        packed = PackedLinear(weight, bias, norm=norm_weight, gated=is_gated)
        parts = {
            "rms_norm": inner_norm is not None,
            "linear": True,
            "bias": bias is not None,
            "silu_mul": is_gated,
        }
        out_width, in_width = weight.shape
        chosen = self.row_op(
            " + ".join(name for name, is_part in parts.items() if is_part),
            packed,
            (out_width, in_width),
            lambda: (sample_rows(in_width, dtype=weight.dtype),),
            counts=probe_counts(weight),
            strategy="packed_gemm",
            dtype=weight.dtype,
        )
        if chosen is not packed:
            return torch_linear()
        if norm is inner_norm and activation in (None, "silu_mul"):
            return packed
        outer_norm = None if norm is inner_norm else norm
        return self._compose(outer_norm, packed, None if is_gated else activation, out_width // 2)

    def attention(
        self,
        layer: int,
        heads: Heads,
        rope: RopeConfig,
        *,
        qk_norm: tuple[Norm, Norm] | None = None,
    ) -> SplitAttention:
        """See `Ops`."""
        if qk_norm is not None and not all(map(_has_kernel, qk_norm)):
            return super().attention(layer, heads, rope, qk_norm=qk_norm)
        table, norms = self._table(rope, heads.head_dim), None
        if qk_norm is not None:
            weights = [self.weight(f"{norm.name}.weight") for norm in qk_norm]
            norms = (weights[0], weights[1], qk_norm[0].eps)
        kernel = QKNormRope(table.cos, table.sin, heads, norms=norms)

        def on_copy(rows: Tensor, positions: Tensor) -> Tensor:
            return kernel.rotate(rows.clone(), positions)

        def samples() -> tuple[Tensor, ...]:
            rows = sample_rows(sum(heads.counts) * heads.head_dim, dtype=self.dtype)
            return rows, self._sample_positions(len(rows))

        operation = "rope" if norms is None else "qk_norm + rope"
        shape = (heads.num_q + heads.num_kv, heads.head_dim)
        chosen = self.row_op(operation, on_copy, shape, samples)
        if chosen is not on_copy:
            return super().attention(layer, heads, rope, qk_norm=qk_norm)
        return SplitAttention(layer, kernel)

    def stack(self, layers: Sequence[DecoderLayer]) -> LayerStack:
        """See `Ops`: fused if every operation of every layer is a kernel."""
        return FusedLayers.of(layers) or LayerLoop(layers)


def _has_kernel(norm: Norm) -> bool:
    return norm.kind == "rms" and not norm.offset
