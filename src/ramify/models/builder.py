"""Weights to operations, each in a way whose rows are independent where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ramify.attention.exactness import PROBE_ROW_COUNTS, Exactness, ProbeStore
from ramify.models.ops.cpu_linear import PackedLinear, packed_gemm_supports
from ramify.models.ops.functional import rms_norm, silu_and_mul
from ramify.models.ops.probe import probe_row_op, sample_rows
from ramify.models.ops.protocol import RowFunction
from ramify.models.ops.torch_linear import (
    Linear,
    choose_torch_linear,
    probe_counts,
    strategy_order,
)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)), with a norm of x before it where it was built with one."""

    gate_up: RowFunction  # [rows, hidden_size] -> [rows, intermediate_size]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden_size] -> the same."""
        return self.down(self.gate_up(x))

    def add_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """Add the result to sums, in place; returns them."""
        return self.down.add_to(sums, self.gate_up(x))


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

    def mlp(self, prefix: str, norm: tuple[str, float] | None = None) -> GatedMlp:
        """The gated MLP whose names begin with `prefix`; `norm` as in `product`."""
        inner = self.product(f"{prefix}gate_proj", f"{prefix}up_proj", norm=norm, gated=True)
        return GatedMlp(inner, self.linear(f"{prefix}down_proj"))

    def product(
        self, *names: str, norm: tuple[str, float] | None = None, gated: bool = False
    ) -> RowFunction:
        """Projections of the same input as one matrix.

        Args:
            norm: name and eps of an RMS norm of the input that goes before.
            gated: there are two, gate and up, and the result is silu(gate) * up.

        One kernel does all of it where it can.
        """
        weight, bias = self._weights[f"{names[0]}.weight"], self._weights.get(f"{names[0]}.bias")
        if len(names) > 1:
            weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        if len(names) > 1 and bias is not None:
            bias = torch.cat([self._weights[f"{name}.bias"] for name in names])
        if self.fuses(weight) and (norm is not None or gated):
            return self._fused(weight, bias, norm, gated)
        linear: RowFunction = self.matrix(weight, bias)
        inner = len(weight) // 2
        first = None if norm is None else self.rms_norm(*norm)
        last = self._silu_and_mul(inner) if gated else None

        def run(x: Tensor) -> Tensor:
            y = linear(x if first is None else first(x))
            return y if last is None else last(*y.chunk(2, -1))

        return run

    def fuses(self, weight: Tensor) -> bool:
        """Whether our own kernels are to be used with such a weight."""
        strategy = self._strategy or strategy_order(weight)[0]
        return strategy == "packed_gemm" and packed_gemm_supports(weight) is None

    def _fused(
        self, weight: Tensor, bias: Tensor | None, norm: tuple[str, float] | None, gated: bool
    ) -> RowFunction:
        named = None if norm is None else (self._weights[norm[0]], norm[1])
        parts = ("rms_norm" if norm else "", "linear", "bias" if bias is not None else "")
        operation = " + ".join(part for part in (*parts, "silu_mul" if gated else "") if part)
        return self.rows(
            operation,
            PackedLinear(weight, bias, norm=named, gated=gated),
            (weight.shape[0], weight.shape[1]),
            lambda: (sample_rows(weight.shape[1], dtype=self.dtype),),
            counts=probe_counts(weight),
        )

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
        linear, verdict = choose_torch_linear(weight, bias, exact=self.exact, store=self._store)
        self._record(verdict)
        return linear

    def rms_norm(self, name: str, eps: float) -> RowFunction:
        """RMS norm over contiguous rows, with the weight of that name."""
        norm = partial(rms_norm, weight=self._weights[name], eps=eps)
        width, dtype = len(self._weights[name]), self.dtype
        return self.rows("rms_norm", norm, (width,), lambda: (sample_rows(width, dtype=dtype),))

    def _silu_and_mul(self, inner: int) -> Callable[..., Tensor]:
        def samples() -> tuple[Tensor, ...]:
            gate, up = sample_rows(2 * inner, dtype=self.dtype).chunk(2, -1)
            return gate, up

        return self.rows("silu_mul", silu_and_mul, (inner,), samples)

    def rows(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
        *,
        counts: Sequence[int] = PROBE_ROW_COUNTS,
    ) -> Callable[..., Tensor]:
        """See `probe_row_op`."""
        chosen, verdict = probe_row_op(
            operation,
            op,
            shape,
            self.dtype,
            samples,
            exact=self.exact,
            store=self._store,
            counts=counts,
        )
        self._record(verdict)
        return chosen

    def _record(self, verdict: Exactness) -> None:
        self._verdicts[(verdict.operation, verdict.shape)] = verdict
