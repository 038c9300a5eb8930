"""Reorder a checkpoint's tensors into the layout that the operations expect."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.models.config import ModelConfig


def reorder_weights(weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Change loaded weights of a dense model in place: rotary pairs, stacked norms of heads.

    Operations rotate dimension i of a head with i + head_dim / 2, over whole heads. A family that
    rotates neighbours, or the first dimensions only, gets there by another order of the rows of its
    q and k projections: first elements of the rotary pairs, half of the other dimensions, second
    elements, the other half. Scores are dot products of q and k, which a common order leaves alone.
    """
    variant = config.variant
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        if variant.qk_norm is not None and variant.qk_norm_per_head == "list":
            for name in (variant.names.q_norm, variant.names.k_norm):
                _stack_norms(weights, prefix + name)
        order = rotary_order(
            config.head_dim, config.rope_of(layer).rotary_dim, variant.rope_interleaved
        )
        if order is not None and layer not in variant.layers_without_rope:
            _reorder_layer(weights, config, prefix, order)


def rotary_order(head_dim: int, rotary_dim: int | None, interleaved: bool) -> Tensor | None:
    """The dimension of a head that comes to each place [head_dim]; None if all stay."""
    dim = rotary_dim or head_dim
    if dim == head_dim and not interleaved:
        return None
    rotated, rest = torch.arange(dim), torch.arange(dim, head_dim)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else rotated.chunk(2)
    middle = len(rest) // 2
    return torch.cat((first, rest[:middle], second, rest[middle:]))


def _reorder_layer(
    weights: dict[str, Tensor], config: ModelConfig, prefix: str, order: Tensor
) -> None:
    variant, head_dim = config.variant, config.head_dim
    names = [prefix + name for name in variant.names.qkv]
    num_rotated = config.num_heads + config.num_kv_heads
    if len(names) == 1:
        heads = {names[0]: num_rotated}
    else:
        heads = {names[0]: config.num_heads, names[1]: config.num_kv_heads}
    for name, num_heads in heads.items():
        rows = (torch.arange(num_heads)[:, None] * head_dim + order).flatten()
        for tensor in (f"{name}.weight", f"{name}.bias"):
            if tensor in weights:
                whole = weights[tensor]
                rest = torch.arange(len(rows), len(whole))
                weights[tensor] = whole[torch.cat((rows, rest))]
    if variant.qk_norm == "width":
        raise AssertionError("no family has both")
    for name in (variant.names.q_norm, variant.names.k_norm):
        tensor = f"{prefix}{name}.weight"
        if variant.qk_norm is not None and tensor in weights:
            weights[tensor] = weights[tensor][..., order]


def _stack_norms(weights: dict[str, Tensor], name: str) -> None:
    """Make `name.norms.0.weight`, `name.norms.1.weight`, … [head_dim] rows of `name.weight`."""
    rows: list[Tensor] = []
    while f"{name}.norms.{len(rows)}.weight" in weights:
        rows.append(weights.pop(f"{name}.norms.{len(rows)}.weight"))
    weights[f"{name}.weight"] = torch.stack(rows)
