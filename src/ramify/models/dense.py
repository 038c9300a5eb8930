"""One dense decoder for the Llama family and its relatives; what differs is configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exact import Exactness, ProbeStore
from ramify.models.builder import GatedMlp, LayerBuilder, Norm
from ramify.models.config import ModelConfig
from ramify.models.layers import RMSNorm, Rotary, rotate
from ramify.models.linear import Linear
from ramify.models.rows import sample_rows

# attend(layer, q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]) -> like q. The
# callee stores k and v and attends with scale head_dim ** -0.5.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer; the matrices of q, k and v are one."""

    attention_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    mlp_norm: Norm
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
            linear_strategy: one of `layers.LINEAR_STRATEGIES` for every matrix instead of the
                probe's choice; tests put faults in with it.
            on_layer: called after each layer, for progress.

        Matrices that read the same input become one; most are copied, as their strategy wants them.
        """
        self.config, self.dtype, self.exact = config, dtype, exact
        self._build = LayerBuilder(
            weights, dtype=dtype, exact=exact, store=store, linear_strategy=linear_strategy
        )
        self._rotary = Rotary(
            config.rope, head_dim=config.head_dim, max_len=config.max_model_len, dtype=dtype
        )
        self._rotate = self._choose_rotate()
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers: list[_Layer] = []
        for layer in range(config.num_layers):
            self._layers.append(self._build_layer(f"model.layers.{layer}."))
            if on_layer is not None:
                on_layer()
        self._norm = self._rms_norm("model.norm.weight")
        tied = config.tie_word_embeddings
        self._head = self._build.linear("model.embed_tokens" if tied else "lm_head")
        self._build.forget_weights()

    def exactness(self) -> list[Exactness]:
        """How each distinct operation, shape and dtype is computed, and why."""
        return self._build.verdicts()

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden rows before the final norm; `logits` applies it.

        Args:
            token_ids: [T] int64, each below vocab_size.
            positions: [T] int64, each below max_model_len.
            attend: called once per layer, in order; its k is contiguous, its v may be a view.

        Returns:
            [T, hidden_size] in the model's dtype.
        """
        hidden = F.embedding(token_ids, self._embedding)
        cos, sin = self._rotary.at(positions)
        for number, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, layer.attention_norm(hidden))
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            hidden = hidden + layer.output(attend(number, q, k, v).flatten(1))
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] rows of `forward` -> [R, vocab_size] float32."""
        return self._head(self._norm(hidden)).float()

    def _qkv(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [T, heads, head_dim], normalised but not yet turned."""
        config = self.config
        num_kv = config.num_kv_heads
        heads = layer.qkv(x).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_heads, num_kv, num_kv), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        return q, k, v

    def _build_layer(self, prefix: str) -> _Layer:
        attention = f"{prefix}self_attn."
        num_q, num_kv = self.config.num_heads, self.config.num_kv_heads
        qk_norm = self.config.qk_norm
        return _Layer(
            attention_norm=self._rms_norm(f"{prefix}input_layernorm.weight"),
            qkv=self._build.joined(*(f"{attention}{part}_proj" for part in "qkv")),
            q_norm=self._head_norm(f"{attention}q_norm.weight", num_q) if qk_norm else None,
            k_norm=self._head_norm(f"{attention}k_norm.weight", num_kv) if qk_norm else None,
            output=self._build.linear(f"{attention}o_proj"),
            mlp_norm=self._rms_norm(f"{prefix}post_attention_layernorm.weight"),
            mlp=self._build.mlp(f"{prefix}mlp."),
        )

    def _rms_norm(self, name: str) -> Norm:
        return self._build.rms_norm(name, self.config.rms_norm_eps)

    def _head_norm(self, name: str, num_heads: int) -> Norm:
        norm = RMSNorm(self._build.weight(name), self.config.rms_norm_eps)
        num_joined = self.config.num_heads + 2 * self.config.num_kv_heads
        shape = (num_heads, self.config.head_dim)

        def samples() -> tuple[Tensor, ...]:
            return (sample_rows(num_joined, shape[1], dtype=self.dtype)[:, :num_heads],)

        return self._build.rows("rms_norm of heads", norm, shape, samples)

    def _choose_rotate(self) -> Callable[..., Tensor]:
        shape = (self.config.num_heads, self.config.head_dim)

        def samples() -> tuple[Tensor, ...]:
            heads = sample_rows(*shape, dtype=self.dtype)
            positions = torch.arange(heads.shape[0]) % self.config.max_model_len
            return (heads, *self._rotary.at(positions))

        return self._build.rows("rotary", rotate, shape, samples)
