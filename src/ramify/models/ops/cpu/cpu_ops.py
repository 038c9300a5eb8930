"""`CpuOps`: the operations of `TorchOps`, with our compiled CPU kernels wherever there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ramify.attention.exactness import PROBE_ROW_COUNTS, ProbeStore
from ramify.models.configs.dense_variant import QkNormForm
from ramify.models.configs.moe import MoeConfig
from ramify.models.configs.rope import RopeConfig
from ramify.models.ops.cpu.embedding import TokenRows
from ramify.models.ops.cpu.experts import GroupedExperts, GroupedLinear, TopKRouter
from ramify.models.ops.cpu.layers import FusedLayers
from ramify.models.ops.cpu.linear import ACTIVATION_MODES, PackedLinear, packed_gemm_supports
from ramify.models.ops.cpu.norm import RowNorm
from ramify.models.ops.cpu.quantized_panels import UnlikeWeightsError, panels_support
from ramify.models.ops.cpu.rope import QKNormRope
from ramify.models.ops.layer_loop import LayerLoop
from ramify.models.ops.mlp import Mlp
from ramify.models.ops.probe import probe_row_op
from ramify.models.ops.protocol import (
    Activation,
    DecoderLayer,
    Experts,
    GatedActivation,
    Heads,
    LayerStack,
    Linear,
    Norm,
    RowOp,
    SelfAttention,
    Shard,
)
from ramify.models.ops.quantized import QuantizedWeight, Weight
from ramify.models.ops.torch_linear import is_constant, probe_counts
from ramify.models.ops.torch_modules import SplitAttention
from ramify.models.ops.torch_ops import TorchOps

# Names of what `QKNormRope` computes, as the probe records it.
ROPE_OPERATIONS: dict[QkNormForm, str] = {
    "head": "qk_norm + rope",
    "width": "qk_norm over all heads + rope",
    "after_rope": "rope + qk_norm",
}


class CpuOps(TorchOps):
    """Packed GEMM with norm, activation and residual inside, QK norm + rope in place, fused layers.

    Anything without a kernel (layer norms of heads, MLA) is `TorchOps`.
    """

    def __init__(self, weights: Mapping[str, Weight], **options: Any) -> None:
        super().__init__(weights, **options)
        self._token_rows: dict[str, TokenRows] = {}

    @classmethod
    def supports(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """None, or why the kernels cannot compute this dtype on this device."""
        return packed_gemm_supports(dtype, device)

    @property
    def row_multiple(self) -> int:
        """1: rows of the kernels are independent by construction, those of other operations by the probe."""
        return 1

    def embedding(self, name: str, *, scale: float = 1.0) -> TokenRows:
        """See `Ops`. Where the LM head is the same table, the packed head serves for both."""
        factor = None if scale == 1.0 else torch.tensor(scale, dtype=self.dtype)
        rows = self._token_rows[name] = TokenRows(self._weights[f"{name}.weight"], factor)
        return rows

    def finish(self) -> None:
        """See `Ops`."""
        super().finish()
        self._token_rows = {}

    def linear(
        self,
        *names: str,
        norm: Norm | None = None,
        activation: Activation | None = None,
        shard: Shard = "none",
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """See `Ops`: one kernel, or a kernel before a torch activation that it has no form of."""
        weight, bias = self._matrix(names, dtype)
        inner_activation = activation if activation in ACTIVATION_MODES else None
        packed = self._packed_linear(weight, bias, norm, inner_activation)
        if packed is None:
            return super().linear(
                *names, norm=norm, activation=activation, shard=shard, dtype=dtype
            )
        if activation is None and bias is None and len(names) == 1 and names[0] in self._token_rows:
            self._token_rows[names[0]].share(packed)
        if activation is inner_activation:
            return packed
        return self._compose(None, packed, activation, len(weight), dtype or self.dtype)

    def norm(self, norm: Norm) -> RowOp:
        """See `Ops`: one kernel, for an RMS norm."""
        if norm.kind != "rms":
            return super().norm(norm)
        kernel = RowNorm(self._norm_weight(norm), norm.eps, self.dtype)
        samples = self._samples(kernel.width)
        shape = (kernel.width,)
        passes = self._probe_kernel("rms_norm", kernel, shape, samples, dtype=self.dtype)
        return kernel if passes else super().norm(norm)

    def _norm_weight(self, norm: Norm) -> Tensor:
        """A norm's weight as the kernels take it: with an offset the sum, of a layer norm with its bias."""
        weight = self.weight(f"{norm.name}.weight")
        if norm.kind == "rms":
            return weight.float() + norm.offset if norm.offset else weight
        bias = torch.zeros_like(weight)
        if f"{norm.name}.bias" in self._weights:
            bias = self.weight(f"{norm.name}.bias")
        return torch.stack((weight, bias)).float()

    def _packed_linear(
        self, weight: Weight, bias: Tensor | None, norm: Norm | None, activation: Activation | None
    ) -> PackedLinear | None:
        """The packed GEMM of this matrix; None if it has no kernel, or the probe finds that its rows differ."""
        name = "linear"
        if isinstance(weight, QuantizedWeight):
            if panels_support(weight) is not None:
                return None
            name = f"linear, {_form(weight)}"
        norm_weight = None
        if norm is not None:
            norm_weight = self._norm_weight(norm), norm.eps
        packed = PackedLinear(weight, bias, norm=norm_weight, activation=activation)
        parts = {
            "norm" if norm is None else f"{norm.kind}_norm": norm is not None,
            name: True,
            "bias": bias is not None,
            str(activation): activation is not None,
        }
        operation = " + ".join(name for name, is_part in parts.items() if is_part)
        out_width, in_width = weight.shape
        passes = self._probe_kernel(
            operation,
            packed,
            (out_width, in_width),
            self._samples(in_width, dtype=weight.dtype),
            dtype=weight.dtype,
            store=ProbeStore(None) if is_constant(weight) else None,
            counts=probe_counts(weight),
        )
        return packed if passes else None

    def attention(
        self,
        layer: int,
        heads: Heads,
        rope: RopeConfig,
        *,
        qk_norm: tuple[Norm, Norm] | None = None,
        qk_norm_form: QkNormForm = "head",
        sinks: str | None = None,
    ) -> SelfAttention:
        """See `Ops`."""
        in_torch = partial(
            super().attention,
            layer,
            heads,
            rope,
            qk_norm=qk_norm,
            qk_norm_form=qk_norm_form,
            sinks=sinks,
        )
        table, norms = self._table(rope, heads.head_dim), None
        if qk_norm is not None:
            q_norm, k_norm = qk_norm
            if {q_norm.kind, k_norm.kind} != {"rms"} or q_norm.eps != k_norm.eps:
                return in_torch()
            norms = self._norm_weight(q_norm), self._norm_weight(k_norm), q_norm.eps
        kernel = QKNormRope(table.cos, table.sin, heads, norms=norms, form=qk_norm_form)

        def on_copy(rows: Tensor, positions: Tensor) -> Tensor:
            return kernel.rotate(rows.clone(), positions)

        def samples() -> tuple[Tensor, ...]:
            [rows] = self._samples(sum(heads.counts) * heads.head_dim)()
            return rows, self._sample_positions(len(rows))

        operation = "rope" if norms is None else ROPE_OPERATIONS[qk_norm_form]
        shape = (heads.num_q + heads.num_kv, heads.head_dim)
        if not self._probe_kernel(operation, on_copy, shape, samples, dtype=self.dtype):
            return in_torch()
        return SplitAttention(layer, kernel, None if sinks is None else self.weight(sinks))

    def router(self, config: MoeConfig, bias: Tensor | None) -> RowOp:
        """See `Ops`: one kernel, for a softmax over all experts."""
        if config.scoring != "softmax" or config.num_groups > 1 or config.scale != 1.0:
            return super().router(config, bias)
        kernel = TopKRouter(config.num_experts, config.top_k, normalise=config.normalise)
        shape = config.num_experts, config.top_k
        samples = self._samples(config.num_experts, dtype=torch.float32)
        passes = self._probe_kernel("top-k router", kernel, shape, samples, dtype=torch.float32)
        return kernel if passes else super().router(config, bias)

    def experts(
        self,
        prefix: str,
        *,
        num_experts: int,
        top_k: int,
        shared: str | None,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        activation: GatedActivation = "silu_mul",
    ) -> Experts:
        """See `Ops`: one grouped kernel for all routed experts."""
        in_torch = partial(
            super().experts,
            prefix,
            num_experts=num_experts,
            top_k=top_k,
            shared=shared,
            names=names,
            activation=activation,
        )
        *gate_up, down = names
        if activation not in ACTIVATION_MODES:
            return in_torch()

        def matrix(linears: Sequence[str], number: int) -> tuple[Weight, Tensor | None]:
            return self._matrix([f"{prefix}{number}.{name}" for name in linears], None)

        firsts = matrix(gate_up, 0)[0], matrix([down], 0)[0]
        if any(isinstance(w, QuantizedWeight) and panels_support(w) for w in firsts):
            return in_torch()

        try:
            first = GroupedLinear(partial(matrix, gate_up), num_experts, activation=activation)
            second = GroupedLinear(partial(matrix, [down]), num_experts)
        except UnlikeWeightsError:  # one expert in full precision, say
            return in_torch()
        kernel = GroupedExperts(first, second, num_experts=num_experts, top_k=top_k, shared=None)
        inner, hidden_size = kernel.down.in_width, kernel.down.out_width

        def samples() -> tuple[Tensor, ...]:
            [x] = self._samples(hidden_size)()
            [scores] = self._samples(num_experts, dtype=torch.float32)()
            best = scores.topk(top_k).indices
            return x, torch.zeros_like(scores).scatter_(1, best, scores.gather(1, best))

        shape = num_experts, inner, hidden_size
        forms = dict.fromkeys(_form(w) for w in firsts if isinstance(w, QuantizedWeight))
        operation = ", ".join(["experts", *forms])
        passes = self._probe_kernel(
            operation, kernel, shape, samples, dtype=self.dtype, counts=(1, 2, 5, 16, 64)
        )
        if not passes:
            return in_torch()
        if shared is not None:
            gate_up_names = tuple(gate_up)
            kernel.shared = Mlp(
                self, shared, activation=activation, gate_up=gate_up_names, down=down
            )
        return kernel

    def _probe_kernel(
        self,
        operation: str,
        kernel: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
        *,
        dtype: torch.dtype,
        store: ProbeStore | None = None,
        counts: Sequence[int] = PROBE_ROW_COUNTS,
    ) -> bool:
        """Whether the kernel's rows are independent of the batch; records the verdict if they are."""
        chosen, verdict = probe_row_op(
            operation,
            kernel,
            shape,
            dtype,
            samples,
            exact=self.exact,
            store=store or self._store,
            counts=counts,
            strategy="kernel",
        )
        if chosen is kernel:
            self._record(verdict)
        return chosen is kernel

    def stack(self, layers: Sequence[DecoderLayer]) -> LayerStack:
        """See `Ops`: fused if every operation of every layer is a kernel."""
        return FusedLayers.of(layers) or LayerLoop(layers)


def _form(weight: QuantizedWeight) -> str:
    """The integers of a product, as the name of its operation has them."""
    rows = " by rows of 8" if weight.format.row_bits == 8 else ""
    return f"{weight.format.bits} bits{rows}"
