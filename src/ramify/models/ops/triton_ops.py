"""`TritonOps`: a decoder's operations by Triton's kernels where there is one, else in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ramify.attention.exactness import (
    BATCHED,
    PROBE_ROW_COUNTS,
    Exactness,
    dtype_name,
    row_by_row,
)
from ramify.attention.paged import PagedAttention, PagedBackend
from ramify.kernels.triton.launch import reason_no_triton
from ramify.kv.pool import KVPool
from ramify.models.configs.dense_variant import QkNormForm
from ramify.models.configs.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from ramify.models.configs.rope import RopeConfig
from ramify.models.ops.functional import GATED_ACTIVATIONS
from ramify.models.ops.layer_loop import LayerLoop
from ramify.models.ops.mlp import Mlp
from ramify.models.ops.probe import cancelled_rows, probe_row_op
from ramify.models.ops.protocol import (
    Activation,
    Attended,
    DecoderLayer,
    Experts,
    ForwardStep,
    FusableLayer,
    FusableMlp,
    FusableParts,
    Heads,
    LayerStack,
    Linear,
    Norm,
    RowOp,
    SelfAttention,
    Shard,
)
from ramify.models.ops.protocol import GatedActivation as GatedActivationName
from ramify.models.ops.quantized import QuantizedWeight, Weight
from ramify.models.ops.rotary_table import RotaryTable
from ramify.models.ops.torch_modules import TorchHeadLinear
from ramify.models.ops.torch_ops import TorchOps
from ramify.models.ops.triton_experts import GroupedExperts, RoutedExperts, UngroupableError

if TYPE_CHECKING:
    from ramify.kernels.triton.rope_kv import HeadNorms

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class TritonOps(TorchOps):
    """RMS norms, gated activations, rope with K/V write, experts; and if exact, batch-invariant GEMMs.

    Without `exact`, matrices are multiplied by torch. Other operations are those of `TorchOps`, whose
    arguments these are.
    """

    probe_counts: Sequence[int] = PROBE_ROW_COUNTS

    @property
    def probes_kernels(self) -> bool:
        """Whether `exact` has its kernels probed."""
        return self._device.type != "cpu"

    @classmethod
    def supports(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """CUDA with Triton, or CPU with Triton's interpreter."""
        if (reason := reason_no_triton(device)) is not None:
            return reason
        if find_spec("triton") is None:
            return "triton is not installed: install it, or a CUDA build of torch"
        return None if dtype in FLOATS else f"dtype {dtype}: the kernels compute floats"

    def linear(
        self,
        *names: str,
        norm: Norm | None = None,
        activation: Activation | None = None,
        shard: Shard = "none",
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """See `Ops`."""
        weight, bias = self._matrix(names, dtype)
        if not self.exact or self._strategy is not None or isinstance(weight, QuantizedWeight):
            return super().linear(
                *names, norm=norm, activation=activation, shard=shard, dtype=dtype
            )
        from ramify.kernels.triton.gemm import BatchInvariantGemm

        gemm: RowOp = BatchInvariantGemm(weight, bias)
        operation = "linear" if bias is None else "linear with bias"
        shape = (weight.shape[0], weight.shape[1])
        # A bias would hide the sums that cancel.
        probed = gemm if bias is None else BatchInvariantGemm(weight)
        reason = "tiles and splits of one shape"
        if not self._is_invariant(
            operation, probed, shape, partial(self._matrix_rows, weight), reason, weight.dtype
        ):
            gemm = row_by_row(gemm)
        return self._compose(norm, gemm, activation, len(weight), dtype or self.dtype)

    def head_linear(
        self, name: str, *, num_heads: int, rows: slice, transpose: bool = False
    ) -> TorchHeadLinear:
        """See `Ops`."""
        if not self.exact:
            return super().head_linear(name, num_heads=num_heads, rows=rows, transpose=transpose)
        from ramify.kernels.triton.head_gemm import HeadGemm

        matrices = self.head_matrices(name, num_heads=num_heads, rows=rows, transpose=transpose)
        gemm: RowOp = HeadGemm(matrices)
        if not self._is_invariant(
            "per-head matmul",
            gemm,
            tuple(matrices.shape),
            self.head_rows(matrices),
            "tiles of one shape",
            self.dtype,
        ):
            gemm = row_by_row(gemm)
        return TorchHeadLinear(matrices, gemm)

    def experts(
        self,
        prefix: str,
        *,
        num_experts: int,
        top_k: int,
        shared: str | None,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        activation: GatedActivationName = "silu_mul",
    ) -> Experts:
        """See `Ops`: grouped GEMMs over blocks of the rows of an expert, if the matrices are alike."""
        *gate_up, down = names

        def read(linears: Sequence[str], number: int) -> tuple[Weight, Tensor | None]:
            return self._matrix([f"{prefix}{number}.{name}" for name in linears], None)

        try:
            if self._strategy is not None:
                raise UngroupableError(f"linear_strategy={self._strategy!r}")
            routed = RoutedExperts.of(
                partial(read, gate_up), partial(read, [down]), num_experts, top_k, activation
            )
        except UngroupableError as error:
            return self._looped_experts(
                prefix,
                num_experts=num_experts,
                shared=shared,
                names=names,
                activation=activation,
                reason=str(error),
            )
        mlp = None
        if shared is not None:
            mlp = Mlp(self, shared, activation=activation, gate_up=tuple(gate_up), down=down)
        return GroupedExperts(self._independent(routed), mlp)

    def _independent(self, routed: RoutedExperts) -> Callable[[Tensor, Tensor], Tensor]:
        """The routed experts, row by row if `exact` and their rows depend on each other."""
        shape = tuple(routed.gate_up.weight.shape)
        if not self.exact:
            verdict = Exactness("experts", shape, dtype_name(self.dtype), "triton", "exact=False")
            self._record(verdict)
            return routed

        def samples() -> tuple[Tensor, ...]:
            [x] = self._matrix_rows(routed.gate_up.weight[0])
            return x, routed.sample_weights(x)

        reason = f"blocks of {routed.gate_up.tiles.rows} rows of an expert"
        if self._is_invariant("experts", routed, shape, samples, reason, self.dtype):
            return routed
        return row_by_row(routed)

    def norm(self, norm: Norm) -> RowOp:
        """See `Ops`."""
        from ramify.kernels.triton.norm import MAX_WIDTH

        weight = self.weight(f"{norm.name}.weight")
        if norm.kind != "rms" or len(weight) > MAX_WIDTH:
            return super().norm(norm)
        of_rows = RmsNorm(weight, norm.eps, norm.offset)
        if not self._record_kernel("rms_norm", of_rows, (len(weight),), len(weight)):
            return super().norm(norm)
        return of_rows

    def attention(
        self,
        layer: int,
        heads: Heads,
        rope: RopeConfig,
        *,
        qk_norm: tuple[Norm, Norm] | None = None,
        qk_norm_form: QkNormForm = "head",
        sinks: str | None = None,
    ) -> SelfAttention:
        """See `Ops`."""
        split = super().attention(
            layer, heads, rope, qk_norm=qk_norm, qk_norm_form=qk_norm_form, sinks=sinks
        )
        norms = None
        if qk_norm is not None:
            q_norm, k_norm = qk_norm
            is_alike = (q_norm.eps, q_norm.offset) == (k_norm.eps, k_norm.offset)
            if qk_norm_form == "width" or q_norm.kind != "rms" or not is_alike:
                return split
            from ramify.kernels.triton.rope_kv import HeadNorms

            norms = HeadNorms(
                self.weight(f"{q_norm.name}.weight"),
                self.weight(f"{k_norm.name}.weight"),
                q_norm.eps,
                q_norm.offset,
                is_after_rope=qk_norm_form == "after_rope",
            )
        table = self._table(rope, heads.head_dim)
        of_model = None if sinks is None else self.weight(sinks)
        return RopeKvAttention(layer, heads, table, norms, of_model, split)

    def stack(self, layers: Sequence[DecoderLayer]) -> LayerStack:
        """See `Ops`."""
        parts = [layer.fusable for layer in layers if isinstance(layer, FusableLayer)]
        if len(parts) == len(layers) and all(map(_adds_before_norms, parts)):
            return FusedAdditions(layers, parts)
        return super().stack(layers)

    def _compose(
        self,
        norm: Norm | None,
        matrix: RowOp,
        activation: Activation | None,
        width: int,
        dtype: torch.dtype,
    ) -> Linear:
        row_norm = None if norm is None else self.norm(norm)
        if activation is None:
            return TritonLinear(row_norm, matrix, None)
        if activation not in GATED_ACTIVATIONS:
            return super()._compose(norm, matrix, activation, width, dtype)
        gated = GatedActivation(activation)
        if not self._record_kernel(activation, gated, (width // 2,), width):
            return super()._compose(norm, matrix, activation, width, dtype)
        return TritonLinear(row_norm, matrix, gated)

    def _record_kernel(self, operation: str, op: RowOp, shape: tuple[int, ...], width: int) -> bool:
        """Record a kernel that computes each row by itself; False: on this device it does not."""
        if self.exact:
            rows = self._samples(width)
            return self._is_invariant(operation, op, shape, rows, "a program a row", self.dtype)
        self._record(Exactness(operation, shape, dtype_name(self.dtype), BATCHED, "exact=False"))
        return True

    def _matrix_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Rows to try a matrix with; in 16 bits sums cancel, or rounding would hide differences."""
        (rows,) = self._samples(weight.shape[1], dtype=weight.dtype)()
        return (rows if weight.dtype == torch.float32 else cancelled_rows(rows, weight),)

    def _is_invariant(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
        reason: str,
        dtype: torch.dtype,
    ) -> bool:
        """Whether rows of a kernel have the same bits in every batch; the verdict is recorded.

        A GPU is probed. What Triton's interpreter runs on a CPU is so by construction.

        Args:
            shape: for the report.
            samples: makes rows to try.
        """
        verdict = Exactness(operation, shape, dtype_name(dtype), "triton", reason)
        if self.probes_kernels:
            _, verdict = probe_row_op(
                operation, op, shape, dtype, samples,
                exact=True, store=self._store, counts=self.probe_counts, strategy="triton",
            )  # fmt: skip
        self._record(verdict)
        return verdict.strategy == "triton"


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """An RMS norm, alone or of the sum of hidden rows and what is added to them."""

    weight: Tensor
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]."""
        from ramify.kernels.triton.norm import add_rms_norm

        return add_rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden += x, in place; the norm of that."""
        from ramify.kernels.triton.norm import add_rms_norm

        return add_rms_norm(x, self.weight, self.eps, self.offset, residual=hidden)


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """act(gate) * up of rows [T, 2 * width]."""

    kind: str

    def __call__(self, x: Tensor) -> Tensor:
        """[T, 2 * width] -> [T, width]."""
        from ramify.kernels.triton.activation import gated_activation

        return gated_activation(x, self.kind, alpha=SWIGLU_ALPHA, limit=SWIGLU_LIMIT)


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """A `Linear`: norm, matrix, activation; the matrix adds to a residual itself if it can."""

    norm: RowOp | None
    matrix: RowOp
    activation: Callable[[Tensor], Tensor] | None  # of whole rows

    def product(self, x: Tensor) -> Tensor:
        """Matrix and activation, of rows behind the norm."""
        y = self.matrix(x)
        return y if self.activation is None else self.activation(y)

    def __call__(
        self,
        x: Tensor,
        step: ForwardStep | None = None,  # noqa: ARG002 - for adapters
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `Linear`."""
        y = self.product(x if self.norm is None else self.norm(x))
        return y if residual is None else residual.add_(y)


@dataclass(frozen=True, slots=True)
class RopeKvAttention:
    """A `SelfAttention` whose rope writes K/V to the pages of the step's `PagedAttention`."""

    layer: int
    heads: Heads
    table: RotaryTable
    norms: HeadNorms | None
    sinks: Tensor | None  # [num_q] float32
    split: SelfAttention  # for other attentions, and steps that prune rows

    def __call__(self, qkv: Tensor, step: ForwardStep) -> Attended:
        """See `SelfAttention`."""
        paged = step.attention
        if not isinstance(paged, PagedAttention) or step.output_rows is not None:
            return self.split(qkv, step)
        pool = paged.pool
        if pool.layout.format != "nhd" or pool.layout.planes[0].shape[-1] != self.heads.head_dim:
            return self.split(qkv, step)
        from ramify.kernels.triton.rope_kv import rope_kv

        q, k, v = rope_kv(
            qkv.contiguous(),
            (self.heads.num_q, self.heads.num_kv),
            step.positions,
            (self.table.cos, self.table.sin),
            paged.slots,
            pool.planes(self.layer),
            self.norms,
        )
        out = paged.attend(self.layer, q, sinks=self.sinks)
        return Attended(out.flatten(1), (k, v))


class FusedAdditions:
    """A `LayerStack` in which the next norm adds what attention and MLP return to hidden."""

    def __init__(self, layers: Sequence[DecoderLayer], parts: Sequence[FusableParts]) -> None:
        self._loop, self._parts = LayerLoop(layers), list(parts)

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """See `LayerStack`."""
        if step.output_rows is not None:
            return self._loop(hidden, step)
        added: Tensor | None = None
        for parts in self._parts:
            mlp = parts.mlp
            assert isinstance(mlp, FusableMlp)
            rows = parts.attention(_normed_product(parts.qkv, hidden, added), step).rows
            added = _product(parts.o_proj, rows)
            added = _product(mlp.down, _normed_product(mlp.gate_up, hidden, added))
        return hidden if added is None else hidden.add_(added)

    def warm_up(self, backend: PagedBackend, pool: KVPool) -> None:
        """See `LayerStack`: kernels are compiled in the first step."""


def _normed_product(linear: Linear, hidden: Tensor, added: Tensor | None) -> Tensor:
    """linear(hidden += added)."""
    assert isinstance(linear, TritonLinear) and isinstance(linear.norm, RmsNorm)
    x = linear.norm(hidden) if added is None else linear.norm.add(hidden, added)
    return linear.product(x)


def _product(linear: Linear, x: Tensor) -> Tensor:
    assert isinstance(linear, TritonLinear)
    return linear.product(x)


def _adds_before_norms(parts: FusableParts) -> bool:
    """Whether a layer adds to hidden right before an RMS norm, twice."""
    mlp = parts.mlp
    if not isinstance(mlp, FusableMlp) or parts.is_parallel or parts.scale != 1.0:
        return False
    if parts.after_attention is not None or parts.after_mlp is not None:
        return False
    normed = all(
        isinstance(linear, TritonLinear) and isinstance(linear.norm, RmsNorm)
        for linear in (parts.qkv, mlp.gate_up)
    )
    return normed and all(
        isinstance(linear, TritonLinear) and linear.norm is None
        for linear in (parts.o_proj, mlp.down)
    )
