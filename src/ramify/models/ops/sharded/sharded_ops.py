"""`ShardedOps`: the operations of one rank of tensor parallelism, over those of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ramify.attention.exactness import Exactness, ProbeStore
from ramify.models.configs.dense_variant import QkNormForm
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.moe import MoeConfig
from ramify.models.configs.rope import RopeConfig
from ramify.models.configs.sharding import kv_heads_of
from ramify.models.ops.functional import GATED_ACTIVATIONS
from ramify.models.ops.layer_loop import LayerLoop
from ramify.models.ops.protocol import (
    Activation,
    DecoderLayer,
    Embedding,
    Experts,
    ForwardStep,
    GatedActivation,
    HeadLinear,
    Heads,
    LayerStack,
    Linear,
    LmHead,
    Norm,
    Ops,
    Rope,
    RowOp,
    SelfAttention,
    Shard,
)
from ramify.models.ops.quantized import Weight, as_tensor
from ramify.models.ops.sharded.rank_group import RankGroup, share
from ramify.models.ops.sharded.rank_weights import RankWeights
from ramify.models.ops.torch_ops import CPU
from ramify.models.ops.weight_part import WeightPart

HEAD = "lm_head.weight"
Ranges = tuple[tuple[int, int], ...]


class DeviceOps(Protocol):
    """Makes the operations of a device; see `TorchOps` for the arguments."""

    def __call__(
        self,
        weights: Mapping[str, Weight],
        *,
        dtype: torch.dtype,
        max_len: int,
        exact: bool = True,
        store: ProbeStore | None = None,
        device: torch.device = CPU,
    ) -> Ops:
        """Bind to these weights."""
        ...


class ShardedOps:
    """Operations over a rank's part of every divided weight; hidden rows are whole, and alike on all ranks.

    A column-parallel matrix has the rank's outputs, by heads or elements; a row-parallel one has the rank's
    inputs, and its results are added up over ranks, before bias and residual. Embedding and LM head have
    the rank's tokens, experts are whole and the rank's own, norms, routers and latents are those of every
    rank. Layers run one after the other: the sums are between their operations.

    Args:
        config: of the whole model.
        inner: makes the operations of the device, which see the rank's weights.
        weights, options: see `TorchOps`.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        *,
        config: ModelConfig,
        group: RankGroup,
        inner: DeviceOps,
        dtype: torch.dtype,
        max_len: int,
        exact: bool = True,
        store: ProbeStore | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._weights, self._group, self._config = RankWeights(weights), group, config
        # A head that config.json does not speak of: see `with_stored_head`.
        head: dict[str, tuple[int, ...]] = {HEAD: (config.vocab_size, config.hidden_size)}
        self._shapes = head | config.tensor_shapes()
        self.dtype = dtype
        self._inner = inner(
            self._weights, dtype=dtype, max_len=max_len, exact=exact, store=store, device=device
        )

    @property
    def row_multiple(self) -> int:
        """See `Ops`."""
        return self._inner.row_multiple

    @property
    def reason_not_captured(self) -> str | None:
        """See `Ops`."""
        return self._inner.reason_not_captured

    def exactness(self) -> list[Exactness]:
        """See `Ops`."""
        order = "in rank order" if self._group.in_order else "as the library adds"
        size, hidden = self._group.size, self._config.hidden_size
        reason = f"parts of {size} ranks are added {order}"
        kind = str(self.dtype).removeprefix("torch.")
        verdict = Exactness("sum over ranks", (size, hidden), kind, order, reason)
        return [*self._inner.exactness(), verdict]

    def begin(self, step: ForwardStep) -> ForwardStep:
        """See `Ops`."""
        return self._inner.begin(step)

    def finish(self) -> None:
        """See `Ops`."""
        self._inner.finish()
        self._weights = RankWeights({})

    def weight(self, name: str) -> Tensor:
        """See `Ops`."""
        return self._inner.weight(name)

    # -- divided -----------------------------------------------------------------------------

    def embedding(self, name: str, *, scale: float = 1.0) -> Embedding:
        """See `Ops`: each rank looks up its own tokens; the rows of all are added up."""
        begin, end = self._divide_vocabulary(name)
        return TokenShare(self._inner.embedding(name, scale=scale), begin, end, self._group)

    def linear(
        self,
        *names: str,
        norm: Norm | None = None,
        activation: Activation | None = None,
        shard: Shard = "none",
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """See `Ops`."""
        if shard == "rows":
            [name] = names
            assert norm is None
            assert activation is None
            bias = self._divide_rows(name)
            if bias is not None and dtype is not None:
                bias = bias.to(dtype)
            return SummedLinear(self._inner.linear(name, dtype=dtype), bias, self._group)
        if isinstance(shard, Heads):
            self._divide_heads(names, shard)
        elif shard == "columns":
            self._divide_columns(names, activation)
        else:
            assert shard == "none", "`lm_head` joins the tokens of all ranks"
        return self._inner.linear(*names, norm=norm, activation=activation, dtype=dtype)

    def head_linear(
        self, name: str, *, num_heads: int, rows: slice, transpose: bool = False
    ) -> HeadLinear:
        """See `Ops`: the rank's heads."""
        self._divide_columns([name], None)
        return self._inner.head_linear(
            name, num_heads=num_heads // self._group.size, rows=rows, transpose=transpose
        )

    def rope(
        self, rope: RopeConfig, *, dim: int, num_heads: int, interleaved: bool = False
    ) -> Rope:
        """See `Ops`: as many heads as the rank has, where they are those of attention."""
        if num_heads == self._config.num_heads:
            num_heads //= self._group.size
        return self._inner.rope(rope, dim=dim, num_heads=num_heads, interleaved=interleaved)

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
        """See `Ops`: over the rank's heads."""
        q_heads, kv_heads = self._heads_of(heads)
        for norm, own in zip(qk_norm or (), (q_heads, kv_heads), strict=False):
            shape = self._shapes.get(f"{norm.name}.weight")
            if shape is None or len(shape) > 1:  # a weight for each head
                self._weights.divide(f"{norm.name}.weight", WeightPart(0, (own,)))
        if sinks is not None:
            self._weights.divide(sinks, WeightPart(0, (q_heads,)))
        num_q, num_kv = (end - begin for begin, end in (q_heads, kv_heads))
        return self._inner.attention(
            layer,
            Heads(num_q, num_kv, heads.head_dim),
            rope,
            qk_norm=qk_norm,
            qk_norm_form=qk_norm_form,
            sinks=sinks,
        )

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
        """See `Ops`: whole experts, of each rank its own, and its part of the shared one."""
        begin, end = self._group.share(num_experts)
        for number in range(end - begin):
            for name in names:
                for kind in ("weight", "bias"):
                    stored = f"{prefix}{begin + number}.{name}.{kind}"
                    self._weights.rename(f"{prefix}{number}.{name}.{kind}", stored)
        if shared is not None:
            *gate_up, down = names
            self._divide_columns([shared + name for name in gate_up], activation)
            bias = self._divide_rows(shared + down)
            assert bias is None, "of a shared expert"
        own = self._inner.experts(
            prefix,
            num_experts=end - begin,
            top_k=min(top_k, end - begin),
            shared=shared,
            names=names,
            activation=activation,
        )
        return ExpertShare(own, begin, end, self._group)

    def lm_head(
        self, name: str, *, norm: Norm, scale: float = 1.0, soft_cap: float | None = None
    ) -> LmHead:
        """See `Ops`: logits of the rank's tokens, joined with those of the others."""
        self._divide_vocabulary(name)
        size, vocab_size = self._group.size, self._shapes[f"{name}.weight"][0]
        shares = [share(vocab_size, rank, size) for rank in range(size)]
        counts = [end - begin for begin, end in shares]
        own = self._inner.lm_head(name, norm=norm, scale=scale, soft_cap=soft_cap)
        return lambda hidden: self._group.join_columns(own(hidden), counts)

    def stack(self, layers: Sequence[DecoderLayer]) -> LayerStack:
        """See `Ops`."""
        return LayerLoop(layers)

    # -- the same on every rank --------------------------------------------------------------

    def norm(self, norm: Norm) -> RowOp:
        """See `Ops`."""
        return self._inner.norm(norm)

    def router(self, config: MoeConfig, bias: Tensor | None) -> RowOp:
        """See `Ops`: over all experts."""
        return self._inner.router(config, bias)

    def row_op(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Callable[..., Tensor]:
        """See `Ops`."""
        return self._inner.row_op(operation, op, shape, samples, dtype=dtype)

    # -- parts -------------------------------------------------------------------------------

    def _heads_of(self, heads: Heads) -> tuple[tuple[int, int], tuple[int, int]]:
        """Query and K/V heads of this rank."""
        return (
            self._group.share(heads.num_q),
            kv_heads_of(heads.num_kv, self._group.rank, self._group.size),
        )

    def _divide_vocabulary(self, name: str) -> tuple[int, int]:
        begin, end = self._group.share(self._shapes[f"{name}.weight"][0])
        self._divide_outputs(name, ((begin, end),))
        return begin, end

    def _divide_heads(self, names: Sequence[str], heads: Heads) -> None:
        """Of q, k and v, or of a matrix that has them one above the other."""
        q_heads, kv_heads = self._heads_of(heads)
        dim, ranges = heads.head_dim, list[tuple[int, int]]()
        starts = (0, heads.num_q, heads.num_q + heads.num_kv) if len(names) == 1 else (0, 0, 0)
        for start, (begin, end) in zip(starts, (q_heads, kv_heads, kv_heads), strict=True):
            ranges.append(((start + begin) * dim, (start + end) * dim))
        if len(names) == 1:
            self._divide_outputs(names[0], tuple(ranges))
            return
        for name, own in zip(names, ranges, strict=True):
            self._divide_outputs(name, (own,))

    def _divide_columns(self, names: Iterable[str], activation: Activation | None) -> None:
        """Outputs of matrices; of one that has gate above up, both."""
        names = list(names)
        is_fused = activation in GATED_ACTIVATIONS and len(names) == 1
        for name in names:
            width = self._shapes[f"{name}.weight"][0]
            begin, end = self._group.share(width // 2 if is_fused else width)
            ranges: Ranges = ((begin, end),)
            if is_fused:
                ranges = (begin, end), (width // 2 + begin, width // 2 + end)
            self._divide_outputs(name, ranges)

    def _divide_outputs(self, name: str, ranges: Ranges) -> None:
        for kind in ("weight", "bias"):
            self._weights.divide(f"{name}.{kind}", WeightPart(0, ranges))

    def _divide_rows(self, name: str) -> Tensor | None:
        """Inputs of a matrix; returns its bias, which is added once, to the sum over ranks."""
        own = self._group.share(self._shapes[f"{name}.weight"][1])
        self._weights.divide(f"{name}.weight", WeightPart(1, (own,)))
        bias = self._weights.hide(f"{name}.bias")
        return None if bias is None else as_tensor(bias)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A row-parallel `Linear`: the sum over ranks, then bias and residual."""

    own: Linear
    bias: Tensor | None
    group: RankGroup

    def __call__(
        self, x: Tensor, step: ForwardStep | None, *, residual: Tensor | None = None
    ) -> Tensor:
        """See `Linear`."""
        total = self.group.add_up(self.own(x, step))
        if self.bias is not None:
            total = total + self.bias
        return total if residual is None else residual.add_(total)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """An `Embedding` of which this rank has the tokens from `begin` to before `end`."""

    own: Embedding
    begin: int
    end: int
    group: RankGroup

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size]."""
        is_own = (token_ids >= self.begin) & (token_ids < self.end)
        rows = self.own(torch.where(is_own, token_ids - self.begin, 0))
        return self.group.add_up(rows.masked_fill(~is_own[:, None], 0))


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """`Experts` of which this rank has those from `begin` to before `end`."""

    own: Experts
    begin: int
    end: int
    group: RankGroup

    def __call__(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`; parts of ranks are added in rank order."""
        return self.group.add_up(self.own(x, weights[:, self.begin : self.end]))
