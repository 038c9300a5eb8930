"""MLPs of dense layers and of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.models.ops.protocol import Activation, ForwardStep, Norm, Ops


class Mlp:
    """down(activation(gate(x)) * up(x)), with a norm of x inside if bound with one.

    Args:
        prefix: of the names.
        activation: one that is not gated: down(activation(up(x))).
        gate_up: names of gate and up, or of a matrix that has gate above up, or of up alone.
    """

    def __init__(
        self,
        ops: Ops,
        prefix: str,
        *,
        norm: Norm | None = None,
        activation: Activation = "silu_mul",
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> None:
        names = (prefix + name for name in gate_up)
        self.gate_up = ops.linear(*names, norm=norm, activation=activation, shard="columns")
        self.down = ops.linear(prefix + down, shard="rows")

    def __call__(
        self, x: Tensor, step: ForwardStep | None, *, residual: Tensor | None = None
    ) -> Tensor:
        """[T, hidden_size] -> the same; see `Linear` for the residual."""
        return self.down(self.gate_up(x, step), step, residual=residual)


@dataclass(frozen=True, slots=True)
class LoopedExperts:
    """`Experts` one after the other, each over the rows that are routed to it."""

    routed: tuple[Mlp, ...]
    shared: Mlp | None

    def __call__(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        total = torch.zeros_like(x)
        is_routed = weights != 0
        for number in is_routed.any(0).nonzero()[:, 0].tolist():
            rows = is_routed[:, number].nonzero()[:, 0]
            weighted = self.routed[number](x[rows], None) * weights[rows, number, None]
            total[rows] += weighted.to(x.dtype)
        return total if self.shared is None else total + self.shared(x, None)
