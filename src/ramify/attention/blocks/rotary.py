"""Rotary position embedding (Su et al. 2021) over [batch, heads, tokens, head_dim]."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.errors import ConfigError


def rotary_tables(head_dim: int, num_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of every position, [num_positions, head_dim] float32 each.

    Dimensions i and i + head_dim / 2 are rotated by theta ** (-2 i / head_dim) radians per
    position, paired as in Hugging Face's models.

    Raises:
        ConfigError: `head_dim` is odd or not positive.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} but rotary needs an even head_dim of at least 2")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] / theta**exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    """Map the halves (a, b) of the last dimension to (-b, a); same shape and dtype.

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
    """Rotate queries and keys by the angles of their positions; same shapes and dtypes.

    Args:
        q, k: [batch, heads, tokens, head_dim]; they may differ in heads.
        cos, sin: [positions, head_dim].
        position_ids: [batch or 1, tokens] int64 or int32; None: token i has position i. Required if
            there is past K/V.

    Raises:
        ConfigError: shapes or dtypes disagree, or a position is outside the tables (on a GPU, the check
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
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"position_ids are {position_ids.dtype}; they must be int64 or int32")
    if position_ids.numel():
        least, most = (int(bound) for bound in torch.aminmax(position_ids))
        if least < 0 or most >= cos.shape[0]:
            wrong = least if least < 0 else most
            raise ConfigError(
                f"position {wrong} is outside 0..{cos.shape[0] - 1}; send shorter input, or make "
                "tables with more positions (max_position_embeddings)"
            )
    cos, sin = (table[position_ids][:, None].to(q.dtype) for table in (cos, sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
