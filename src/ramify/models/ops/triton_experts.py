"""Mixtures of experts by Triton's grouped GEMMs: all routed experts of a layer, which the host does not look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ramify.models.configs.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from ramify.models.ops.quantized import QuantizedWeight, Weight

if TYPE_CHECKING:
    from ramify.kernels.triton.grouped_gemm import GroupedGemm
    from ramify.models.ops.mlp import Mlp

# Weight and bias of an expert by its number.
ReadMatrix = Callable[[int], tuple[Weight, Tensor | None]]


class UngroupableError(Exception):
    """Matrices that no grouped GEMM multiplies by; the message is the reason."""


def stack_matrices(read: ReadMatrix, count: int) -> tuple[Tensor, Tensor | None]:
    """The matrices of all experts [count, N, K] and their biases [count, N], each read once.

    Raises:
        UngroupableError: they are quantised, or not alike.
    """
    stack = biases = None
    for number in range(count):
        weight, bias = read(number)
        if isinstance(weight, QuantizedWeight):
            raise UngroupableError(f"int{weight.format.bits} codes: the grouped GEMM takes floats")
        if stack is None:
            stack = weight.new_empty(count, *weight.shape)
            biases = None if bias is None else bias.new_empty(count, *bias.shape)
        if weight.shape != stack.shape[1:] or weight.dtype != stack.dtype:
            shape, first = tuple(weight.shape), tuple(stack.shape[1:])
            raise UngroupableError(
                f"expert {number} has {shape} {weight.dtype}, expert 0 {first} {stack.dtype}"
            )
        if (bias is None) != (biases is None):
            raise UngroupableError("some experts have a bias, others none")
        stack[number] = weight
        if biases is not None and bias is not None:
            biases[number] = bias
    if stack is None:
        raise UngroupableError("no experts")
    return stack, biases


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Sum over experts of weight * down(activation(gate_up(x))): the routed part of `Experts`.

    Args:
        activation: a gated one.
        top_k: most experts of a row.
    """

    gate_up: GroupedGemm
    down: GroupedGemm
    activation: str
    top_k: int

    @classmethod
    def of(
        cls, gate_up: ReadMatrix, down: ReadMatrix, num_experts: int, top_k: int, activation: str
    ) -> RoutedExperts:
        """Bind to the matrices of all experts.

        Raises:
            UngroupableError: see `stack_matrices`.
        """
        from ramify.kernels.triton.grouped_gemm import GroupedGemm

        first, second = (
            GroupedGemm(*stack_matrices(read, num_experts)) for read in (gate_up, down)
        )
        return cls(first, second, activation, top_k)

    def sample_weights(self, x: Tensor) -> Tensor:
        """Weights [rows, num_experts] to try rows of x with: expert 0 for every row, and others by chance."""
        num_experts = len(self.gate_up.weight)
        draw = torch.Generator().manual_seed(num_experts)
        scores = torch.rand(len(x), num_experts, generator=draw)
        scores[:, 0] += 1
        best = scores.topk(self.top_k).indices
        weights = torch.zeros_like(scores).scatter_(1, best, scores.gather(1, best))
        return weights.to(x.device)

    def __call__(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`; a row's bits depend on that row alone."""
        from ramify.kernels.triton.activation import gated_activation
        from ramify.kernels.triton.expert_pairs import sort_pairs, sum_pairs

        pairs = sort_pairs(weights, self.top_k, self.gate_up.tiles.rows)
        inner = gated_activation(
            self.gate_up(x, pairs, pairs_per_row=self.top_k),
            self.activation,
            alpha=SWIGLU_ALPHA,
            limit=SWIGLU_LIMIT,
            experts=pairs.experts,
        )
        return sum_pairs(self.down(inner, pairs, pairs_per_row=1), pairs)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """`Experts` whose routing stays on the device."""

    routed: Callable[[Tensor, Tensor], Tensor]
    shared: Mlp | None

    def __call__(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        total = self.routed(x, weights)
        return total if self.shared is None else total + self.shared(x, None)
