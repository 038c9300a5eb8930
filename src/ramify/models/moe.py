"""Mixture of experts: the router, and experts computed so that a token's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.models.builder import GatedMlp, LayerBuilder
from ramify.models.deepseek_config import MoeConfig
from ramify.models.ops.probe import sample_rows
from ramify.models.ops.torch_linear import Linear


def route(logits: Tensor, bias: Tensor | None, config: MoeConfig) -> Tensor:
    """Expert weights of each token: group-limited top-k of the router's scores.

    Args:
        logits: [T, num_experts] float32.
        bias: [num_experts] float32, `sigmoid` routers only: added for the choice, not to the weights.

    Returns:
        [T, num_experts] float32, zero except for the `top_k` experts of a token.

    Ties go to the lowest expert or group number.
    """
    if config.scoring == "softmax":
        scores = logits.softmax(-1)
    else:
        # Not torch's sigmoid: its scalar tail rounds differently from its vector code.
        scores = 1 / (1 + torch.exp(-logits))
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        groups = choice.unflatten(-1, (config.num_groups, -1))
        group_scores = groups.amax(-1)
        if config.scoring == "sigmoid":
            group_scores = groups.topk(2, -1).values.sum(-1)
        masked = group_scores.new_ones(group_scores.shape, dtype=torch.bool)
        masked.scatter_(-1, _topk_indices(group_scores, config.topk_groups), False)
        choice = groups.masked_fill(masked[..., None], -torch.inf).flatten(-2)
    # Ascending, so that the sum of weights does not depend on the order of the scores.
    experts = _topk_indices(choice, config.top_k).sort(-1).values
    weights = scores.gather(-1, experts)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(scores).scatter_(-1, experts, weights * config.scale)


def _topk_indices(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values of each row [..., n]; of equal values the lowest index first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of one layer: float32 router, routed experts, one shared expert."""

    gate: Linear
    route: Callable[[Tensor], Tensor]
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp

    @classmethod
    def build(cls, config: MoeConfig, build: LayerBuilder, prefix: str) -> Experts:
        """Build the router and experts of the layer's MLP at `prefix`."""
        bias = None
        if config.scoring == "sigmoid":
            bias = build.weight(f"{prefix}gate.e_score_correction_bias")
        shape = (config.num_experts, config.num_groups, config.topk_groups, config.top_k)
        routed = build.rows(
            f"{config.scoring} router",
            lambda logits: route(logits, bias, config),
            shape,
            lambda: (sample_rows(config.num_experts, dtype=torch.float32),),
        )
        return cls(
            gate=build.matrix(build.weight(f"{prefix}gate.weight").float()),
            route=routed,
            experts=tuple(
                build.mlp(f"{prefix}experts.{number}.") for number in range(config.num_experts)
            ),
            shared=build.mlp(f"{prefix}shared_experts."),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> weighted sum of a token's experts, like x.

        Each product is rounded to x's dtype, then added: experts in ascending order, the shared
        expert last.
        """
        weights = self.route(self.gate(x.float()))
        total = torch.zeros_like(x)
        is_routed = weights != 0
        for number in is_routed.any(0).nonzero()[:, 0].tolist():
            rows = is_routed[:, number].nonzero()[:, 0]
            weighted = self.experts[number](x[rows]) * weights[rows, number, None]
            total[rows] += weighted.to(x.dtype)
        return total + self.shared(x)
