"""What DeepSeek's `config.json` says beside a dense decoder's: latent attention, index, experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.config_fields import ConfigFields

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The small attention that decides which keys the large one reads (V3.2)."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): K/V of all heads come from one latent."""

    q_lora_rank: int | None  # None: queries are projected in one step
    latent_dim: int
    nope_dim: int  # of a head's query and key, without position
    rope_dim: int  # of a head's query and of the key that all heads share, with position
    value_dim: int  # of a head
    rope_interleaved: bool  # rotary pairs are neighbours, not half a head apart
    scale: float  # of scores
    index: IndexConfig | None = None

    @classmethod
    def from_hf(cls, fields: ConfigFields, model_type: str) -> MlaConfig:
        """The attention of a parsed `config.json`.

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
        if config.get("mlp_bias"):
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
            rope_interleaved=model_type != "deepseek_v3"
            or bool(config.get("rope_interleave", True)),
            scale=(nope + rope) ** -0.5 * _yarn_score_factor(fields),
            index=index,
        )

    def tensor_shapes(self, hidden_size: int, num_heads: int, *, bias: bool) -> Shapes:
        """Tensors of one layer's attention, by name within the layer."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A mixture of experts: the layers that have one, and how a token finds its experts.

    `softmax` is DeepSeek-V2's router: a group of experts is as good as its best. `sigmoid` is
    V3's: a learned bias joins the choice but not the weights, and a group is as good as its best
    two.
    """

    num_experts: int
    top_k: int
    expert_intermediate_size: int
    shared_intermediate_size: int  # of the experts that every token visits, all of them as one
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int  # 1: no groups
    topk_groups: int
    normalise: bool  # the weights of a token's experts sum to 1 before they are scaled
    scale: float
    dense_layers: frozenset[int]

    @classmethod
    def from_hf(cls, fields: ConfigFields, model_type: str, num_layers: int) -> MoeConfig | None:
        """The experts of a parsed `config.json`; None if no layer has any.

        Raises:
            CheckpointError, UnsupportedModelError: see `ModelConfig.from_hf`.
        """
        dense = _dense_layers(fields, model_type, num_layers)
        if len(dense) == num_layers:
            return None
        config, source, v2 = fields.config, fields.source, model_type == "deepseek_v2"
        methods = ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",)
        scoring: Literal["softmax", "sigmoid"] = "softmax" if v2 else "sigmoid"
        method = config.get("topk_method") or methods[0]
        normalise = bool(config.get("norm_topk_prob", not v2))
        for name, value, known in (
            ("topk_method", method, methods),
            ("scoring_func", config.get("scoring_func") or scoring, (scoring,)),
            ("moe_layer_freq", config.get("moe_layer_freq", 1), (1,)),
            ("norm_topk_prob", normalise, (False,) if v2 else (True, False)),
        ):
            if value not in known:
                raise UnsupportedModelError(
                    f"{source}: {name} is {value!r}; supported for {model_type}: "
                    f"{', '.join(map(repr, known))}"
                )
        num_experts = fields.count("n_routed_experts", 64 if v2 else 256)
        grouped = method != "greedy"
        groups = fields.count("n_group", None if v2 else 8) if grouped else 1
        top_groups = fields.count("topk_group", None if v2 else 4) if grouped else 1
        inner = fields.count("moe_intermediate_size", 1407 if v2 else 2048)
        found = cls(
            num_experts=num_experts,
            top_k=fields.count("num_experts_per_tok", None if v2 else 8),
            expert_intermediate_size=inner,
            shared_intermediate_size=inner * fields.count("n_shared_experts", 2 if v2 else 1),
            scoring=scoring,
            num_groups=groups,
            topk_groups=top_groups,
            normalise=normalise,
            scale=fields.number("routed_scaling_factor", 1.0 if v2 else 2.5),
            dense_layers=dense,
        )
        eligible = num_experts // groups * top_groups
        if num_experts % groups or top_groups > groups or found.top_k > eligible:
            raise CheckpointError(
                f"{source}: {found.top_k} experts per token cannot come from {top_groups} of "
                f"{groups} groups of {num_experts} experts"
            )
        if scoring == "sigmoid" and num_experts // groups < 2:
            raise CheckpointError(
                f"{source}: n_group {groups} leaves {num_experts // groups} of {num_experts} "
                "experts to a group; its score is the sum of the best two"
            )
        return found

    def tensor_shapes(self, hidden_size: int) -> Shapes:
        """Tensors of one layer's experts, by name within the layer."""
        shapes: Shapes = {"mlp.gate.weight": (self.num_experts, hidden_size)}
        if self.scoring == "sigmoid":
            shapes["mlp.gate.e_score_correction_bias"] = (self.num_experts,)
        names = [f"mlp.experts.{number}" for number in range(self.num_experts)]
        for name in (*names, "mlp.shared_experts"):
            inner = (
                self.shared_intermediate_size
                if name == "mlp.shared_experts"
                else self.expert_intermediate_size
            )
            shapes[f"{name}.gate_proj.weight"] = (inner, hidden_size)
            shapes[f"{name}.up_proj.weight"] = (inner, hidden_size)
            shapes[f"{name}.down_proj.weight"] = (hidden_size, inner)
        return shapes


def _dense_layers(fields: ConfigFields, model_type: str, num_layers: int) -> frozenset[int]:
    config, source = fields.config, fields.source
    kinds = config.get("mlp_layer_types") if model_type == "deepseek_v32" else None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_MLP_KINDS):
            raise UnsupportedModelError(
                f"{source}: mlp_layer_types must name {num_layers} layers, each "
                f"{' or '.join(_MLP_KINDS)}; it is {kinds!r}"
            )
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if "n_routed_experts" in config and config["n_routed_experts"] is None:
        return frozenset(range(num_layers))
    first = config.get("first_k_dense_replace", 0 if model_type == "deepseek_v2" else 3)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise CheckpointError(f"{source}: first_k_dense_replace is {first!r}; it must be >= 0")
    return frozenset(range(min(first, num_layers)))


_MLP_KINDS = ("dense", "sparse")


def rope_settings(fields: ConfigFields) -> dict[str, Any]:
    """Rotary settings of either generation of configuration files.

    Raises:
        CheckpointError: they are no objects, or contradict each other.
    """
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value: Any = fields.config.get(name) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(
                f"{fields.source}: {name} is {value!r}; it must be an object or null"
            )
        if "type" in value:  # what older files call it
            value = {"rope_type": value["type"], **value}
            del value["type"]
        if settings and value and value | settings != value:
            raise CheckpointError(
                f"{fields.source}: rope_scaling is {settings!r} and rope_parameters {value!r}; "
                "which of them holds? leave one"
            )
        settings |= value
    return settings


def yarn_attention_factor(rope: ConfigFields) -> float:
    """What cosines and sines are multiplied with (YaRN, 2023, as DeepSeek refines it)."""
    if rope.config.get("attention_factor") is not None:
        return rope.number("attention_factor")
    factor = rope.number("factor")
    mscale, all_dim = rope.config.get("mscale"), rope.config.get("mscale_all_dim")
    if mscale and all_dim:
        return _mscale(factor, rope.number("mscale")) / _mscale(
            factor, rope.number("mscale_all_dim")
        )
    return _mscale(factor, 1.0)


def _yarn_score_factor(fields: ConfigFields) -> float:
    """What DeepSeek's scores are multiplied with beside the usual scale."""
    settings = rope_settings(fields)
    kind = settings.get("rope_type") or "default"
    if kind == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    rope = ConfigFields(settings, f"{fields.source} (rope)")
    return _mscale(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
