"""Mixtures of experts in `config.json`: which layers have one, the router, names of tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.config_fields import ConfigFields

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: which layers have one, and the router.

    Scores are a softmax or sigmoids of the router's logits. `sigmoid` adds a learned bias for the
    choice only. With groups, experts come from the best groups: the score of a group is that of its
    best expert (softmax), or the sum of its best two (sigmoid).
    """

    num_experts: int
    top_k: int
    expert_intermediate_size: int
    shared_intermediate_size: int  # of all shared experts together, computed as one MLP; 0: none
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int  # 1: no groups
    topk_groups: int  # groups a token may choose experts from
    normalise: bool  # divide a token's expert weights by their sum before scaling
    scale: float  # of expert weights
    dense_layers: frozenset[int]  # layers with a gated MLP instead
    prefix: str = "mlp."
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    has_shared_gate: bool = False  # a sigmoid of its own scales the shared expert

    def tensor_shapes(self, hidden_size: int) -> Shapes:
        """Shapes of the expert tensors of a layer, by name within the layer."""
        prefix, gate_up_down = self.prefix, self.expert_names
        shapes: Shapes = {f"{prefix}gate.weight": (self.num_experts, hidden_size)}
        if self.scoring == "sigmoid":
            shapes[f"{prefix}gate.e_score_correction_bias"] = (self.num_experts,)
        for number in range(self.num_experts):
            name = f"{prefix}experts.{number}."
            shapes |= _mlp_shapes(name, gate_up_down, hidden_size, self.expert_intermediate_size)
        if self.shared_intermediate_size:
            name = f"{prefix}{self.shared}."
            shapes |= _mlp_shapes(name, gate_up_down, hidden_size, self.shared_intermediate_size)
        if self.has_shared_gate:
            shapes[f"{prefix}shared_expert_gate.weight"] = (1, hidden_size)
        return shapes


def _mlp_shapes(
    prefix: str, names: tuple[str, str, str], hidden_size: int, inner_size: int
) -> Shapes:
    gate, up, down = names
    return {
        f"{prefix}{gate}.weight": (inner_size, hidden_size),
        f"{prefix}{up}.weight": (inner_size, hidden_size),
        f"{prefix}{down}.weight": (hidden_size, inner_size),
    }


def mixtral_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """Mixtral: softmax over all experts, weights of the chosen ones normalised."""
    return _softmax_experts(
        fields,
        num_experts=fields.count("num_local_experts", 8),
        expert_intermediate_size=fields.count("intermediate_size"),
        normalise=True,
        prefix="block_sparse_moe.",
        expert_names=("w1", "w3", "w2"),
    )


def olmoe_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """OLMoE: softmax over all experts."""
    if fields.config.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            f"{fields.source}: clip_qkv is {fields.config['clip_qkv']!r}, which is not supported"
        )
    return _softmax_experts(
        fields,
        num_experts=fields.count("num_experts", 64),
        top_k_default=8,
        expert_intermediate_size=fields.count("intermediate_size"),
        normalise=bool(fields.config.get("norm_topk_prob", False)),
    )


def qwen2_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Qwen2-MoE: softmax, and a shared expert with a gate of its own."""
    return _qwen_experts(
        fields, num_layers, defaults=(60, 4, 1408), shared_default=5632, has_shared=True
    )


def qwen3_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Qwen3-MoE: softmax, no shared expert."""
    return _qwen_experts(
        fields, num_layers, defaults=(128, 8, 768), shared_default=0, has_shared=False
    )


def glm4_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """GLM-4-MoE: sigmoid scores with a bias for the choice, as in DeepSeek-V3."""
    first = fields.config.get("first_k_dense_replace", 1)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise CheckpointError(
            f"{fields.source}: first_k_dense_replace is {first!r}; it must be >= 0"
        )
    if first >= num_layers:
        return None
    num_experts, groups = fields.count("n_routed_experts", 128), fields.count("n_group", 1)
    topk_groups, top_k = fields.count("topk_group", 1), fields.count("num_experts_per_tok", 8)
    if num_experts % groups or topk_groups > groups or top_k > num_experts // groups * topk_groups:
        raise CheckpointError(
            f"{fields.source}: {top_k} experts per token cannot come from {topk_groups} of "
            f"{groups} groups of {num_experts} experts"
        )
    width = fields.count("moe_intermediate_size", 1408)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_intermediate_size=width,
        shared_intermediate_size=width * fields.count("n_shared_experts", 1),
        scoring="sigmoid",
        num_groups=groups,
        topk_groups=topk_groups,
        normalise=bool(fields.config.get("norm_topk_prob", True)),
        scale=fields.number("routed_scaling_factor", 1.0),
        dense_layers=frozenset(range(first)),
    )


def _qwen_experts(
    fields: ConfigFields,
    num_layers: int,
    *,
    defaults: tuple[int, int, int],
    shared_default: int,
    has_shared: bool,
) -> MoeConfig | None:
    config, source = fields.config, fields.source
    only_mlp = config.get("mlp_only_layers") or []
    if not isinstance(only_mlp, list) or not all(isinstance(layer, int) for layer in only_mlp):
        raise CheckpointError(f"{source}: mlp_only_layers is {only_mlp!r}; it must list layers")
    step = fields.count("decoder_sparse_step", 1)
    dense = frozenset(
        layer for layer in range(num_layers) if layer in only_mlp or (layer + 1) % step
    )
    if len(dense) == num_layers:
        return None
    num_experts, top_k, width = defaults
    return _softmax_experts(
        fields,
        # transformers 5 writes it under either name.
        num_experts=fields.count(
            "num_experts", fields.config.get("num_local_experts", num_experts)
        ),
        top_k_default=top_k,
        expert_intermediate_size=fields.count("moe_intermediate_size", width),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size", shared_default)
        if has_shared
        else 0,
        normalise=bool(config.get("norm_topk_prob", False)),
        dense_layers=dense,
        has_shared_gate=has_shared,
    )


def _softmax_experts(
    fields: ConfigFields,
    *,
    num_experts: int,
    expert_intermediate_size: int,
    normalise: bool,
    top_k_default: int = 2,
    shared_intermediate_size: int = 0,
    dense_layers: frozenset[int] = frozenset(),
    prefix: str = "mlp.",
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    has_shared_gate: bool = False,
) -> MoeConfig:
    top_k = fields.count("num_experts_per_tok", top_k_default)
    if top_k > num_experts:
        raise CheckpointError(
            f"{fields.source}: num_experts_per_tok {top_k} is above the {num_experts} experts"
        )
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_intermediate_size=expert_intermediate_size,
        shared_intermediate_size=shared_intermediate_size,
        scoring="softmax",
        num_groups=1,
        topk_groups=1,
        normalise=normalise,
        scale=1.0,
        dense_layers=dense_layers,
        prefix=prefix,
        expert_names=expert_names,
        shared="shared_expert",
        has_shared_gate=has_shared_gate,
    )
