"""DeepSeek V2 to V3.2: latent attention (MLA), sparse index, experts, YaRN. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.family import Family, attention_bias
from ramify.models.configs.fields import MAX_PARTS, ConfigFields, shown
from ramify.models.configs.moe import (
    MoeConfig,
    Shapes,
    check_expert_groups,
    num_first_dense_layers,
)
from ramify.models.configs.rope import rope_settings, yarn_mscale


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The lightning indexer (V3.2): a small attention that selects the keys which attention reads."""

    num_heads: int
    head_dim: int
    top_k: int  # keys selected per query


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): K/V of all heads are projections of one latent."""

    q_lora_rank: int | None  # None: no low-rank projection of queries
    latent_dim: int
    nope_dim: int  # of q and k per head, without rope
    rope_dim: int  # of q per head, and of the key that all heads share, with rope
    value_dim: int  # per head
    rope_interleaved: bool  # rotary pairs are (0, 1), (2, 3), ..., not half a head apart
    scale: float  # of attention scores
    index: IndexConfig | None = None

    @classmethod
    def from_hf(cls, fields: ConfigFields, model_type: str) -> MlaConfig:
        """Read the MLA fields of a parsed `config.json`.

        Raises:
            CheckpointError, UnsupportedModelError: see `ModelConfig.from_hf`.
        """
        config, source = fields.config, fields.source
        sparse = model_type == "deepseek_v32"
        q_rank = config.get("q_lora_rank", 1536)
        if q_rank is not None:
            q_rank = fields.count("q_lora_rank", 1536)
        elif sparse:
            raise UnsupportedModelError(
                f"{source}: q_lora_rank is null; the index of {model_type} reads that projection"
            )
        if fields.flag("mlp_bias", False):
            raise UnsupportedModelError(f"{source}: mlp_bias is not supported for {model_type}")
        nope, rope = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
        if rope % 2:
            raise CheckpointError(f"{source}: qk_rope_head_dim {rope} is odd; rotary needs pairs")
        index = None
        if sparse:
            index = IndexConfig(
                num_heads=fields.count("index_n_heads", 64),
                head_dim=fields.count("index_head_dim", 128),
                top_k=fields.count("index_topk", 2048),
            )
            if index.head_dim < rope:
                raise CheckpointError(
                    f"{source}: index_head_dim {index.head_dim} is below qk_rope_head_dim {rope}"
                )
        return cls(
            q_lora_rank=q_rank,
            latent_dim=fields.count("kv_lora_rank", 512),
            nope_dim=nope,
            rope_dim=rope,
            value_dim=fields.count("v_head_dim", 128),
            rope_interleaved=model_type != "deepseek_v3" or fields.flag("rope_interleave", True),
            scale=(nope + rope) ** -0.5 * _yarn_score_factor(fields),
            index=index,
        )

    def tensor_shapes(self, hidden_size: int, num_heads: int, *, bias: bool) -> Shapes:
        """Shapes of the attention tensors of a layer, by name within the layer."""
        q_rank, latent = self.q_lora_rank, self.latent_dim
        q_width = num_heads * (self.nope_dim + self.rope_dim)
        shapes: Shapes = {}
        if q_rank is None:
            shapes["self_attn.q_proj.weight"] = (q_width, hidden_size)
        else:
            shapes["self_attn.q_a_proj.weight"] = (q_rank, hidden_size)
            shapes["self_attn.q_a_layernorm.weight"] = (q_rank,)
            shapes["self_attn.q_b_proj.weight"] = (q_width, q_rank)
            if bias:
                shapes["self_attn.q_a_proj.bias"] = (q_rank,)
        shapes["self_attn.kv_a_proj_with_mqa.weight"] = (latent + self.rope_dim, hidden_size)
        shapes["self_attn.kv_a_layernorm.weight"] = (latent,)
        kv_width = num_heads * (self.nope_dim + self.value_dim)
        shapes["self_attn.kv_b_proj.weight"] = (kv_width, latent)
        shapes["self_attn.o_proj.weight"] = (hidden_size, num_heads * self.value_dim)
        if bias:
            shapes["self_attn.kv_a_proj_with_mqa.bias"] = (latent + self.rope_dim,)
            shapes["self_attn.o_proj.bias"] = (hidden_size,)
        if self.index is not None and q_rank is not None:
            heads, dim = self.index.num_heads, self.index.head_dim
            shapes["self_attn.indexer.wq_b.weight"] = (heads * dim, q_rank)
            shapes["self_attn.indexer.wk.weight"] = (dim, hidden_size)
            shapes["self_attn.indexer.k_norm.weight"] = (dim,)
            shapes["self_attn.indexer.k_norm.bias"] = (dim,)
            shapes["self_attn.indexer.weights_proj.weight"] = (heads, hidden_size)
        return shapes


def deepseek_experts(fields: ConfigFields, num_layers: int, model_type: str) -> MoeConfig | None:
    """Read the expert fields of a parsed `config.json`; None if no layer has experts.

    Raises:
        CheckpointError, UnsupportedModelError: see `ModelConfig.from_hf`.
    """
    dense = _dense_layers(fields, model_type, num_layers)
    if len(dense) == num_layers:
        return None
    config, source, v2 = fields.config, fields.source, model_type == "deepseek_v2"
    methods = ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",)
    scoring: Literal["softmax", "sigmoid"] = "softmax" if v2 else "sigmoid"
    method = _given(fields, "topk_method", methods[0])
    normalise = fields.flag("norm_topk_prob", not v2)
    for name, value, known in (
        ("topk_method", method, methods),
        ("scoring_func", _given(fields, "scoring_func", scoring), (scoring,)),
        ("moe_layer_freq", config.get("moe_layer_freq", 1), (1,)),
        ("norm_topk_prob", normalise, (False,) if v2 else (True, False)),
    ):
        if value not in known:
            raise UnsupportedModelError(
                f"{source}: {name} is {shown(value)}; supported for {model_type}: "
                f"{', '.join(map(repr, known))}"
            )
    num_experts = fields.count("n_routed_experts", 64 if v2 else 256, limit=MAX_PARTS)
    grouped = method != "greedy"
    groups = fields.count("n_group", None if v2 else 8) if grouped else 1
    topk_groups = fields.count("topk_group", None if v2 else 4) if grouped else 1
    expert_width = fields.count("moe_intermediate_size", 1407 if v2 else 2048)
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=fields.count("num_experts_per_tok", None if v2 else 8),
        expert_intermediate_size=expert_width,
        shared_intermediate_size=expert_width * fields.count("n_shared_experts", 2 if v2 else 1),
        scoring=scoring,
        num_groups=groups,
        topk_groups=topk_groups,
        normalise=normalise,
        scale=fields.number("routed_scaling_factor", 1.0 if v2 else 2.5),
        dense_layers=dense,
    )
    check_expert_groups(source, num_experts, groups, topk_groups, moe.top_k)
    if scoring == "sigmoid" and num_experts // groups < 2:
        raise CheckpointError(
            f"{source}: n_group {groups} leaves {num_experts // groups} of {num_experts} "
            "experts to a group; its score is the sum of the best two"
        )
    return moe


def _dense_layers(fields: ConfigFields, model_type: str, num_layers: int) -> frozenset[int]:
    config = fields.config
    if model_type == "deepseek_v32":
        kinds = fields.layer_kinds("mlp_layer_types", num_layers, ("dense", "sparse"))
        if kinds is not None:
            return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if "n_routed_experts" in config and config["n_routed_experts"] is None:
        return frozenset(range(num_layers))
    first = num_first_dense_layers(fields, 0 if model_type == "deepseek_v2" else 3)
    return frozenset(range(min(first, num_layers)))


def _yarn_score_factor(fields: ConfigFields) -> float:
    """DeepSeek's extra factor of attention scores under YaRN: mscale(factor, mscale_all_dim) ** 2."""
    settings = rope_settings(fields)
    rope = ConfigFields(settings, f"{fields.source} (rope)")
    mscale = rope.factor("mscale_all_dim")
    if settings.get("rope_type") in (None, "default") or mscale is None:
        return 1.0
    return yarn_mscale(rope.number("factor"), mscale) ** 2


def _given(fields: ConfigFields, name: str, default: str) -> object:
    """A field, or its default where it is null or absent."""
    value = fields.config.get(name)
    return default if value is None else value


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    experts=partial(deepseek_experts, model_type="deepseek_v2"),
    biases=attention_bias,
    eos_token_id=2,
    is_latent=True,
    has_mtp_layers=True,
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    experts=partial(deepseek_experts, model_type="deepseek_v3"),
    biases=attention_bias,
    eos_token_id=1,
    is_latent=True,
    has_mtp_layers=True,
)

DEEPSEEK_V32 = Family(
    model_type="deepseek_v32",
    experts=partial(deepseek_experts, model_type="deepseek_v32"),
    biases=attention_bias,
    eos_token_id=1,
    is_latent=True,
    has_mtp_layers=True,
)
