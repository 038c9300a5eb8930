"""One dense decoder for the Llama family and its relatives; what differs is configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exact import Exactness, ProbeStore
from ramify.models.config import ModelConfig
from ramify.models.layers import (
    Linear,
    RMSNorm,
    Rotary,
    choose_linear,
    choose_rows,
    rotate,
    sample_rows,
    silu_mul,
)

# attend(layer, q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]) -> like q. The
# callee stores k and v and attends with scale head_dim ** -0.5.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer; `qkv` and `gate_up` are one matrix each, or one per part."""

    attention_norm: Norm
    qkv: tuple[Linear, ...]
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: tuple[Linear, ...]
    down: Linear


class DenseDecoder:
    """Llama, Mistral, Qwen2 and Qwen3: tokens and positions in, hidden rows and logits out.

    The caller owns K/V and attention (`attend`) and runs it under `torch.inference_mode`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        exact: bool,
        store: ProbeStore | None = None,
        linear_strategy: str | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> None:
        """Arrange the weights and choose how each operation is computed.

        Args:
            weights: every name of `config.tensor_shapes()`, in `dtype`.
            exact: the bits of a row must not depend on the other rows.
            store: verdicts of earlier probes; None uses the file of this user.
            linear_strategy: one of `layers.LINEAR_STRATEGIES` for every matrix instead of the
                probe's choice; tests put faults in with it.
            on_layer: called after each layer, for progress.

        float32 matrices that read the same input become one (packing copies them in any case);
        others stay views of the memory-mapped file.
        """
        self.config, self.dtype, self.exact = config, dtype, exact
        self._weights, self._strategy = weights, linear_strategy
        self._joins = dtype == torch.float32  # q, k, v are then strided views of one matrix's rows
        self._store = ProbeStore.default() if store is None else store
        self._verdicts: dict[tuple[str, tuple[int, ...]], Exactness] = {}
        self._rotary = Rotary(
            config.rope, head_dim=config.head_dim, max_len=config.max_model_len, dtype=dtype
        )
        self._rotate = self._choose_rotate()
        self._silu_mul = self._choose_silu_mul()
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers: list[_Layer] = []
        for layer in range(config.num_layers):
            self._layers.append(self._build_layer(f"model.layers.{layer}."))
            if on_layer is not None:
                on_layer()
        self._norm = self._rms_norm("model.norm.weight")
        tied = config.tie_word_embeddings
        self._head = self._linear("model.embed_tokens" if tied else "lm_head")
        del self._weights  # packed copies replace most of them

    def exactness(self) -> list[Exactness]:
        """How each distinct operation, shape and dtype is computed, and why."""
        return list(self._verdicts.values())

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden rows before the final norm; `logits` applies it.

        Args:
            token_ids: [T] int64, each below vocab_size.
            positions: [T] int64, each below max_model_len.
            attend: called once per layer, in order; its k is contiguous, its v may be a view.

        Returns:
            [T, hidden_size] in the model's dtype.
        """
        hidden = F.embedding(token_ids, self._embedding)
        cos, sin = self._rotary.at(positions)
        for number, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, layer.attention_norm(hidden))
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            hidden = hidden + layer.output(attend(number, q, k, v).flatten(1))
            gate, up = _parts(layer.gate_up, layer.mlp_norm(hidden))
            hidden = hidden + layer.down(self._silu_mul(gate, up))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] rows of `forward` -> [R, vocab_size] float32."""
        return self._head(self._norm(hidden)).float()

    def _qkv(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [T, heads, head_dim], normalised but not yet turned."""
        config = self.config
        num_kv = config.num_kv_heads
        if len(layer.qkv) == 1:
            heads = layer.qkv[0](x).unflatten(-1, (-1, config.head_dim))
            q, k, v = heads.split((config.num_heads, num_kv, num_kv), 1)
        else:
            q, k, v = (part(x).unflatten(-1, (-1, config.head_dim)) for part in layer.qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        return q, k, v

    def _build_layer(self, prefix: str) -> _Layer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        num_q, num_kv = self.config.num_heads, self.config.num_kv_heads
        qk_norm = self.config.qk_norm
        return _Layer(
            attention_norm=self._rms_norm(f"{prefix}input_layernorm.weight"),
            qkv=self._joined(*(f"{attention}{part}_proj" for part in "qkv")),
            q_norm=self._head_norm(f"{attention}q_norm.weight", num_q) if qk_norm else None,
            k_norm=self._head_norm(f"{attention}k_norm.weight", num_kv) if qk_norm else None,
            output=self._linear(f"{attention}o_proj"),
            mlp_norm=self._rms_norm(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._joined(f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self._linear(f"{mlp}down_proj"),
        )

    def _joined(self, *names: str) -> tuple[Linear, ...]:
        """One matrix for projections of the same input in float32, else one each."""
        if not self._joins:
            return tuple(self._linear(name) for name in names)
        weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        biases = [self._weights.get(f"{name}.bias") for name in names]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        return (self._matrix(weight, bias),)

    def _linear(self, name: str) -> Linear:
        return self._matrix(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._strategy is not None:
            shape, dtype = (weight.shape[0], weight.shape[1]), str(weight.dtype)
            name = dtype.removeprefix("torch.")
            self._record(Exactness("linear", shape, name, self._strategy, "forced"))
            return Linear(weight, bias, strategy=self._strategy)
        linear, verdict = choose_linear(weight, bias, exact=self.exact, store=self._store)
        self._record(verdict)
        return linear

    def _rms_norm(self, name: str) -> Norm:
        norm = RMSNorm(self._weights[name], self.config.rms_norm_eps)
        width, dtype = self.config.hidden_size, self.dtype
        return self._rows("rms_norm", norm, (width,), lambda: (sample_rows(width, dtype=dtype),))

    def _head_norm(self, name: str, num_heads: int) -> Norm:
        norm = RMSNorm(self._weights[name], self.config.rms_norm_eps)
        num_joined = self.config.num_heads + 2 * self.config.num_kv_heads
        shape = (num_heads, self.config.head_dim)

        def samples() -> tuple[Tensor, ...]:
            heads = sample_rows(num_joined, shape[1], dtype=self.dtype)[:, :num_heads]
            return (heads if self._joins else heads.contiguous(),)

        return self._rows("rms_norm of heads", norm, shape, samples)

    def _choose_rotate(self) -> Callable[..., Tensor]:
        shape = (self.config.num_heads, self.config.head_dim)

        def samples() -> tuple[Tensor, ...]:
            heads = sample_rows(*shape, dtype=self.dtype)
            positions = torch.arange(heads.shape[0]) % self.config.max_model_len
            return (heads, *self._rotary.at(positions))

        return self._rows("rotary", rotate, shape, samples)

    def _choose_silu_mul(self) -> Callable[..., Tensor]:
        inner = self.config.intermediate_size

        def samples() -> tuple[Tensor, ...]:
            gate, up = sample_rows(2 * inner, dtype=self.dtype).chunk(2, -1)
            return (gate, up) if self._joins else (gate.contiguous(), up.contiguous())

        return self._rows("silu_mul", silu_mul, (inner,), samples)

    def _rows(
        self,
        operation: str,
        op: Callable[..., Tensor],
        shape: tuple[int, ...],
        samples: Callable[[], tuple[Tensor, ...]],
    ) -> Callable[..., Tensor]:
        chosen, verdict = choose_rows(
            operation, op, shape, self.dtype, samples, exact=self.exact, store=self._store
        )
        self._record(verdict)
        return chosen

    def _record(self, verdict: Exactness) -> None:
        self._verdicts[(verdict.operation, verdict.shape)] = verdict


def _parts(linears: tuple[Linear, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up, [T, intermediate_size] each, from one matrix or from two."""
    if len(linears) == 1:
        gate, up = linears[0](x).chunk(2, -1)
        return gate, up
    return linears[0](x), linears[1](x)
