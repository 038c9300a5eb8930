"""One attention layer in plain torch: what the paged backends compute, without the pages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ramify.attention.blocks.rotary import apply_rotary_pos_emb, rotary_tables
from ramify.errors import ConfigError

KeyValue = tuple[Tensor, Tensor]


class RadixAttentionBlock(nn.Module):
    """Causal self-attention with rotary positions and K/V from before.

    Its four projections have the names and shapes of Hugging Face's Llama attention, so that the
    weights of one load into the other. Computing in parts with `past_key_value` gives what one
    call gives, up to rounding; the same bits are what the engine's backends are for.

    Args:
        hidden_size: width of what comes in and goes out.
        num_heads: of the queries.
        head_dim: width of a head, even.
        max_position_embeddings: positions 0 .. max_position_embeddings - 1 exist.
        rope_theta: base of the rotary angles.
        num_kv_heads: K/V heads, a divisor of `num_heads`; None: as many.

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
        """Attention of each token over those before it and itself.

        Args:
            hidden_states: [batch, tokens, hidden_size].
            attention_mask: on top of causality. [batch, kv_tokens], zero or False where a key is
                padding; or [batch or 1, heads or 1, tokens, kv_tokens], added to the scores if
                float, else zero or False where a key is hidden. `kv_tokens` counts the past too.
            position_ids: [batch or 1, tokens]; None: the positions after the past.
            past_key_value: keys and values of the tokens before, [batch, num_kv_heads, past,
                head_dim] each, the keys rotated: the third result of an earlier call.
            output_attentions: return the weights.
            use_cache: return the K/V of past and new tokens.

        Returns:
            the output [batch, tokens, hidden_size]; the weights [batch, num_heads, tokens,
            kv_tokens] or None; (keys, values) or None. A query that sees no key at all gets zeros.

        Raises:
            ConfigError: shapes disagree, or a position is beyond `max_position_embeddings`.
        """
        batch, tokens = self._sizes(hidden_states)
        past = self._past(past_key_value, batch)
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=hidden_states.device)[None]
        q, k, v = self.project(hidden_states, position_ids)
        if past_key_value is not None:
            k = torch.cat((past_key_value[0], k), 2)
            v = torch.cat((past_key_value[1], v), 2)
        seen, bias = self._mask(attention_mask, batch, tokens, past, q.device)
        group = self.num_heads // self.num_kv_heads
        scores = torch.matmul(q, k.repeat_interleave(group, 1).transpose(2, 3))
        scores = scores.float() * self.head_dim**-0.5
        if bias is not None:
            scores = scores + bias
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~seen, 0.0).to(v.dtype)  # a row of -inf is NaN
        mixed = torch.matmul(weights, v.repeat_interleave(group, 1))
        output = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output, weights if output_attentions else None, (k, v) if use_cache else None

    def project(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two turned by their positions.

        For whoever keeps K/V in pages: write k and v to their slots, attend with a backend, and
        pass its rows to `o_proj`.

        Args:
            hidden_states, position_ids: as in `forward`.

        Returns:
            q [batch, num_heads, tokens, head_dim], k and v [batch, num_kv_heads, tokens, head_dim].

        Raises:
            ConfigError: as `forward`.
        """
        self._sizes(hidden_states)
        q, k, v = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *apply_rotary_pos_emb(q, k, self.cos, self.sin, position_ids), v

    def _sizes(self, hidden_states: Tensor) -> tuple[int, int]:
        width = self.q_proj.in_features
        if hidden_states.dim() != 3 or hidden_states.shape[2] != width:
            raise ConfigError(
                f"hidden_states {list(hidden_states.shape)} must be [batch, tokens, {width}]"
            )
        return hidden_states.shape[0], hidden_states.shape[1]

    def _past(self, past: KeyValue | None, batch: int) -> int:
        """Tokens of the past."""
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
        self, given: Tensor | None, batch: int, tokens: int, past: int, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Which keys each query sees, and what is added to the scores."""
        kv_tokens = past + tokens
        at = torch.arange(kv_tokens, device=device)
        seen = (at <= at[past:, None])[None, None]
        if given is None:
            return seen, None
        if given.dim() == 2 and given.shape == (batch, kv_tokens):
            return seen & (given != 0)[:, None, None], None
        sizes = ({1, batch}, {1, self.num_heads}, {tokens}, {kv_tokens})
        if given.dim() != 4 or any(
            size not in known for size, known in zip(given.shape, sizes, strict=True)
        ):
            raise ConfigError(
                f"attention_mask {list(given.shape)} must be [{batch}, {kv_tokens}] or "
                f"[{batch} or 1, {self.num_heads} or 1, {tokens}, {kv_tokens}]; the last counts "
                f"{past} tokens of the past and {tokens} new ones"
            )
        if not given.is_floating_point():
            return seen & (given != 0), None
        # the least number of the dtype stands for -inf in many masks
        return seen & (given > torch.finfo(given.dtype).min), given.float()
