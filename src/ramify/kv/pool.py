"""The tensors that hold K/V, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ramify.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plane:
    """One named tensor per layer, `[num_pages + 1, page_size, *shape]`."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a token leaves behind in every layer."""

    num_layers: int
    planes: tuple[Plane, ...]

    @classmethod
    def mha(cls, num_layers: int, num_kv_heads: int, head_dim: int) -> KVLayout:
        """Keys and values per head: multi-head, grouped-query and multi-query attention."""
        shape = (num_kv_heads, head_dim)
        return cls(num_layers, (Plane("k", shape), Plane("v", shape)))

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token over all layers and planes."""
        return self.num_layers * sum(prod(plane.shape) for plane in self.planes) * dtype.itemsize


class KVPool:
    """Paged, non-contiguous K/V; one page id addresses every plane of every layer.

    One page more than `num_pages` is allocated: `padding_page`, outside every count, takes the
    writes of padding rows and is never read as content.

    Args:
        layout: planes and layers.
        num_pages, page_size: at least 1 each.
        dtype, device: of every plane.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"num_pages={num_pages} and page_size={page_size} must be at least 1")
        self.layout, self.num_pages, self.page_size = layout, num_pages, page_size
        self.dtype, self.device = dtype, torch.device(device)
        self._planes = [
            {
                plane.name: torch.zeros(
                    (num_pages + 1, page_size, *plane.shape), dtype=dtype, device=device
                )
                for plane in layout.planes
            }
            for _ in range(layout.num_layers)
        ]

    @property
    def padding_page(self) -> int:
        """The extra page for padding rows."""
        return self.num_pages

    @property
    def num_bytes(self) -> int:
        """Memory of all planes, the padding page included."""
        return self.layout.token_bytes(self.dtype) * (self.num_pages + 1) * self.page_size

    def planes(self, layer: int) -> dict[str, Tensor]:
        """The planes of one layer by name, `[num_pages + 1, page_size, *shape]` each."""
        return self._planes[layer]

    def write_kv(self, layer: int, slots: Tensor, **values: Tensor) -> None:
        """Scatter the new tokens of one layer into their slots, in place.

        Args:
            slots: [tokens] int64; slot = page * page_size + offset.
            values: one per plane of the layout, [tokens, *shape] in the pool's dtype.

        Two equal slots make the result undefined, except in the padding page where nobody
        looks.
        """
        planes = self._planes[layer]
        if values.keys() != planes.keys():
            raise ConfigError(f"values for {sorted(values)} given, planes are {sorted(planes)}")
        for name, new in values.items():
            planes[name].flatten(0, 1).index_copy_(0, slots, new)

    def gather_kv(self, layer: int, slots: Tensor) -> dict[str, Tensor]:
        """Dense copies of one layer's planes at `slots` [tokens] int64: [tokens, *shape] each."""
        return {
            name: plane.flatten(0, 1).index_select(0, slots)
            for name, plane in self._planes[layer].items()
        }

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages in every plane of every layer."""
        if len(source) != len(target):
            raise ConfigError(f"{len(source)} source pages, {len(target)} target pages")
        take = torch.as_tensor(list(source), dtype=torch.int64, device=self.device)
        put = torch.as_tensor(list(target), dtype=torch.int64, device=self.device)
        for planes in self._planes:
            for plane in planes.values():
                plane.index_copy_(0, put, plane.index_select(0, take))

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Erase pages whose content must never be seen again, after a failed step."""
        index = torch.as_tensor(list(pages), dtype=torch.int64, device=self.device)
        for planes in self._planes:
            for plane in planes.values():
                plane.index_fill_(0, index, 0)
