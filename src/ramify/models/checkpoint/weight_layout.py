"""Reorder rows of a checkpoint's tensors, as they are read, to the layout that the operations expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ramify.models.configs.model_config import ModelConfig
from ramify.models.ops.quantized import QuantizedWeight, Weight, as_tensor
from ramify.models.ops.weight_part import WeightPart, cut, read_part


class OrderedWeights(Mapping[str, Weight]):
    """A checkpoint of a dense model with rotary pairs and norms of heads where operations expect them.

    Operations rotate dimension i of a head with i + head_dim / 2, over whole heads. A family that
    rotates neighbours, or the first dimensions only, gets there by another order of the rows of its
    q and k projections: first elements of the rotary pairs, half of the other dimensions, second
    elements, the other half. Scores are dot products of q and k, which a common order leaves alone.
    """

    def __init__(self, weights: Mapping[str, Weight], config: ModelConfig) -> None:
        self._weights = weights
        self._made: dict[str, Callable[[], Weight]] = {}
        for layer in range(config.num_layers):
            self._order_layer(config, layer)

    def __len__(self) -> int:
        return len(self._weights.keys() | self._made.keys())

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from (name for name in self._made if name not in self._weights)

    def __getitem__(self, name: str) -> Weight:
        made = self._made.get(name)
        return self._weights[name] if made is None else made()

    def read_part(self, name: str, part: WeightPart) -> Weight:
        """See `PartlyReadable`; reads the whole of a tensor whose rows are reordered."""
        made = self._made.get(name)
        return read_part(self._weights, name, part) if made is None else cut(made(), part)

    def _order_layer(self, config: ModelConfig, layer: int) -> None:
        variant, prefix = config.variant, f"model.layers.{layer}."
        norms = [prefix + name for name in (variant.names.q_norm, variant.names.k_norm)]
        if variant.qk_norm is not None and variant.qk_norm_per_head == "list":
            counts = config.num_heads, config.num_kv_heads
            for name, count in zip(norms, counts, strict=True):
                rows = [f"{name}.norms.{head}.weight" for head in range(count)]
                self._add(f"{name}.weight", self._stacked(rows))
        dim = config.rope_of(layer).rotary_dim
        order = rotary_order(config.head_dim, dim, interleaved=variant.rope_interleaved)
        if order is None or layer in variant.layers_without_rope:
            return
        for name, num_heads in _rotated_rows(config, prefix).items():
            rotated = (torch.arange(num_heads)[:, None] * config.head_dim + order).flatten()
            for tensor in (f"{name}.weight", f"{name}.bias"):
                self._add(tensor, self._with_rows(tensor, rotated))
        if variant.qk_norm is not None:
            for name in norms:
                self._add(f"{name}.weight", self._with_columns(f"{name}.weight", order))

    def _add(self, name: str, make: Callable[[], Weight] | None) -> None:
        if make is not None:
            self._made[name] = make

    def _source(self, name: str) -> Callable[[], Weight] | None:
        """What makes a tensor so far; None if there is none of that name."""
        made = self._made.get(name)
        if made is None and name in self._weights:
            return lambda: self._weights[name]
        return made

    def _stacked(self, names: list[str]) -> Callable[[], Weight]:
        return lambda: torch.stack([as_tensor(self._weights[name]) for name in names])

    def _with_rows(self, name: str, rows: Tensor) -> Callable[[], Weight] | None:
        source = self._source(name)
        if source is None:
            return None

        def make() -> Weight:
            whole = source()
            index = torch.cat((rows, torch.arange(len(rows), len(whole))))
            return whole.rows(index) if isinstance(whole, QuantizedWeight) else whole[index]

        return make

    def _with_columns(self, name: str, columns: Tensor) -> Callable[[], Weight] | None:
        source = self._source(name)
        return None if source is None else lambda: as_tensor(source())[..., columns]


def rotary_order(head_dim: int, rotary_dim: int | None, *, interleaved: bool) -> Tensor | None:
    """Permutation [head_dim] of a head's dimensions, for indexing; None if it is the identity."""
    dim = rotary_dim or head_dim
    if dim == head_dim and not interleaved:
        return None
    rotated, rest = torch.arange(dim), torch.arange(dim, head_dim)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else rotated.chunk(2)
    middle = len(rest) // 2
    return torch.cat((first, rest[:middle], second, rest[middle:]))


def _rotated_rows(config: ModelConfig, prefix: str) -> dict[str, int]:
    """Names of the linears with rotated heads, which come first, and how many heads are rotated."""
    names = [prefix + name for name in config.variant.names.qkv]
    if len(names) == 1:
        return {names[0]: config.num_heads + config.num_kv_heads}
    return {names[0]: config.num_heads, names[1]: config.num_kv_heads}
