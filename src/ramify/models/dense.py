"""One dense decoder for the Llama family and its relatives; what differs is configuration."""

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
    """One decoder layer; norms are in what they go before."""

    qkv: RowFunction  # [T, hidden_size] -> queries, keys and values of each token, side by side
    heads: Heads
    o_proj: Linear
    mlp: GatedMlp


class DenseDecoder:
    """Llama, Mistral, Qwen2 and Qwen3: tokens and positions in, hidden rows and logits out.

    The caller owns K/V and attention (`attend`) and runs it under `torch.inference_mode`.
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
        """Arrange the weights and choose how each operation is computed.

        Args:
            weights: every name of `config.tensor_shapes()`, in `dtype`.
            exact: the bits of a row must not depend on the other rows.
            store: verdicts of earlier probes; None uses the file of this user.
            linear_strategy: one of `torch_linear.TORCH_LINEARS` for every matrix instead of the
                probe's choice; tests put faults in with it.
            on_layer: called after each layer, for progress.

        Matrices that read the same input become one; most are copied, as their strategy wants them.
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
        """How each distinct operation, shape and dtype is computed, and why."""
        return self._build.verdicts()

    @property
    def row_multiple(self) -> int:
        """Whole multiples of so many rows are what a step should have for its bits to be exact."""
        return 1 if self._heads.fused or not self.exact else FP32_ROW_MULTIPLE

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Hidden rows before the final norm; `logits` applies it.

        Args:
            token_ids: [T] int64, each below vocab_size.
            positions: [T] int64, each below max_model_len.
            attend: called once per layer, in order, unless it says how to do without; q, k and v
                may be views.

        Returns:
            [T, hidden_size] in the model's dtype. Rows that `attend.output_rows` does not name may be
            those before the last layer, or NaN where their K/V of that layer is not finite.
        """
        hidden = F.embedding(token_ids, self._embedding)
        if self._fused_layers is not None and len(hidden):
            return self._fused_layers.run(hidden, positions, attend)
        angles = self._heads.angles(positions)
        rows: Tensor | None = getattr(attend, "output_rows", None)
        for number, layer in enumerate(self._layers):
            q, k, v = layer.heads(layer.qkv(hidden), *angles)
            if rows is not None and number == len(self._layers) - 1:
                some = hidden[rows]
                self._finish(layer, some, attend(number, q[rows], k, v))
                hidden[rows] = some
                mark_nonfinite_rows(hidden, k, v)
            else:
                self._finish(layer, hidden, attend(number, q, k, v))
        return hidden

    def _finish(self, layer: _Layer, hidden: Tensor, attn_out: Tensor) -> None:
        layer.o_proj.add_to(hidden, attn_out.flatten(1))
        layer.mlp.add_to(hidden, hidden)

    def warm_up(self, fused_args: FusedAttentionArgs) -> bool:
        """Whether short steps use `attend.fused_args`; it is compiled for its kind now."""
        if self._fused_layers is None:
            return False
        self._fused_layers.warm_up(fused_args)
        return True

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] rows of `forward` -> [R, vocab_size] float32."""
        return self._head(hidden).float()

    def _build_layer(self, prefix: str) -> _Layer:
        attention, eps = f"{prefix}self_attn.", self.config.rms_norm_eps
        return _Layer(
            qkv=self._build.product(
                *(f"{attention}{part}_proj" for part in "qkv"),
                norm=(f"{prefix}input_layernorm.weight", eps),
            ),
            heads=self._heads.of(attention),
            o_proj=self._build.linear(f"{attention}o_proj"),
            mlp=self._build.mlp(
                f"{prefix}mlp.", norm=(f"{prefix}post_attention_layernorm.weight", eps)
            ),
        )

    def _fuse_layers(self) -> FusedLayers | None:
        """All layers in one chain, if each of their operations is a kernel of ours."""
        found: list[LayerOps] = []
        for layer in self._layers:
            turn = layer.heads.qk_norm_rope if isinstance(layer.heads, RotaryHeads) else None
            mlp = layer.mlp
            links = LayerOps.of(
                layer.qkv, turn, layer.o_proj.packed_linear, mlp.gate_up, mlp.down.packed_linear
            )
            if links is None:
                return None
            found.append(links)
        return FusedLayers(found, num_heads=self._heads.counts, head_dim=self.config.head_dim)
