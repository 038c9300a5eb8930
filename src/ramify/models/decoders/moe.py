"""Mixture of experts in place of an MLP: router, routed experts, shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.models.configs.moe import MoeConfig
from ramify.models.ops.mlp import Mlp
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
        self.route = ops.router(config, bias)
        shared = f"{prefix}{config.shared}." if config.shared_intermediate_size else None
        names = config.expert_names
        self.shared_weight = self.shared = None
        if config.has_shared_gate and shared is not None:
            self.shared_weight = ops.linear(
                f"{prefix}shared_expert_gate", activation="sigmoid", dtype=torch.float32
            )
            self.shared, shared = Mlp(ops, shared), None
        self.experts = ops.experts(
            f"{prefix}experts.",
            num_experts=config.num_experts,
            top_k=config.top_k,
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
        if self.shared is not None and self.shared_weight is not None:
            out += (self.shared_weight(wide, step) * self.shared(x, step)).to(x.dtype)
        return out if residual is None else residual.add_(out)
