"""A Llama attention layer in plain torch: what the paged backends compute, without pages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ramify.attention.blocks.rotary import apply_rotary_pos_emb, rotary_tables
from ramify.errors import ConfigError

KeyValue = tuple[Tensor, Tensor]


class RadixAttentionBlock(nn.Module):
    """Causal self-attention with rotary position embedding and past K/V.

    Its four projections have the names and shapes of Hugging Face's Llama attention, so that
    weights load from one into the other. Computing a prompt in parts with `past_key_value` equals
    one call up to rounding; for equal bits use the engine's backends.

    Args:
        hidden_size: width of input and output.
        num_heads: query heads.
        head_dim: width of a head, even.
        max_position_embeddings: positions are below this.
        rope_theta: base of the rotary angles.
        num_kv_heads: K/V heads, a divisor of `num_heads`; None: `num_heads`.

    Raises:
        ConfigError: a size is not positive, `head_dim` is odd, or heads do not divide.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        max_position_embeddings: int = 2048,
        rope_theta: float = 10000.0,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = (hidden_size, num_heads, num_kv_heads, max_position_embeddings)
        if min(sizes) < 1 or rope_theta <= 0:
            raise ConfigError(
                f"hidden_size, num_heads, num_kv_heads and max_position_embeddings are {sizes} and "
                f"rope_theta is {rope_theta}; all must be positive"
            )
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.max_position_embeddings = max_position_embeddings
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        cos, sin = rotary_tables(head_dim, max_position_embeddings, rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: KeyValue | None = None,
        output_attentions: bool = False,
        use_cache: bool = False,
    ) -> tuple[Tensor, Tensor | None, KeyValue | None]:
        """Attention of each token over itself and the tokens before it.

        Args:
            hidden_states: [batch, tokens, hidden_size].
            attention_mask: combined with the causal mask. [batch, kv_tokens], zero or False at
                padding keys; or [batch or 1, heads or 1, tokens, kv_tokens], added to the scores if
                float, else zero or False at masked keys. `kv_tokens` includes the past.
            position_ids: [batch or 1, tokens] int64 or int32; None: the positions after the past.
            past_key_value: keys and values of earlier tokens, [batch, num_kv_heads, past,
                head_dim] each, the keys rotated: the third result of an earlier call.
            output_attentions: return the softmax weights.
            use_cache: return the K/V of past and new tokens.

        Returns:
            output [batch, tokens, hidden_size]; weights [batch, num_heads, tokens, kv_tokens] or
            None; (keys, values) or None. A query without a visible key attends to nothing: zeros.

        Raises:
            ConfigError: shapes or dtypes disagree, or a position is not below `max_position_embeddings`.
        """
        batch, tokens = self._sizes(hidden_states)
        past = self._past(past_key_value, batch)
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=hidden_states.device)[None]
        q, k, v = self.project(hidden_states, position_ids)
        if past_key_value is not None:
            k = torch.cat((past_key_value[0], k), 2)
            v = torch.cat((past_key_value[1], v), 2)
        visible, bias = self._mask(attention_mask, batch, tokens, past, q.device)
        group = self.num_heads // self.num_kv_heads
        scores = torch.matmul(q, k.repeat_interleave(group, 1).transpose(2, 3))
        scores = scores.float() * self.head_dim**-0.5
        if bias is not None:
            scores = scores + bias
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~visible, 0.0).to(v.dtype)  # softmax of only -inf is NaN
        attended = torch.matmul(weights, v.repeat_interleave(group, 1))
        output = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output, weights if output_attentions else None, (k, v) if use_cache else None

    def project(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values, and apply rotary embedding to queries and keys.

        For use with paged K/V: write k and v to their slots, attend with a backend, and pass its
        output to `o_proj`.

        Args:
            hidden_states, position_ids: as in `forward`.

        Returns:
            q [batch, num_heads, tokens, head_dim], k and v [batch, num_kv_heads, tokens, head_dim].

        Raises:
            ConfigError: as `forward`.
        """
        self._sizes(hidden_states)
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *apply_rotary_pos_emb(q, k, self.cos, self.sin, position_ids), v

    def _sizes(self, hidden_states: Tensor) -> tuple[int, int]:
        """Batch size and tokens."""
        width = self.q_proj.in_features
        if hidden_states.dim() != 3 or hidden_states.shape[2] != width:
            raise ConfigError(
                f"hidden_states {list(hidden_states.shape)} must be [batch, tokens, {width}]"
            )
        return hidden_states.shape[0], hidden_states.shape[1]

    def _past(self, past: KeyValue | None, batch: int) -> int:
        """The number of past tokens."""
        if past is None:
            return 0
        keys, values = past
        length = keys.shape[2] if keys.dim() == 4 else -1
        shape = (batch, self.num_kv_heads, length, self.head_dim)
        if keys.shape != shape or values.shape != shape:
            raise ConfigError(
                f"past keys {list(keys.shape)} and values {list(values.shape)} must be "
                f"[{batch}, {self.num_kv_heads}, past, {self.head_dim}]"
            )
        return length

    def _mask(
        self, mask: Tensor | None, batch: int, tokens: int, past: int, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """The visible keys, and the bias to add to the scores."""
        kv_tokens = past + tokens
        positions = torch.arange(kv_tokens, device=device)
        causal = (positions <= positions[past:, None])[None, None]
        if mask is None:
            return causal, None
        if mask.dim() == 2 and mask.shape == (batch, kv_tokens):
            return causal & (mask != 0)[:, None, None], None
        sizes = ({1, batch}, {1, self.num_heads}, {tokens}, {kv_tokens})
        if mask.dim() != 4 or any(
            size not in allowed for size, allowed in zip(mask.shape, sizes, strict=True)
        ):
            raise ConfigError(
                f"attention_mask {list(mask.shape)} must be [{batch}, {kv_tokens}] or "
                f"[{batch} or 1, {self.num_heads} or 1, {tokens}, {kv_tokens}]; the last counts "
                f"{past} tokens of the past and {tokens} new ones"
            )
        if not mask.is_floating_point():
            return causal & (mask != 0), None
        # many masks use the smallest number of the dtype for -inf
        return causal & (mask > torch.finfo(mask.dtype).min), mask.float()
