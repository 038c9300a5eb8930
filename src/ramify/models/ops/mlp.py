"""The gated MLP, of dense layers and of experts."""

from __future__ import annotations

from torch import Tensor

from ramify.models.ops.protocol import Activation, ForwardStep, Norm, Ops


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with a norm of x inside if bound with one.

    Args:
        prefix: of the weights gate_proj, up_proj and down_proj.
    """

    def __init__(
        self,
        ops: Ops,
        prefix: str,
        *,
        norm: Norm | None = None,
        activation: Activation = "silu_mul",
    ) -> None:
        names = f"{prefix}gate_proj", f"{prefix}up_proj"
        self.gate_up = ops.linear(*names, norm=norm, activation=activation, shard="columns")
        self.down = ops.linear(f"{prefix}down_proj", shard="rows")

    def __call__(
        self, x: Tensor, step: ForwardStep | None, *, residual: Tensor | None = None
    ) -> Tensor:
        """[T, hidden_size] -> the same; see `Linear` for the residual."""
        return self.down(self.gate_up(x, step), step, residual=residual)
