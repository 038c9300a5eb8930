"""Mixture of experts: the router, whose weights for a token do not depend on the batch, and the MLP."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ramify.models.moe_config import MoeConfig
from ramify.models.ops.mlp import GatedMlp
from ramify.models.ops.probe import sample_rows
from ramify.models.ops.protocol import ForwardStep, Ops


class MoeMlp:
    """A float32 router, routed experts and a shared expert in place of an MLP.

    Args:
        prefix: of the layer.
    """

    def __init__(self, ops: Ops, config: MoeConfig, prefix: str) -> None:
        prefix += config.prefix
        bias = None
        if config.scoring == "sigmoid":
            bias = ops.weight(f"{prefix}gate.e_score_correction_bias")
        self.gate = ops.linear(prefix + config.router, dtype=torch.float32)
        self.route = ops.row_op(
            f"{config.scoring} router",
            partial(route, bias=bias, config=config),
            (config.num_experts, config.num_groups, config.topk_groups, config.top_k),
            lambda: (sample_rows(config.num_experts, dtype=torch.float32),),
            dtype=torch.float32,
        )
        shared = f"{prefix}{config.shared}." if config.shared_intermediate_size else None
        names = config.expert_names
        self.shared_gate = self.shared = None
        if config.has_shared_gate and shared is not None:
            self.shared_gate = ops.linear(f"{prefix}shared_expert_gate", dtype=torch.float32)
            self.shared, shared = GatedMlp(ops, shared), None
        self.experts = ops.experts(
            f"{prefix}experts.",
            num_experts=config.num_experts,
            shared=shared,
            names=names,
            activation=config.activation,
        )

    def __call__(
        self, x: Tensor, step: ForwardStep | None, *, residual: Tensor | None = None
    ) -> Tensor:
        """[T, hidden_size] -> the same; see `Linear` for the residual."""
        wide = x.float()
        out = self.experts(x, self.route(self.gate(wide, step)))
        if self.shared is not None and self.shared_gate is not None:
            gate = 1 / (1 + torch.exp(-self.shared_gate(wide, step)))
            out += (gate * self.shared(x, step)).to(x.dtype)
        return out if residual is None else residual.add_(out)


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
