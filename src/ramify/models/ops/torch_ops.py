"""`TorchOps`: a decoder's operations in plain torch, so far tried on CPU only; the reference of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exactness import (
    FP32_ROW_MULTIPLE,
    Exactness,
    ProbeStore,
    dtype_name,
)
from ramify.models.configs.dense_variant import QkNormForm
from ramify.models.configs.moe import MoeConfig
from ramify.models.configs.rope import RopeConfig
from ramify.models.ops import functional
from ramify.models.ops.functional import (
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    apply_rotary,
    layer_norm,
    per_head_matmul,
    rms_norm,
)
from ramify.models.ops.layer_loop import LayerLoop
from ramify.models.ops.mlp import LoopedExperts, Mlp
from ramify.models.ops.probe import cancelled_rows, probe_row_op, sample_rows
from ramify.models.ops.protocol import (
    Activation,
    DecoderLayer,
    Embedding,
    Experts,
    ForwardStep,
    GatedActivation,
    Heads,
    LayerStack,
    Linear,
    LmHead,
    Norm,
    RowOp,
    SelfAttention,
    Shard,
)
from ramify.models.ops.quantized import Weight, as_tensor, concat_weights
from ramify.models.ops.rotary_table import BLOCK_POSITIONS, RotaryTable
from ramify.models.ops.routing import route
from ramify.models.ops.torch_linear import TorchLinear, choose_torch_linear
from ramify.models.ops.torch_modules import (
    ComposedLinear,
    SplitAttention,
    TorchHeadLinear,
    TorchQKNormRope,
    TorchRope,
)

CPU = torch.device("cpu")


class TorchOps:
    """Operations in plain torch, each in a form whose rows do not depend on the batch if `exact`.

    Args:
        weights: by Hugging Face name, on one device; matrices in `dtype` or quantised.
        dtype: to compute in.
        max_len: positions of the rotary tables.
        exact: require batch invariance: a row's bits do not depend on the other rows.
        store: verdicts of earlier probes; None: `ProbeStore.default()`.
        device: of the weights.
        linear_strategy: a key of `TORCH_LINEARS` for every matrix, without a probe; None: the fastest
            that passes. Tests inject faults with it.
    """

    @classmethod
    def supports(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """None: it computes every dtype on every device."""
        return None

    def __init__(
        self,
        weights: Mapping[str, Weight],
        *,
        dtype: torch.dtype,
        max_len: int,
        exact: bool = True,
        store: ProbeStore | None = None,
        device: torch.device = CPU,
        linear_strategy: str | None = None,
    ) -> None:
        self.dtype, self.exact = dtype, exact
        self._weights, self._max_len, self._device = weights, max_len, device
        self._strategy = linear_strategy
        self._store = (ProbeStore.default() if store is None else store).on(device)
        self._verdicts: dict[tuple[str, tuple[int, ...], str], Exactness] = {}
        self._tables: dict[tuple[RopeConfig, int], RotaryTable] = {}
        self._gathered: list[RotaryTable] = []  # those of `ForwardStep.angles`
        self._reason_not_captured: str | None = None

    @property
    def row_multiple(self) -> int:
        """See `Ops`."""
        return FP32_ROW_MULTIPLE if self.exact else 1

    @property
    def reason_not_captured(self) -> str | None:
        """See `Ops`."""
        return self._reason_not_captured

    def exactness(self) -> list[Exactness]:
        """See `Ops`."""
        return list(self._verdicts.values())

    def begin(self, step: ForwardStep) -> ForwardStep:
        """See `Ops`: computes cos and sin of new positions, and gathers those of the step's."""
        if len(step.positions) and self._device.type == "cpu":
            # NumPy: torch takes longer for a few numbers.
            end = int(step.positions.numpy().max()) + 1
            for table in self._tables.values():
                table.extend(end)
        if not self._gathered:
            return step
        return replace(step, angles=tuple(t.cos_sin(step.positions) for t in self._gathered))

    def finish(self) -> None:
        """See `Ops`."""
        self._weights = {}

    def weight(self, name: str) -> Tensor:
        """See `Ops`."""
        return as_tensor(self._weights[name])

    # -- binding -----------------------------------------------------------------------------

    def embedding(self, name: str, *, scale: float = 1.0) -> Embedding:
        """See `Ops`."""
        table = self.weight(f"{name}.weight")
        if scale == 1.0:
            return partial(F.embedding, weight=table)
        factor = torch.tensor(scale, dtype=self.dtype, device=self._device)
        return lambda token_ids: F.embedding(token_ids, table) * factor

    def linear(
        self,
        *names: str,
        norm: Norm | None = None,
        activation: Activation | None = None,
        shard: Shard = "none",  # noqa: ARG002 - one device holds the whole matrix
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """See `Ops`."""
        weight, bias = self._matrix(names, dtype)
        if self._strategy is not None:
            matrix = TorchLinear(weight, bias, strategy=self._strategy)
            shape = (weight.shape[0], weight.shape[1])
            kind = dtype_name(weight.dtype)
            self._record(Exactness("linear", shape, kind, self._strategy, "forced"))
        else:
            matrix, verdict = choose_torch_linear(weight, bias, exact=self.exact, store=self._store)
            self._record(verdict)
        return self._compose(norm, matrix, activation, len(weight), dtype or self.dtype)

    def norm(self, norm: Norm) -> RowOp:
        """See `Ops`."""
        width = len(self.weight(f"{norm.name}.weight"))
        samples = self._samples(width)
        return self.row_op(f"{norm.kind}_norm", self._norm(norm), (width,), samples)

    def head_linear(
        self, name: str, *, num_heads: int, rows: slice, transpose: bool = False
    ) -> TorchHeadLinear:
        """See `Ops`."""
        matrices = self.head_matrices(name, num_heads=num_heads, rows=rows, transpose=transpose)
        op = self.row_op(
            "per-head matmul",
            partial(per_head_matmul, matrices=matrices),
            tuple(matrices.shape),
            self.head_rows(matrices),
        )
        return TorchHeadLinear(matrices, op)

    def rope(
        self, rope: RopeConfig, *, dim: int, num_heads: int, interleaved: bool = False
    ) -> TorchRope:
        """See `Ops`."""
        table = self._table(rope, dim)
        if table not in self._gathered:
            self._gathered.append(table)

        def samples() -> tuple[Tensor, ...]:
            [heads] = self._samples(num_heads, dim)()
            return (heads, *table.cos_sin(self._sample_positions(len(heads))))

        rotate = self.row_op("rope", apply_rotary, (num_heads, dim), samples)
        return TorchRope(rotate, self._gathered.index(table), dim, interleaved)

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
        rotate = self.rope(rope, dim=heads.head_dim, num_heads=heads.num_q)
        norms = None
        if qk_norm is not None:
            bind = self._width_norm if qk_norm_form == "width" else self._head_norm
            q_norm, k_norm = qk_norm
            norms = bind(q_norm, heads, heads.num_q), bind(k_norm, heads, heads.num_kv)
        is_late = qk_norm_form == "after_rope"
        qk_norm_rope = TorchQKNormRope(heads, norms, rotate, is_late)
        return SplitAttention(layer, qk_norm_rope, None if sinks is None else self.weight(sinks))

    def router(self, config: MoeConfig, bias: Tensor | None) -> RowOp:
        """See `Ops`."""
        return self.row_op(
            f"{config.scoring} router",
            partial(route, bias=bias, config=config),
            (config.num_experts, config.num_groups, config.topk_groups, config.top_k),
            self._samples(config.num_experts, dtype=torch.float32),
            dtype=torch.float32,
        )

    def experts(
        self,
        prefix: str,
        *,
        num_experts: int,
        top_k: int,  # noqa: ARG002 - for kernels
        shared: str | None,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        activation: GatedActivation = "silu_mul",
    ) -> Experts:
        """See `Ops`."""
        return self._looped_experts(
            prefix,
            num_experts=num_experts,
            shared=shared,
            names=names,
            activation=activation,
            reason="operations of torch",
        )

    def lm_head(
        self, name: str, *, norm: Norm, scale: float = 1.0, soft_cap: float | None = None
    ) -> LmHead:
        """See `Ops`."""
        linear = self.linear(name, norm=norm, shard="vocab")

        def logits(hidden: Tensor) -> Tensor:
            wide = linear(hidden, None).float()
            return wide if scale == 1.0 else wide.mul_(scale)

        if soft_cap is None:
            return logits
        vocab_size = len(self._weights[f"{name}.weight"])
        capped = self.row_op(
            "soft_cap",
            partial(functional.soft_cap, cap=soft_cap),
            (vocab_size,),
            self._samples(vocab_size, dtype=torch.float32),
            dtype=torch.float32,
        )
        return lambda hidden: capped(logits(hidden))

    def stack(self, layers: Sequence[DecoderLayer]) -> LayerStack:
        """See `Ops`."""
        return LayerLoop(layers)

    def row_op(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Callable[..., Tensor]:
        """See `Ops`; the verdict is recorded."""
        chosen, verdict = probe_row_op(
            operation,
            op,
            shape,
            dtype or self.dtype,
            samples,
            exact=self.exact,
            store=self._store,
        )
        self._record(verdict)
        return chosen

    # -- parts -------------------------------------------------------------------------------

    def _looped_experts(
        self,
        prefix: str,
        *,
        num_experts: int,
        shared: str | None,
        names: tuple[str, ...],
        activation: GatedActivation,
        reason: str,
    ) -> LoopedExperts:
        """Experts one after the other, over rows that the host reads from the routing.

        Args:
            reason: why not otherwise, for the report.
        """
        *gate_up, down = names
        bind = partial(Mlp, self, activation=activation, gate_up=tuple(gate_up), down=down)
        routed = tuple(bind(f"{prefix}{number}.") for number in range(num_experts))
        reason = f"the host reads the routing: {reason}"
        self._reason_not_captured = f"experts run one after the other; {reason}"
        self._record(Exactness("experts", (num_experts,), dtype_name(self.dtype), "loop", reason))
        return LoopedExperts(routed, None if shared is None else bind(shared))

    def head_matrices(self, name: str, *, num_heads: int, rows: slice, transpose: bool) -> Tensor:
        """The matrices of `head_linear`, a view: [num_heads, n, m]."""
        whole: Tensor = self.weight(f"{name}.weight").unflatten(0, (num_heads, -1))
        matrices = whole[:, rows]
        return matrices.transpose(1, 2) if transpose else matrices

    def head_rows(self, matrices: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Makes rows to try the matrices of heads with; in bfloat16 sums cancel."""
        samples = self._samples(*matrices.shape[:2])

        def cancelled() -> tuple[Tensor, ...]:
            (rows,) = samples()
            return (cancelled_rows(rows.transpose(0, 1), matrices.mT).transpose(0, 1),)

        return cancelled if self.dtype == torch.bfloat16 else samples

    def _matrix(
        self, names: Sequence[str], dtype: torch.dtype | None
    ) -> tuple[Weight, Tensor | None]:
        """Weight and bias of the named linears, concatenated; all have a bias, or none."""
        weight = concat_weights([self._weights[f"{name}.weight"] for name in names])
        bias = None
        if f"{names[0]}.bias" in self._weights:
            bias = torch.cat([self.weight(f"{name}.bias") for name in names])
        if dtype is not None and weight.dtype != dtype:
            return as_tensor(weight).to(dtype), None if bias is None else bias.to(dtype)
        return weight, bias

    def _compose(
        self,
        norm: Norm | None,
        matrix: RowOp,
        activation: Activation | None,
        width: int,
        dtype: torch.dtype,
    ) -> Linear:
        """A norm, a matrix of `width` rows, and an activation in `dtype`, each called by itself."""
        row_norm, num_parts = None if norm is None else self.norm(norm), 1
        if activation is None:
            return ComposedLinear(row_norm, matrix, None)
        functions: Mapping[str, Callable[..., Tensor]] = PLAIN_ACTIVATIONS
        if activation in GATED_ACTIVATIONS:
            functions, num_parts = GATED_ACTIVATIONS, 2
        samples = self._samples(width, dtype=dtype)
        chosen = self.row_op(
            activation,
            functions[activation],
            (width // num_parts,),
            lambda: samples()[0].chunk(num_parts, -1),
            dtype=dtype,
        )
        return ComposedLinear(row_norm, matrix, chosen, num_parts)

    def _head_norm(self, norm: Norm, heads: Heads, num_heads: int) -> RowOp:
        """A norm of each of the first `num_heads` heads of a QKV row."""
        qkv = self._samples(sum(heads.counts), heads.head_dim)
        shape = (num_heads, heads.head_dim)
        return self.row_op("qk_norm", self._norm(norm), shape, lambda: (qkv()[0][:, :num_heads],))

    def _width_norm(self, norm: Norm, heads: Heads, num_heads: int) -> RowOp:
        """A norm over `num_heads` heads of a QKV row together."""
        inner = self._norm(norm)
        qkv = self._samples(sum(heads.counts), heads.head_dim)
        return self.row_op(
            f"{norm.kind}_norm of heads",
            lambda x: inner(x.flatten(1)).view(x.shape),
            (num_heads, heads.head_dim),
            lambda: (qkv()[0][:, :num_heads],),
        )

    def _norm(self, norm: Norm) -> RowOp:
        """The norm's function of rows, not probed."""
        weight = self.weight(f"{norm.name}.weight")
        if norm.kind == "layer":
            has_bias = f"{norm.name}.bias" in self._weights
            bias = self.weight(f"{norm.name}.bias") if has_bias else None
            return partial(layer_norm, weight=weight, bias=bias, eps=norm.eps)
        return partial(rms_norm, weight=weight, eps=norm.eps, offset=norm.offset)

    def _table(self, rope: RopeConfig, dim: int) -> RotaryTable:
        """The rotary table, made once."""
        if (rope, dim) not in self._tables:
            self._tables[rope, dim] = RotaryTable(
                rope,
                head_dim=dim,
                max_len=self._max_len,
                dtype=self.dtype,
                device=self._device,
            )
        return self._tables[rope, dim]

    def _samples(
        self, *shape: int, dtype: torch.dtype | None = None
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Makes random rows for a probe."""
        return lambda: (sample_rows(*shape, dtype=dtype or self.dtype).to(self._device),)

    def _sample_positions(self, num_rows: int) -> Tensor:
        # Those whose rows a table has from the start.
        num_positions = min(self._max_len, BLOCK_POSITIONS)
        return torch.arange(num_rows, device=self._device) % num_positions

    def _record(self, verdict: Exactness) -> None:
        self._verdicts[verdict.operation, verdict.shape, verdict.dtype] = verdict
