"""`Ops`, the interface between model families and devices: the operations that a family binds and calls.

At load a family binds its operations by checkpoint names (`Ops.linear`, `Ops.attention`, ...). In a
step it calls them with rows [T, ...] and the `ForwardStep`. No operation holds a current step, and none
holds its `Ops`. `docs/architecture.md` says where graphs, tensor parallelism and adapters fit in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ramify.attention.exactness import Exactness
from ramify.attention.paged import PagedBackend
from ramify.kv.pool import KVPool
from ramify.models.configs.dense_variant import ActivationName, NormKind, QkNormForm
from ramify.models.configs.moe import MoeConfig
from ramify.models.configs.rope import RopeConfig

# Gated activations combine the two halves (gate, up) of a result.
GatedActivation = Literal["silu_mul", "gelu_tanh_mul", "gelu_mul", "clamped_swiglu_mul"]
Activation = ActivationName | Literal["sigmoid"] | GatedActivation

# [T, ...] -> [T, ...]: row i of the result depends on row i of the argument only.
RowOp = Callable[[Tensor], Tensor]
# [T] int64 -> [T, hidden_size]
Embedding = Callable[[Tensor], Tensor]
# hidden rows [R, hidden_size] before the final norm -> logits [R, vocab_size] float32
LmHead = Callable[[Tensor], Tensor]

# attention(layer, query, *kv) -> output [T, num_heads, value_dim]. It writes kv, one tensor [T, ...] per
# K/V plane, to the step's slots, then attends. `rows` [R] int64, ascending, says that the query has only
# these of the T rows; so has the output then. `sinks` [num_heads] float32 are those of a model with
# attention sinks. The engine's is `ramify.attention.paged.PagedAttention`.
#
#   dense     attention(layer, q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim])
#   DeepSeek  attention(layer, MlaQuery, latent [T, latent_dim], rope [T, rope_dim][, index_key [T, dim]])
Attention = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension; `name` is a checkpoint prefix, such as `model.norm`."""

    name: str
    eps: float
    kind: NormKind = "rms"
    offset: float = 0.0  # of the weight: Gemma multiplies by 1 + weight


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a layer."""

    num_q: int
    num_kv: int
    head_dim: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """Heads of q, k and v in a QKV row."""
        return self.num_q, self.num_kv, self.num_kv


# How the ranks of tensor parallelism divide a matrix; one device ignores it. "columns", "rows": the
# output, the input. "vocab": the output, gathered afterwards. `Heads`: q, k and v, each by its heads.
Shard = Literal["none", "columns", "rows", "vocab"] | Heads


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """What a step's operations share; the runner makes it, `Ops.begin` adds the angles."""

    positions: Tensor  # [T] int64, padding rows included
    attention: Attention
    # [R] int64, ascending: rows that are wanted beyond the K/V of the last layer; None: all
    output_rows: Tensor | None = None
    # cos and signed sin [T, 1, dim] of each rotary table that operations read
    angles: tuple[tuple[Tensor, Tensor], ...] = ()

    def select(self, rows: Tensor) -> ForwardStep:
        """The step of some rows [R] int64, for what comes after attention."""
        angles = tuple((cos[rows], sin[rows]) for cos, sin in self.angles)
        return ForwardStep(self.positions[rows], self.attention, None, angles)

    def pruned_attention(
        self, layer: int, q: Tensor, *kv: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of a layer: [T, num_heads, value_dim], or [R, ...] with `output_rows`."""
        options = {} if sinks is None else {"sinks": sinks}
        if self.output_rows is None:
            return self.attention(layer, q, *kv, **options)
        return self.attention(layer, q[self.output_rows], *kv, rows=self.output_rows, **options)


class Linear(Protocol):
    """x @ weight.T + bias, with the norm before and the activation behind it that it was bound with."""

    def __call__(
        self, x: Tensor, step: ForwardStep | None, *, residual: Tensor | None = None
    ) -> Tensor:
        """[T, in_width] -> [T, out_width].

        Args:
            step: whose rows these are; None if they are not the rows of a step, as in an LM head.
            residual: [T, out_width], contiguous, not x: the result is added to it in place, and it is
                returned.
        """
        ...


class HeadLinear(Protocol):
    """A matrix for each head."""

    @property
    def weight(self) -> Tensor:
        """[num_heads, n, m]."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, num_heads, n] -> [T, num_heads, m]."""
        ...


class Rope(Protocol):
    """Rotary embedding of the first dimensions of each head; the others are copied."""

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """[T, heads, at least the bound dim] -> the same."""
        ...


class Attended(NamedTuple):
    """Output of a layer's attention, and the K/V that it wrote."""

    rows: Tensor  # [T or R, num_heads * value_dim]
    kv: tuple[Tensor, ...]  # of all T rows


class SelfAttention(Protocol):
    """QK norm, rope, K/V write and attention over QKV rows."""

    def __call__(self, qkv: Tensor, step: ForwardStep) -> Attended:
        """qkv [T, (num_q + 2 * num_kv) * head_dim]; it may be overwritten."""
        ...


class Experts(Protocol):
    """Routed experts of a layer, and the shared expert if there is one."""

    def __call__(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum over experts of weight * expert(x), like x.

        Each product is rounded to x's dtype, then added: experts in ascending order, the shared last.

        Args:
            x: [T, hidden_size].
            weights: [T, num_experts] float32; 0 where a token is not routed to an expert.
        """
        ...


class DecoderLayer(Protocol):
    """A layer as its family writes it; the reference of every fused form."""

    def attend(self, hidden: Tensor, step: ForwardStep) -> Attended:
        """Everything up to attention's output: writes the K/V of all T rows of hidden."""
        ...

    def finish(self, hidden: Tensor, rows: Tensor, step: ForwardStep) -> Tensor:
        """Everything after attention: hidden [R, hidden_size], which may be overwritten.

        Args:
            rows: attention's output of the same rows, [R, num_heads * value_dim].
            step: of these rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class FusableMlp:
    """down(gate_up(x)); the norm of x is inside `gate_up`."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class FusableExperts:
    """experts(x, route(router(x))) + shared_weight(x) * shared(x) of x = norm(hidden).

    `router` and `shared_weight` take x in float32.
    """

    norm: RowOp
    router: Linear
    route: RowOp
    experts: Experts
    shared: FusableMlp | None = None
    shared_weight: Linear | None = None  # with `shared`


@dataclass(frozen=True, slots=True)
class FusableParts:
    """The operations of a layer that a device can run in one go.

    hidden += scale * after_attention(o_proj(attention(qkv(hidden))))
    hidden += scale * after_mlp(mlp(hidden))

    `qkv` and `mlp` begin with a norm, or read hidden as it is. In parallel, `mlp` reads the hidden
    that `qkv` read.
    """

    qkv: Linear
    attention: SelfAttention
    o_proj: Linear
    mlp: FusableMlp | FusableExperts
    after_attention: RowOp | None = None
    after_mlp: RowOp | None = None
    scale: float = 1.0
    is_parallel: bool = False


@runtime_checkable
class FusableLayer(Protocol):
    """A layer that a device can fuse."""

    @property
    def fusable(self) -> FusableParts:
        """Its operations."""
        ...


class LayerStack(Protocol):
    """All layers of a decoder."""

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size], which may be overwritten -> the rows before the final norm.

        Rows that `step.output_rows` leaves out may be those before the last layer. Such a row is not
        finite if its K/V of the last layer is not.
        """
        ...

    def warm_up(self, backend: PagedBackend, pool: KVPool) -> None:
        """Compile for steps over this backend and pool now, not in the first step."""
        ...


class Ops(Protocol):
    """Operations of one decoder on one device, computed in `dtype`.

    A `name` is a checkpoint prefix such as `model.layers.3.self_attn.q_proj`.
    """

    dtype: torch.dtype

    @property
    def row_multiple(self) -> int:
        """Pad a step to a multiple of this many rows, or its bits are not exact."""
        ...

    @property
    def reason_not_captured(self) -> str | None:
        """None, or why no graph can hold a step of what is bound so far: the host reads values of the device."""
        ...

    def embedding(self, name: str, *, scale: float = 1.0) -> Embedding:
        """Rows of the table, multiplied by `scale` in `dtype`."""
        ...

    def linear(
        self,
        *names: str,
        norm: Norm | None = None,
        activation: Activation | None = None,
        shard: Shard = "none",
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """One matrix of the named ones, which have the same input; outputs side by side.

        Args:
            norm: of the input.
            activation: of the output; a gated one: of its two halves, which `names` (gate, up) are.
            dtype: to compute in; None: `Ops.dtype`.
        """
        ...

    def norm(self, norm: Norm) -> RowOp:
        """A norm alone."""
        ...

    def head_linear(
        self, name: str, *, num_heads: int, rows: slice, transpose: bool = False
    ) -> HeadLinear:
        """Rows of each head of a matrix [num_heads * n, m]: [n, m], or with `transpose` [m, n]."""
        ...

    def rope(
        self, rope: RopeConfig, *, dim: int, num_heads: int, interleaved: bool = False
    ) -> Rope:
        """Rotary embedding of the first `dim` dimensions; `interleaved` pairs are neighbours."""
        ...

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
        """Attention over QKV rows; `qk_norm` are norms of q and of k, `sinks` a tensor [num_q]."""
        ...

    def router(self, config: MoeConfig, bias: Tensor | None) -> RowOp:
        """Router logits [T, num_experts] float32 -> weights of experts; see `routing.route`."""
        ...

    def experts(
        self,
        prefix: str,
        *,
        num_experts: int,
        top_k: int,
        shared: str | None,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        activation: GatedActivation = "silu_mul",
    ) -> Experts:
        """Gated MLPs `prefix` + 0., 1., ... and `shared`.

        `names` are gate, up and down of each, or a matrix with gate above up, and down. A token is
        routed to at most `top_k`.
        """
        ...

    def row_op(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Callable[..., Tensor]:
        """A family's own function of rows, kept independent of the batch: see `probe_row_op`."""
        ...

    def lm_head(
        self, name: str, *, norm: Norm, scale: float = 1.0, soft_cap: float | None = None
    ) -> LmHead:
        """Final norm, output matrix, times `scale`; `soft_cap` c makes it c * tanh(logits / c)."""
        ...

    def stack(self, layers: Sequence[DecoderLayer]) -> LayerStack:
        """All layers of the decoder as one call."""
        ...

    def finish(self) -> None:
        """Drop the weights once everything is bound: packed copies replace most of them."""
        ...

    def begin(self, step: ForwardStep) -> ForwardStep:
        """Prepare a step: everything that is the same for all layers."""
        ...

    def weight(self, name: str) -> Tensor:
        """The checkpoint's tensor of that name."""
        ...

    def exactness(self) -> list[Exactness]:
        """The implementation of each distinct operation, shape and dtype, and why it was chosen."""
        ...
