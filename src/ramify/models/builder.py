"""Weights to operations, each in a way whose rows are independent where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.attention.exact import Exactness, ProbeStore
from ramify.models.layers import RMSNorm, silu_mul
from ramify.models.linear import Linear, choose_linear
from ramify.models.rows import choose_rows, sample_rows

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)); the matrices of gate and up are one."""

    gate_up: Linear
    silu_mul: Callable[..., Tensor]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden_size] -> the same."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.silu_mul(gate, up))


class LayerBuilder:
    """The operations of one decoder, and how each was chosen.

    Args:
        weights: by Hugging Face name, in `dtype`.
        exact, store, linear_strategy: see `DenseDecoder`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        exact: bool,
        store: ProbeStore | None,
        linear_strategy: str | None,
    ) -> None:
        self.dtype, self.exact = dtype, exact
        self._weights, self._strategy = weights, linear_strategy
        self._store = ProbeStore.default() if store is None else store
        self._verdicts: dict[tuple[str, tuple[int, ...]], Exactness] = {}

    def verdicts(self) -> list[Exactness]:
        """How each distinct operation, shape and dtype is computed, and why."""
        return list(self._verdicts.values())

    def weight(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._weights[name]

    def forget_weights(self) -> None:
        """Nothing more will be built: packed copies replace most of the weights."""
        self._weights = {}

    def mlp(self, prefix: str) -> GatedMlp:
        """The gated MLP whose names begin with `prefix`."""
        gate_up = self.joined(f"{prefix}gate_proj", f"{prefix}up_proj")
        inner = self._weights[f"{prefix}gate_proj.weight"].shape[0]
        return GatedMlp(gate_up, self._silu_mul(inner), self.linear(f"{prefix}down_proj"))

    def joined(self, *names: str) -> Linear:
        """One matrix for projections of the same input."""
        weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        biases = [self._weights.get(f"{name}.bias") for name in names]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        return self.matrix(weight, bias)

    def linear(self, name: str) -> Linear:
        """The projection of that name."""
        return self.matrix(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """x @ weight.T + bias."""
        if self._strategy is not None:
            shape, dtype = (weight.shape[0], weight.shape[1]), str(weight.dtype)
            name = dtype.removeprefix("torch.")
            self._record(Exactness("linear", shape, name, self._strategy, "forced"))
            return Linear(weight, bias, strategy=self._strategy)
        linear, verdict = choose_linear(weight, bias, exact=self.exact, store=self._store)
        self._record(verdict)
        return linear

    def rms_norm(self, name: str, eps: float) -> Norm:
        """RMS norm over contiguous rows, with the weight of that name."""
        norm = RMSNorm(self._weights[name], eps)
        width, dtype = len(self._weights[name]), self.dtype
        return self.rows("rms_norm", norm, (width,), lambda: (sample_rows(width, dtype=dtype),))

    def _silu_mul(self, inner: int) -> Callable[..., Tensor]:
        def samples() -> tuple[Tensor, ...]:
            gate, up = sample_rows(2 * inner, dtype=self.dtype).chunk(2, -1)
            return gate, up

        return self.rows("silu_mul", silu_mul, (inner,), samples)

    def rows(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
    ) -> Callable[..., Tensor]:
        """See `choose_rows`."""
        chosen, verdict = choose_rows(
            operation, op, shape, self.dtype, samples, exact=self.exact, store=self._store
        )
        self._record(verdict)
        return chosen

    def _record(self, verdict: Exactness) -> None:
        self._verdicts[(verdict.operation, verdict.shape)] = verdict
