"""Rotary position embedding over [batch, heads, tokens, head_dim], halves rotated."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.errors import ConfigError


def rotary_tables(head_dim: int, num_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, [num_positions, head_dim] float32 each.

    The pair of dimensions i and i + head_dim / 2 turns by theta ** (-2 i / head_dim) radians per
    position (Su et al. 2021, with the halves paired as Hugging Face's models do).

    Raises:
        ConfigError: `head_dim` is odd or not positive.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} but rotary needs an even one, 2 or more")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] / theta**exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    """The halves (a, b) of the last dimension as (-b, a); the same shape and dtype.

    Raises:
        ConfigError: the last dimension is odd.
    """
    if x.shape[-1] % 2:
        raise ConfigError(f"the last dimension is {x.shape[-1]} but must be even to have halves")
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by the angles of their positions; shapes and dtypes stay.

    Args:
        q, k: [batch, heads, tokens, head_dim]; they may differ in heads.
        cos, sin: [positions, head_dim], one row per position.
        position_ids: [batch or 1, tokens] integers, the row of each token; None: token i sits at
            position i. With K/V from before, say where the new tokens are.

    Raises:
        ConfigError: shapes disagree, or a position is outside the tables (on a GPU, the check
            waits for the device).
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ConfigError(
            f"q {list(q.shape)} and k {list(k.shape)} must be [batch, heads, tokens, head_dim] and "
            "differ in heads only"
        )
    batch, _, tokens, head_dim = q.shape
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] != head_dim:
        raise ConfigError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must both be [positions, {head_dim}]"
        )
    if position_ids is None:
        position_ids = torch.arange(tokens, device=cos.device)[None]
    if position_ids.dim() != 2 or list(position_ids.shape) not in ([batch, tokens], [1, tokens]):
        raise ConfigError(
            f"position_ids {list(position_ids.shape)} must be [{batch} or 1, {tokens}]"
        )
    if position_ids.numel():
        least, most = (int(end) for end in torch.aminmax(position_ids))
        if least < 0 or most >= cos.shape[0]:
            wrong = least if least < 0 else most
            raise ConfigError(
                f"position {wrong} is outside 0..{cos.shape[0] - 1}; send shorter input, or make "
                "tables with more positions (max_position_embeddings)"
            )
    cos, sin = (table[position_ids][:, None].to(q.dtype) for table in (cos, sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
