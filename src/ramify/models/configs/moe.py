"""Mixtures of experts in `config.json`: which layers have one, the router, names of tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.fields import MAX_PARTS, ConfigFields, shown

Shapes = dict[str, tuple[int, ...]]
# As a checkpoint has them: tensors of their own, stacked [num_experts, in, out] with gate and up
# interleaved, or so in MXFP4.
ExpertFormat = Literal["separate", "stacked", "mxfp4"]
# Constants of gpt-oss's activation; `kernels.cpu.abi`, which imports nothing, has them too.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
MXFP4_GROUP = 32  # weights that share a scale, in 16 bytes


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
    router: str = "gate"
    expert_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # see `Ops.experts`
    expert_format: ExpertFormat = "separate"
    activation: Literal["silu_mul", "clamped_swiglu_mul"] = "silu_mul"
    has_bias: bool = False  # of router and experts
    shared: str = "shared_experts"
    has_shared_gate: bool = False  # a sigmoid of its own scales the shared expert

    def tensor_shapes(self, hidden_size: int) -> Shapes:
        """Shapes of the expert tensors of a layer, by name within the layer."""
        shapes = self._router_shapes(hidden_size)
        for number in range(self.num_experts):
            name = f"{self.prefix}experts.{number}."
            shapes |= self._mlp_shapes(name, hidden_size, self.expert_intermediate_size)
        if self.shared_intermediate_size:
            name = f"{self.prefix}{self.shared}."
            shapes |= self._mlp_shapes(name, hidden_size, self.shared_intermediate_size)
        if self.has_shared_gate:
            shapes[f"{self.prefix}shared_expert_gate.weight"] = (1, hidden_size)
        return shapes

    def stored_shapes(self, hidden_size: int) -> Shapes:
        """Shapes in a checkpoint's files that differ from `tensor_shapes` by `expert_format`."""
        if self.expert_format == "separate":
            return self.tensor_shapes(hidden_size)
        shapes, prefix = self._router_shapes(hidden_size), f"{self.prefix}experts."
        inner = self.expert_intermediate_size
        widths = {"gate_up_proj": (hidden_size, 2 * inner), "down_proj": (inner, hidden_size)}
        for name, (width, rows) in widths.items():
            if self.expert_format == "mxfp4":
                groups = self.num_experts, rows, width // MXFP4_GROUP
                shapes[f"{prefix}{name}_blocks"] = (*groups, MXFP4_GROUP // 2)
                shapes[f"{prefix}{name}_scales"] = groups
            else:
                shapes[f"{prefix}{name}"] = (self.num_experts, width, rows)
            shapes[f"{prefix}{name}_bias"] = (self.num_experts, rows)
        return shapes

    def _router_shapes(self, hidden_size: int) -> Shapes:
        name = self.prefix + self.router
        shapes: Shapes = {f"{name}.weight": (self.num_experts, hidden_size)}
        if self.has_bias:
            shapes[f"{name}.bias"] = (self.num_experts,)
        if self.scoring == "sigmoid":
            shapes[f"{name}.e_score_correction_bias"] = (self.num_experts,)
        return shapes

    def _mlp_shapes(self, prefix: str, hidden_size: int, inner_size: int) -> Shapes:
        *gate_up, down = self.expert_names
        rows = {name: 2 * inner_size // len(gate_up) for name in gate_up} | {down: hidden_size}
        shapes: Shapes = {}
        for name, out_width in rows.items():
            width = inner_size if name == down else hidden_size
            shapes[f"{prefix}{name}.weight"] = (out_width, width)
            if self.has_bias:
                shapes[f"{prefix}{name}.bias"] = (out_width,)
        return shapes


def mixtral_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """Mixtral: softmax over all experts, weights of the chosen ones normalised."""
    return _softmax_experts(
        fields,
        num_experts=fields.count("num_local_experts", 8, limit=MAX_PARTS),
        expert_intermediate_size=fields.count("intermediate_size"),
        normalise=True,
        prefix="block_sparse_moe.",
        expert_names=("w1", "w3", "w2"),
    )


def olmoe_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """OLMoE: softmax over all experts."""
    if fields.config.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            f"{fields.source}: clip_qkv is {shown(fields.config['clip_qkv'])}, which is not supported"
        )
    return _softmax_experts(
        fields,
        num_experts=fields.count("num_experts", 64, limit=MAX_PARTS),
        top_k_default=8,
        expert_intermediate_size=fields.count("intermediate_size"),
        normalise=fields.flag("norm_topk_prob", False),
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


def num_first_dense_layers(fields: ConfigFields, default: int) -> int:
    """`first_k_dense_replace`: how many layers come before those with experts."""
    first = fields.config.get("first_k_dense_replace", default)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise CheckpointError(
            f"{fields.source}: first_k_dense_replace is {shown(first)}; it must be an integer >= 0"
        )
    return first


def check_expert_groups(
    source: str, num_experts: int, groups: int, topk_groups: int, top_k: int
) -> None:
    """Raise CheckpointError if the best groups cannot have `top_k` experts."""
    if num_experts % groups or topk_groups > groups or top_k > num_experts // groups * topk_groups:
        raise CheckpointError(
            f"{source}: num_experts_per_tok {top_k} experts cannot come from topk_group "
            f"{topk_groups} of n_group {groups} groups of n_routed_experts {num_experts} experts"
        )


def glm4_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """GLM-4-MoE: sigmoid scores with a bias for the choice, as in DeepSeek-V3."""
    first = num_first_dense_layers(fields, 1)
    if first >= num_layers:
        return None
    num_experts = fields.count("n_routed_experts", 128, limit=MAX_PARTS)
    groups = fields.count("n_group", 1)
    topk_groups, top_k = fields.count("topk_group", 1), fields.count("num_experts_per_tok", 8)
    check_expert_groups(fields.source, num_experts, groups, topk_groups, top_k)
    width = fields.count("moe_intermediate_size", 1408)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_intermediate_size=width,
        shared_intermediate_size=width * fields.count("n_shared_experts", 1),
        scoring="sigmoid",
        num_groups=groups,
        topk_groups=topk_groups,
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        dense_layers=frozenset(range(first)),
    )


def gpt_oss_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """gpt-oss: softmax over the chosen experts, which have biases and a clamped activation."""
    for name, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(name, value) != value:
            raise UnsupportedModelError(
                f"{fields.source}: {name} is {shown(fields.config[name])}; experts have only {value}"
            )
    width, hidden_size = fields.count("intermediate_size"), fields.count("hidden_size")
    is_quantized = bool(fields.config.get("quantization_config"))
    if is_quantized and (width % MXFP4_GROUP or hidden_size % MXFP4_GROUP):
        raise CheckpointError(
            f"{fields.source}: intermediate_size {width} and hidden_size {hidden_size} must be "
            f"multiples of {MXFP4_GROUP}, the weights of an MXFP4 block"
        )
    return _softmax_experts(
        fields,
        num_experts=fields.count("num_local_experts", 128, limit=MAX_PARTS),
        top_k_default=4,
        expert_intermediate_size=width,
        # The softmax over all, divided by the sum of the chosen, is the softmax over the chosen.
        normalise=True,
        router="router",
        expert_names=("gate_up_proj", "down_proj"),
        expert_format="mxfp4" if is_quantized else "stacked",
        activation="clamped_swiglu_mul",
        has_bias=True,
    )


def _qwen_experts(
    fields: ConfigFields,
    num_layers: int,
    *,
    defaults: tuple[int, int, int],
    shared_default: int,
    has_shared: bool,
) -> MoeConfig | None:
    only_mlp = fields.items("mlp_only_layers") or []
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in only_mlp):
        raise CheckpointError(
            f"{fields.source}: mlp_only_layers is {shown(only_mlp)}; it must list numbers of layers"
        )
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
            "num_experts",
            fields.count("num_local_experts", num_experts, limit=MAX_PARTS),
            limit=MAX_PARTS,
        ),
        top_k_default=top_k,
        expert_intermediate_size=fields.count("moe_intermediate_size", width),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size", shared_default)
        if has_shared
        else 0,
        normalise=fields.flag("norm_topk_prob", False),
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
    **others: Any,
) -> MoeConfig:
    """Experts without groups, of scores by softmax; `others` are fields of `MoeConfig`."""
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
        shared="shared_expert",
        **others,
    )
