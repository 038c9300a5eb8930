"""Routers of mixtures of experts in torch; a token's weights do not depend on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.models.configs.moe import MoeConfig


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
