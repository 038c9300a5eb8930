"""Dense decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3; variants are configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness, ProbeStore
from ramify.models.builder import GatedMlp, LayerBuilder
from ramify.models.config import ModelConfig
from ramify.models.heads import Heads, HeadsBuilder, RotaryHeads
from ramify.models.ops.cpu_layer_attention import FusedAttentionArgs
from ramify.models.ops.cpu_layers import FusedLayers, LayerOps
from ramify.models.ops.functional import mark_nonfinite_rows
from ramify.models.ops.protocol import Attention, RowFunction
from ramify.models.ops.torch_linear import Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer. Each RMSNorm is part of the linear after it (`qkv`, `mlp`)."""

    # [T, hidden_size] -> [T, (num_heads + 2 * num_kv_heads) * head_dim]
    qkv: RowFunction
    heads: Heads
    o_proj: Linear
    mlp: GatedMlp


class DenseDecoder:
    """Pre-norm transformer with rotary positions, grouped-query attention and a gated MLP.

        hidden = embedding(token_ids)
        for layer in layers:
            hidden += o_proj(attention(rope(qk_norm(qkv(rms_norm(hidden))))))
            x = rms_norm(hidden)
            hidden += down(silu(gate(x)) * up(x))
        logits = lm_head(rms_norm(hidden))

    The caller owns the K/V cache and attention, passes both as `attend`, and calls under
    `torch.inference_mode`. On CPU all layers can run as one compiled call: `ops.cpu_layers`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        exact: bool,
        store: ProbeStore | None = None,
        linear_strategy: str | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> None:
        """Pack the weights and choose an implementation of each operation.

        Args:
            weights: every name of `config.tensor_shapes()`, in `dtype`.
            exact: require batch invariance: a row's bits do not depend on the other rows.
            store: cached probe verdicts; None uses this user's file.
            linear_strategy: a key of `torch_linear.TORCH_LINEARS`, forced for every matrix; None
                lets the probe choose. Tests inject faults with it.
            on_layer: called after each layer is built, for a progress bar.

        Matrices with the same input are concatenated (q, k, v; gate, up). Most strategies copy the weights.
        """
        self.config, self.dtype, self.exact = config, dtype, exact
        self._build = LayerBuilder(
            weights, dtype=dtype, exact=exact, store=store, linear_strategy=linear_strategy
        )
        self._heads = HeadsBuilder(config, self._build)
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers: list[_Layer] = []
        for layer in range(config.num_layers):
            self._layers.append(self._build_layer(f"model.layers.{layer}."))
            if on_layer is not None:
                on_layer()
        self._fused_layers = self._fuse_layers()
        tied = config.tie_word_embeddings
        self._head = self._build.product(
            "model.embed_tokens" if tied else "lm_head",
            norm=("model.norm.weight", config.rms_norm_eps),
        )
        self._build.forget_weights()

    def exactness(self) -> list[Exactness]:
        """The implementation of each distinct operation, shape and dtype, and why it was chosen."""
        return self._build.verdicts()

    @property
    def row_multiple(self) -> int:
        """Pad a step to a multiple of this many rows, or its bits are not exact."""
        return 1 if self._heads.fused or not self.exact else FP32_ROW_MULTIPLE

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Run all layers; returns the hidden rows before the final norm, which `logits` applies.

        Args:
            token_ids: [T] int64, each below vocab_size.
            positions: [T] int64, each below max_model_len.
            attend: called once per layer, in order; q, k and v may be views. With `fused_args` it may
                be called for the last layer alone, or not at all.

        Returns:
            [T, hidden_size] in the model's dtype. Rows that `attend.output_rows` leaves out hold the
            input of the last layer, or NaN if their K/V of that layer is not finite.
        """
        hidden = F.embedding(token_ids, self._embedding)
        if self._fused_layers is not None and len(hidden):
            return self._fused_layers.run(hidden, positions, attend)
        angles = self._heads.angles(positions)
        output_rows: Tensor | None = getattr(attend, "output_rows", None)
        for number, layer in enumerate(self._layers):
            q, k, v = layer.heads(layer.qkv(hidden), *angles)
            if output_rows is not None and number == len(self._layers) - 1:
                wanted = hidden[output_rows]
                self._finish(layer, wanted, attend(number, q[output_rows], k, v))
                hidden[output_rows] = wanted
                mark_nonfinite_rows(hidden, k, v)
            else:
                self._finish(layer, hidden, attend(number, q, k, v))
        return hidden

    def _finish(self, layer: _Layer, hidden: Tensor, attn_out: Tensor) -> None:
        """Everything of a layer after attention, added to `hidden` in place."""
        layer.o_proj.add_to(hidden, attn_out.flatten(1))
        layer.mlp.add_to(hidden, hidden)

    def warm_up(self, fused_args: FusedAttentionArgs) -> bool:
        """Compile the fused layers for arguments of this kind now; False if this model has none."""
        if self._fused_layers is None:
            return False
        self._fused_layers.warm_up(fused_args)
        return True

    def logits(self, hidden: Tensor) -> Tensor:
        """lm_head(rms_norm(hidden)): rows of `forward` [R, hidden_size] -> [R, vocab_size] float32."""
        return self._head(hidden).float()

    def _build_layer(self, prefix: str) -> _Layer:
        attention, eps = f"{prefix}self_attn.", self.config.rms_norm_eps
        return _Layer(
            qkv=self._build.product(
                *(f"{attention}{name}_proj" for name in "qkv"),
                norm=(f"{prefix}input_layernorm.weight", eps),
            ),
            heads=self._heads.of(attention),
            o_proj=self._build.linear(f"{attention}o_proj"),
            mlp=self._build.mlp(
                f"{prefix}mlp.", norm=(f"{prefix}post_attention_layernorm.weight", eps)
            ),
        )

    def _fuse_layers(self) -> FusedLayers | None:
        """All layers as one op list, if every operation is a compiled CPU op; else None."""
        all_ops: list[LayerOps] = []
        for layer in self._layers:
            rope = layer.heads.qk_norm_rope if isinstance(layer.heads, RotaryHeads) else None
            mlp = layer.mlp
            ops = LayerOps.of(
                layer.qkv, rope, layer.o_proj.packed_linear, mlp.gate_up, mlp.down.packed_linear
            )
            if ops is None:
                return None
            all_ops.append(ops)
        return FusedLayers(all_ops, num_heads=self._heads.counts, head_dim=self.config.head_dim)
