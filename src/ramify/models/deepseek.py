"""DeepSeek-V2, V3 and V3.2: multi-head latent attention, sparse index (V3.2), mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness, ProbeStore
from ramify.attention.mla import MlaQuery, UpProjection
from ramify.attention.sparse_index import IndexQuery
from ramify.models.builder import GatedMlp, LayerBuilder
from ramify.models.config import ModelConfig
from ramify.models.deepseek_config import IndexConfig, MlaConfig
from ramify.models.moe import Experts
from ramify.models.ops.functional import (
    apply_rotary,
    deinterleave_rope,
    layer_norm,
    per_head_matmul,
)
from ramify.models.ops.probe import sample_rows
from ramify.models.ops.protocol import Attention, RowFunction
from ramify.models.ops.torch_linear import Linear
from ramify.models.rope import RotaryTable

# The norms between low-rank projections have this eps, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class _Indexer:
    """The lightning indexer of one layer (V3.2): its queries, its key, a weight for each index head."""

    query: Linear
    key: Linear
    key_norm: RowFunction
    weights: Linear  # float32


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: RowFunction
    q_a: Linear | None
    q_norm: RowFunction | None
    q_b: Linear
    kv_a: Linear
    latent_norm: RowFunction
    up: UpProjection
    indexer: _Indexer | None
    o_proj: Linear
    mlp_norm: RowFunction
    mlp: GatedMlp | Experts


class DeepseekDecoder:
    """Pre-norm transformer with MLA and a gated MLP or mixture of experts; same interface as `DenseDecoder`.

        x = rms_norm(hidden)
        q_latent = rms_norm(q_a(x))
        q_nope, q_rope = split(q_b(q_latent))
        latent, k_rope = split(kv_a(x))
        hidden += o_proj(attend(MlaQuery(q_nope, rope(q_rope)), rms_norm(latent), rope(k_rope)))
        hidden += mlp(rms_norm(hidden))

    The K/V cache holds `latent` and `k_rope` of a token, for all heads. `attend` leads to
    `ramify.attention.mla.MlaAttention`. The caller calls under `torch.inference_mode`.
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
        """Pack the weights and choose an implementation of each operation; see `DenseDecoder`."""
        assert config.mla is not None
        self.config, self.dtype, self.exact = config, dtype, exact
        self._mla: MlaConfig = config.mla
        self._build = LayerBuilder(
            weights, dtype=dtype, exact=exact, store=store, linear_strategy=linear_strategy
        )
        rope_dim = self._mla.rope_dim
        self._rotary = RotaryTable(
            config.rope, head_dim=rope_dim, max_len=config.max_model_len, dtype=dtype
        )
        self._rotate_query = self._choose_rotary(config.num_heads)
        self._rotate_key = self._choose_rotary(1)
        index = self._mla.index
        self._rotate_index = self._choose_rotary(index.num_heads) if index else apply_rotary
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers: list[_Layer] = []
        for number in range(config.num_layers):
            self._layers.append(self._layer(number))
            if on_layer is not None:
                on_layer()
        self._norm = self._build.rms_norm("model.norm.weight", config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._head = self._build.linear("model.embed_tokens" if tied else "lm_head")
        self._build.forget_weights()

    def exactness(self) -> list[Exactness]:
        """The implementation of each distinct operation, shape and dtype, and why it was chosen."""
        return self._build.verdicts()

    @property
    def row_multiple(self) -> int:
        """See `DenseDecoder.row_multiple`."""
        return FP32_ROW_MULTIPLE if self.exact else 1

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Run all layers; returns the hidden rows before the final norm, see `DenseDecoder.forward`."""
        hidden = F.embedding(token_ids, self._embedding)
        cos, sin = self._rotary.cos_sin(positions)
        for number, layer in enumerate(self._layers):
            attn_out = attend(
                number, *self._query_and_kv(layer, layer.attention_norm(hidden), cos, sin)
            )
            hidden = hidden + layer.o_proj(attn_out.flatten(1))
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """lm_head(rms_norm(hidden)): rows of `forward` [R, hidden_size] -> [R, vocab_size] float32."""
        return self._head(self._norm(hidden)).float()

    def _query_and_kv(
        self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[MlaQuery, Tensor, Tensor] | tuple[MlaQuery, Tensor, Tensor, Tensor]:
        """The query, then what is cached of each token: latent, rotary key, with an index its key."""
        mla = self._mla
        q_latent = x
        if layer.q_a is not None and layer.q_norm is not None:
            q_latent = layer.q_norm(layer.q_a(x))
        heads = layer.q_b(q_latent).unflatten(-1, (-1, mla.nope_dim + mla.rope_dim))
        q_nope, q_rope = heads.split((mla.nope_dim, mla.rope_dim), -1)
        latent, k_rope = layer.kv_a(x).split((mla.latent_dim, mla.rope_dim), -1)
        latent, k_rope = layer.latent_norm(latent.contiguous()), k_rope[:, None]
        if mla.rope_interleaved:
            q_rope, k_rope = deinterleave_rope(q_rope), deinterleave_rope(k_rope)
        q_rope = self._rotate_query(q_rope.contiguous(), cos, sin)
        k_rope = self._rotate_key(k_rope.contiguous(), cos, sin)[:, 0]
        if layer.indexer is None or mla.index is None:
            return MlaQuery(q_nope, q_rope, layer.up), latent, k_rope
        indexer = layer.indexer
        index_q = indexer.query(q_latent).unflatten(-1, (-1, mla.index.head_dim))
        index_q = self._rope_first_dims(self._rotate_index, index_q, cos, sin)
        index_key = indexer.key_norm(indexer.key(x))[:, None]
        index_key = self._rope_first_dims(self._rotate_key, index_key, cos, sin)[:, 0]
        index = IndexQuery(index_q, indexer.weights(x.float()))
        return MlaQuery(q_nope, q_rope, layer.up, index), latent, k_rope, index_key

    def _rope_first_dims(
        self, rope: Callable[..., Tensor], heads: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Rotary embedding of the first `rope_dim` dimensions of each head, the others copied."""
        dim = self._mla.rope_dim
        return torch.cat((rope(heads[..., :dim].contiguous(), cos, sin), heads[..., dim:]), -1)

    def _layer(self, number: int) -> _Layer:
        config, build, mla = self.config, self._build, self._mla
        prefix = f"model.layers.{number}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        low_rank = mla.q_lora_rank is not None
        sparse_mlp = config.moe is not None and number not in config.moe.dense_layers
        return _Layer(
            attention_norm=build.rms_norm(f"{prefix}input_layernorm.weight", config.rms_norm_eps),
            q_a=build.linear(f"{attention}q_a_proj") if low_rank else None,
            q_norm=(
                build.rms_norm(f"{attention}q_a_layernorm.weight", LATENT_NORM_EPS)
                if low_rank
                else None
            ),
            q_b=build.linear(f"{attention}{'q_b_proj' if low_rank else 'q_proj'}"),
            kv_a=build.linear(f"{attention}kv_a_proj_with_mqa"),
            latent_norm=build.rms_norm(f"{attention}kv_a_layernorm.weight", LATENT_NORM_EPS),
            up=self._up_projection(f"{attention}kv_b_proj.weight"),
            indexer=self._indexer(f"{attention}indexer.", mla.index) if mla.index else None,
            o_proj=build.linear(f"{attention}o_proj"),
            mlp_norm=build.rms_norm(
                f"{prefix}post_attention_layernorm.weight", config.rms_norm_eps
            ),
            mlp=(
                Experts.build(config.moe, build, mlp)
                if sparse_mlp and config.moe is not None
                else build.mlp(mlp)
            ),
        )

    def _up_projection(self, name: str) -> UpProjection:
        mla, num_heads = self._mla, self.config.num_heads
        matrix = self._build.weight(name).unflatten(0, (num_heads, -1))
        keys, values = matrix.split((mla.nope_dim, mla.value_dim), 1)
        values = values.transpose(1, 2)
        return UpProjection(
            keys, values, self._per_head_matmul(keys), self._per_head_matmul(values)
        )

    def _per_head_matmul(self, matrices: Tensor) -> Callable[[Tensor], Tensor]:
        num_heads, width, _ = matrices.shape
        return self._build.rows(
            "per-head matmul",
            partial(per_head_matmul, matrices=matrices),
            tuple(matrices.shape),
            lambda: (sample_rows(num_heads, width, dtype=self.dtype),),
        )

    def _indexer(self, prefix: str, index: IndexConfig) -> _Indexer:
        build, dim = self._build, index.head_dim
        weight, bias = build.weight(f"{prefix}k_norm.weight"), build.weight(f"{prefix}k_norm.bias")
        return _Indexer(
            query=build.linear(f"{prefix}wq_b"),
            key=build.linear(f"{prefix}wk"),
            key_norm=build.rows(
                "layer_norm",
                partial(layer_norm, weight=weight, bias=bias),
                (dim,),
                lambda: (sample_rows(dim, dtype=self.dtype),),
            ),
            weights=build.linear(f"{prefix}weights_proj"),
        )

    def _choose_rotary(self, num_heads: int) -> Callable[..., Tensor]:
        shape = (num_heads, self._mla.rope_dim)

        def samples() -> tuple[Tensor, ...]:
            heads = sample_rows(*shape, dtype=self.dtype)
            positions = torch.arange(heads.shape[0]) % self.config.max_model_len
            return (heads, *self._rotary.cos_sin(positions))

        return self._build.rows("rope", apply_rotary, shape, samples)
