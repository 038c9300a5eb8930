"""Mixtures of experts in `config.json`: which layers have one, the router, names of tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ramify.errors import CheckpointError
from ramify.models.configs.fields import ConfigFields, shown

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


def softmax_experts(
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
