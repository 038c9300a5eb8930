"""Build operations from weights: compiled where possible, batch-invariant where `exact` asks for it."""

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
    """down(silu(gate(x)) * up(x)); `gate_up` includes an RMS norm of x if built with one."""

    gate_up: RowFunction  # [rows, hidden_size] -> [rows, intermediate_size]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden_size] -> the same."""
        return self.down(self.gate_up(x))

    def add_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """sums += self(x), in place; returns sums [rows, hidden_size]."""
        return self.down.add_to(sums, self.gate_up(x))


class LayerBuilder:
    """Builds the operations of one decoder and records how each was chosen.

    Args:
        weights: tensors by Hugging Face name, in `dtype`.
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
        """The implementation of each distinct operation, shape and dtype, and why it was chosen."""
        return list(self._verdicts.values())

    def weight(self, name: str) -> Tensor:
        """The checkpoint tensor of that Hugging Face name."""
        return self._weights[name]

    def forget_weights(self) -> None:
        """Drop the weights once everything is built: packed copies replace most of them."""
        self._weights = {}

    def mlp(self, prefix: str, norm: tuple[str, float] | None = None) -> GatedMlp:
        """The gated MLP with weights `prefix` + gate_proj, up_proj, down_proj; `norm` as in `product`."""
        gate_up = self.product(f"{prefix}gate_proj", f"{prefix}up_proj", norm=norm, gated=True)
        return GatedMlp(gate_up, self.linear(f"{prefix}down_proj"))

    def product(
        self, *names: str, norm: tuple[str, float] | None = None, gated: bool = False
    ) -> RowFunction:
        """Linear layers with the same input, concatenated into one matrix.

        Args:
            names: weights without `.weight`; all of them have a `.bias`, or none.
            norm: weight name and eps of an RMS norm of the input.
            gated: `names` are gate and up, and the result is silu(gate) * up.

        Norm, GEMM and activation are one kernel if the weight can be packed, else torch operations.
        """
        weight, bias = self._weights[f"{names[0]}.weight"], self._weights.get(f"{names[0]}.bias")
        if len(names) > 1:
            weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        if len(names) > 1 and bias is not None:
            bias = torch.cat([self._weights[f"{name}.bias"] for name in names])
        if self.fuses(weight) and (norm is not None or gated):
            return self._fused(weight, bias, norm, gated)
        linear: RowFunction = self.matrix(weight, bias)
        input_norm = None if norm is None else self.rms_norm(*norm)
        activation = self._silu_and_mul(len(weight) // 2) if gated else None

        def run(x: Tensor) -> Tensor:
            y = linear(x if input_norm is None else input_norm(x))
            return y if activation is None else activation(*y.chunk(2, -1))

        return run

    def fuses(self, weight: Tensor) -> bool:
        """Whether a weight like this goes to the compiled packed GEMM, which fuses norm and activation."""
        strategy = self._strategy or strategy_order(weight)[0]
        return strategy == "packed_gemm" and packed_gemm_supports(weight) is None

    def _fused(
        self, weight: Tensor, bias: Tensor | None, norm: tuple[str, float] | None, gated: bool
    ) -> RowFunction:
        norm_weight = None if norm is None else (self._weights[norm[0]], norm[1])
        parts = ("rms_norm" if norm else "", "linear", "bias" if bias is not None else "")
        operation = " + ".join(part for part in (*parts, "silu_mul" if gated else "") if part)
        return self.rows(
            operation,
            PackedLinear(weight, bias, norm=norm_weight, gated=gated),
            (weight.shape[0], weight.shape[1]),
            lambda: (sample_rows(weight.shape[1], dtype=self.dtype),),
            counts=probe_counts(weight),
        )

    def linear(self, name: str) -> Linear:
        """x @ weight.T + bias with the weights of that name."""
        return self.matrix(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """x @ weight.T + bias by the strategy that the probe chooses, or the forced one."""
        if self._strategy is not None:
            shape, dtype = (weight.shape[0], weight.shape[1]), str(weight.dtype)
            name = dtype.removeprefix("torch.")
            self._record(Exactness("linear", shape, name, self._strategy, "forced"))
            return Linear(weight, bias, strategy=self._strategy)
        linear, verdict = choose_torch_linear(weight, bias, exact=self.exact, store=self._store)
        self._record(verdict)
        return linear

    def rms_norm(self, name: str, eps: float) -> RowFunction:
        """RMS norm over the last dimension, with the weight of that name."""
        norm = partial(rms_norm, weight=self._weights[name], eps=eps)
        width, dtype = len(self._weights[name]), self.dtype
        return self.rows("rms_norm", norm, (width,), lambda: (sample_rows(width, dtype=dtype),))

    def _silu_and_mul(self, width: int) -> Callable[..., Tensor]:
        def samples() -> tuple[Tensor, ...]:
            gate, up = sample_rows(2 * width, dtype=self.dtype).chunk(2, -1)
            return gate, up

        return self.rows("silu_mul", silu_and_mul, (width,), samples)

    def rows(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
        *,
        counts: Sequence[int] = PROBE_ROW_COUNTS,
    ) -> Callable[..., Tensor]:
        """`op` with independent rows, its verdict recorded; arguments as of `probe_row_op`."""
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
