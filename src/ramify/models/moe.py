"""A mixture of experts in which a token's result does not depend on the tokens beside it."""

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
    """How much each expert contributes to each token.

    Args:
        logits: [T, num_experts] float32.
        bias: [num_experts] float32, joins the choice of `sigmoid` routers but not the weights.

    Returns:
        [T, num_experts] float32, zero but for the `top_k` experts of a token.

    Among equals the lowest expert, or group, wins.
    """
    if config.scoring == "softmax":
        scores = logits.softmax(-1)
    else:
        # not torch's sigmoid: its scalar tail rounds differently from its vector code
        scores = 1 / (1 + torch.exp(-logits))
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        groups = choice.unflatten(-1, (config.num_groups, -1))
        best = groups.amax(-1)
        if config.scoring == "sigmoid":
            best = groups.topk(2, -1).values.sum(-1)
        closed = best.new_ones(best.shape, dtype=torch.bool)
        closed.scatter_(-1, _largest(best, config.topk_groups), False)
        choice = groups.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    # ascending, so that the sum does not depend on the order of the scores
    experts = _largest(choice, config.top_k).sort(-1).values
    weights = scores.gather(-1, experts)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(scores).scatter_(-1, experts, weights * config.scale)


def _largest(values: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of each row [..., n]; the lowest of equals first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of one layer: `Experts.build` makes it, calling it computes it."""

    gate: Linear
    route: Callable[[Tensor], Tensor]
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp

    @classmethod
    def build(cls, config: MoeConfig, build: LayerBuilder, prefix: str) -> Experts:
        """The mixture whose names begin with `prefix`."""
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
        """[T, hidden_size] -> the same.

        A token's contributions are added in ascending order of its experts, then the shared one.
        """
        weights = self.route(self.gate(x.float()))
        mixed = torch.zeros_like(x)
        visited = weights != 0
        for number in visited.any(0).nonzero()[:, 0].tolist():
            rows = visited[:, number].nonzero()[:, 0]
            found = self.experts[number](x[rows]) * weights[rows, number, None]
            mixed[rows] += found.to(x.dtype)
        return mixed + self.shared(x)
