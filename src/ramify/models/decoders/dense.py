"""Dense decoders of the Llama family; variants are configuration (`models/configs/families`)."""

from __future__ import annotations

from torch import Tensor

from ramify.models.configs.dense_variant import ActivationName
from ramify.models.configs.model_config import ModelConfig
from ramify.models.decoders.decoder import DecoderBinding, norm_of
from ramify.models.decoders.moe import MoeMlp
from ramify.models.ops.mlp import Mlp
from ramify.models.ops.protocol import (
    Attended,
    ForwardStep,
    FusableExperts,
    FusableMlp,
    FusableParts,
    GatedActivation,
    Heads,
    Linear,
    Ops,
    RowOp,
    SelfAttention,
)


class DenseLayer:
    """Rotary positions, grouped-query attention, an MLP or experts; norms before or behind either.

    hidden += scale * after_attention(o_proj(attention(rope(qk_norm(qkv(before_attention(hidden)))))))
    hidden += scale * after_mlp(mlp(before_mlp(hidden)))

    In parallel, the MLP reads what attention read.
    """

    def __init__(self, ops: Ops, config: ModelConfig, layer: int) -> None:
        variant = config.variant
        self.qkv, self.attention, self.o_proj = bind_attention(ops, config, layer)
        self.mlp = bind_mlp(ops, config, layer)
        self.after_attention = _row_norm(ops, config, layer, variant.names.after_attention)
        self.after_mlp = _row_norm(ops, config, layer, variant.names.after_mlp)
        self.is_parallel, self.scale = variant.block == "parallel", variant.residual_scale

    def attend(self, hidden: Tensor, step: ForwardStep) -> Attended:
        """See `DecoderLayer`."""
        return self.attention(self.qkv(hidden, step), step)

    def finish(self, hidden: Tensor, rows: Tensor, step: ForwardStep) -> Tensor:
        """See `DecoderLayer`."""
        if self.is_parallel:
            mlp_out = self.mlp(hidden, step)
            hidden = self._add(hidden, self.o_proj, rows, step, self.after_attention)
            return _add_scaled(hidden, mlp_out, self.after_mlp, self.scale)
        hidden = self._add(hidden, self.o_proj, rows, step, self.after_attention)
        return self._add(hidden, self.mlp, hidden, step, self.after_mlp)

    def _add(
        self, hidden: Tensor, block: Linear, x: Tensor, step: ForwardStep, norm: RowOp | None
    ) -> Tensor:
        if norm is None and self.scale == 1.0:
            return block(x, step, residual=hidden)
        return _add_scaled(hidden, block(x, step), norm, self.scale)

    @property
    def fusable(self) -> FusableParts:
        """See `FusableLayer`."""
        mlp: FusableMlp | FusableExperts
        if isinstance(self.mlp, Mlp):
            mlp = FusableMlp(self.mlp.gate_up, self.mlp.down)
        else:
            mlp = self.mlp.fusable
        return FusableParts(
            self.qkv,
            self.attention,
            self.o_proj,
            mlp,
            self.after_attention,
            self.after_mlp,
            self.scale,
            self.is_parallel,
        )


def _add_scaled(hidden: Tensor, out: Tensor, norm: RowOp | None, scale: float) -> Tensor:
    out = out if norm is None else norm(out)
    return hidden.add_(out if scale == 1.0 else out * scale)


def bind_attention(
    ops: Ops, config: ModelConfig, layer: int
) -> tuple[Linear, SelfAttention, Linear]:
    """QKV with the norm before it, attention, and O of a layer."""
    prefix, variant = f"model.layers.{layer}.", config.variant
    names = variant.names
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    qkv = ops.linear(
        *(prefix + name for name in names.qkv),
        norm=norm_of(config, layer, names.before_attention),
        shard=heads,
    )
    qk_norm = None
    if variant.qk_norm is not None:
        kind, offset = variant.qk_norm_kind, variant.norm_offset
        q_norm, k_norm = (
            norm_of(config, layer, name, kind=kind, offset=offset)
            for name in (names.q_norm, names.k_norm)
        )
        assert q_norm is not None
        assert k_norm is not None
        qk_norm = q_norm, k_norm
    attention = ops.attention(
        layer,
        heads,
        config.rope_of(layer),
        qk_norm=qk_norm,
        qk_norm_form=variant.qk_norm or "head",
        sinks=f"{prefix}self_attn.sinks" if variant.attention_sinks else None,
    )
    return qkv, attention, ops.linear(prefix + names.o, shard="rows")


class NormedExperts:
    """A mixture of experts behind its norm, which router and experts share."""

    def __init__(self, norm: RowOp, experts: MoeMlp) -> None:
        self.norm, self.experts = norm, experts

    def __call__(
        self, x: Tensor, step: ForwardStep | None, *, residual: Tensor | None = None
    ) -> Tensor:
        """[T, hidden_size] -> the same; see `Linear` for the residual."""
        return self.experts(self.norm(x), step, residual=residual)

    @property
    def fusable(self) -> FusableExperts:
        """The operations of a layer's experts."""
        moe, shared = self.experts, None
        if moe.shared is not None:
            shared = FusableMlp(moe.shared.gate_up, moe.shared.down)
        weight = moe.shared_weight
        return FusableExperts(self.norm, moe.gate, moe.route, moe.experts, shared, weight)


def bind_mlp(ops: Ops, config: ModelConfig, layer: int) -> Mlp | NormedExperts:
    """The MLP or the experts of a layer, with the norm before it."""
    variant, prefix = config.variant, f"model.layers.{layer}."
    names = variant.names
    before = names.before_mlp
    if before is None and variant.block == "parallel":
        before = names.before_attention
    norm = norm_of(config, layer, before)
    if config.moe is not None and config.has_experts(layer):
        assert norm is not None
        return NormedExperts(ops.norm(norm), MoeMlp(ops, config.moe, prefix))
    activation = variant.activation
    return Mlp(
        ops,
        prefix,
        norm=norm,
        activation=GATED[activation] if variant.has_gate else activation,
        gate_up=names.gate_up,
        down=names.down,
    )


GATED: dict[ActivationName, GatedActivation] = {
    "silu": "silu_mul",
    "gelu_tanh": "gelu_tanh_mul",
    "gelu": "gelu_mul",
}


def _row_norm(ops: Ops, config: ModelConfig, layer: int, name: str | None) -> RowOp | None:
    norm = norm_of(config, layer, name)
    return None if norm is None else ops.norm(norm)


DENSE = DecoderBinding(DenseLayer)
