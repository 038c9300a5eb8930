"""`KVPool`: the paged K/V tensors of all layers; write, gather, copy, erase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kv import huge_pages
from ramify.kv.layout import FLOAT_DTYPES, KVLayout, Plane, read_plane, write_slots
from ramify.kv.quantize import SCALED_DTYPES, quantize

__all__ = ["KVLayout", "KVPool", "Plane"]


class KVPool:
    """Paged K/V tensors: a page id addresses the same page in every plane of every layer.

    Allocates one page more than `num_pages`, `padding_page`: padding rows write to it, and it stands
    in rows of block tables for pages before a window. No query sees its keys.

    Args:
        layout: planes and number of layers.
        num_pages, page_size: at least 1 each.
        dtype: of every plane without its own dtype: float32, bfloat16, float16, or int8 and
            float8_e4m3fn with scales (error bounds: `ramify.kv.quantize.quantize`).
        device: of every plane.

    Raises:
        ConfigError: a size below 1, or a dtype or size that the layout cannot store.
        MemoryError: on CPU, the pages do not fit in memory.
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
        self._shapes = {plane.name: plane.shape for plane in layout.planes}
        shapes = {
            plane.name: (layout.tensor_shape(plane, num_pages + 1, page_size), plane.dtype)
            for plane in layout.stored(dtype)
        }
        self._planes = [
            {name: _zeros(shape, stored, self.device) for name, (shape, stored) in shapes.items()}
            for _ in range(layout.num_layers)
        ]
        # Views as bytes: a copy of a page through them takes a third of the time of torch's indexing.
        self._byte_views: list[NDArray[np.uint8]] = [
            plane.view(torch.uint8).numpy()
            for planes in self._planes
            for plane in planes.values()
            if self.device.type == "cpu"
        ]
        # Views with one row per slot, of float planes in nhd: making one costs as much as the checks.
        self._flat_planes = [
            {
                name: plane.flatten(0, 1)
                for name, plane in planes.items()
                if layout.format == "nhd" and plane.dtype in FLOAT_DTYPES
            }
            for planes in self._planes
        ]

    @property
    def padding_page(self) -> int:
        """Id of the extra page, whose keys no query sees."""
        return self.num_pages

    def planes(self, layer: int) -> dict[str, Tensor]:
        """The planes and scales of one layer by name; for shapes see `KVLayout`.

        Raises:
            ConfigError: there is no such layer.
        """
        if not 0 <= layer < len(self._planes):
            raise ConfigError(f"layer={layer} but layers are 0..{len(self._planes) - 1}")
        return self._planes[layer]

    def write_kv(self, layer: int, slots: Tensor, **values: Tensor) -> None:
        """Scatter K/V of new tokens into their slots of one layer, in place.

        Planes with scales are quantised per token and head, so the stored bits do not depend on
        other tokens.

        Args:
            slots: [tokens] int64; slot = page * page_size + offset.
            values: one tensor per plane of the layout, [tokens, *shape] in the plane's dtype, or in
                any float dtype for a plane with scales.

        Raises:
            ConfigError: there is no such layer, or names, shapes, dtypes or devices disagree;
                nothing was written.
            IndexError: a slot is outside the planes (checked on CPU only: on GPU it would need a host
                sync). Other slots may have been written.

        Two equal slots make the result undefined, except in the padding page, whose keys no query sees.
        """
        planes = self.planes(layer)
        if values.keys() != self._shapes.keys():
            raise ConfigError(
                f"values for {sorted(values)} given, planes are {sorted(self._shapes)}"
            )
        self._check_slots(slots)
        num_tokens = slots.shape[0]
        for name, new in values.items():
            plane, shape = planes[name], (num_tokens, *self._shapes[name])
            scaled = plane.dtype in SCALED_DTYPES
            fits = new.dtype in FLOAT_DTYPES if scaled else new.dtype == plane.dtype
            if new.shape != shape or not fits or new.device != plane.device:
                raise ConfigError(
                    f"{name} is {new.dtype} {tuple(new.shape)} on {new.device}; for {num_tokens} "
                    f"slots of a {plane.dtype} plane on {plane.device} it must have shape {shape}"
                )
        flat_planes = self._flat_planes[layer]
        for name, new in values.items():
            if name in flat_planes:
                flat_planes[name].index_copy_(0, slots, new)
            elif planes[name].dtype in SCALED_DTYPES:
                codes, scale = quantize(new, planes[name].dtype)
                write_slots(name, planes[name], slots, codes)
                write_slots(f"{name}_scale", planes[f"{name}_scale"], slots, scale)
            else:
                write_slots(name, planes[name], slots, new)

    def gather_kv(
        self, layer: int, slots: Tensor, out: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Gather one layer's planes at `slots` into dense tensors, dequantised.

        Args:
            slots: [tokens] int64, in any order; slots may repeat.
            out: one tensor per plane of the layout to write to, [tokens, *shape] in any float dtype.
                None allocates them in the plane's dtype, or float32 if it has scales.

        Returns:
            [tokens, *shape] by name: the tensors of `out`, if given.

        Raises:
            ConfigError: there is no such layer, or shapes or dtypes of `slots` or `out` are wrong;
                nothing was written.
            IndexError: a slot is outside the planes (on CPU).
        """
        planes = self.planes(layer)
        self._check_slots(slots)
        if out is not None:
            self._check_out(len(slots), out)
        gathered = {}
        for name in self._shapes:
            dense = read_plane(planes, name, slots)
            gathered[name] = dense if out is None else out[name].copy_(dense)
        return gathered

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy page source[i] to target[i] in every plane of every layer; all reads come before writes.

        Raises:
            ConfigError: the lists differ in length, a page is outside the pool, or a target page
                occurs twice; nothing was copied.
        """
        if len(source) != len(target):
            raise ConfigError(f"{len(source)} source pages, {len(target)} target pages")
        if len(set(target)) != len(target):
            raise ConfigError(f"a target page is named twice in {list(target)}")
        source_index, target_index = self._page_index(source), self._page_index(target)
        if self._byte_views and not set(source) & set(target):
            for view in self._byte_views:
                for begin, end in zip(source, target, strict=True):
                    view[end] = view[begin]
            return
        for planes in self._planes:
            for plane in map(_as_indexable, planes.values()):
                plane.index_copy_(0, target_index, plane.index_select(0, source_index))

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros in every plane of every layer: those that a failed step wrote.

        Raises:
            ConfigError: a page is outside the pool; nothing was erased.
        """
        index = self._page_index(pages)
        for planes in self._planes:
            for plane in map(_as_indexable, planes.values()):
                plane.index_fill_(0, index, 0)

    def _page_index(self, pages: Sequence[int]) -> Tensor:
        page_ids = list(pages)
        if page_ids and not 0 <= min(page_ids) <= max(page_ids) <= self.padding_page:
            raise ConfigError(
                f"pages {min(page_ids)} to {max(page_ids)} are not all in 0..{self.padding_page}"
            )
        index = torch.tensor(page_ids, dtype=torch.int64)
        if (
            self.device.type == "cuda"
        ):  # pageable memory would be copied when the device comes to it
            index = index.pin_memory()
        return index.to(self.device, non_blocking=True)

    def _check_slots(self, slots: Tensor) -> None:
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise ConfigError(
                f"slots are {slots.dtype} of shape {tuple(slots.shape)}; give [tokens] int64"
            )

    def _check_out(self, num_tokens: int, out: Mapping[str, Tensor]) -> None:
        if out.keys() != self._shapes.keys():
            raise ConfigError(f"out has {sorted(out)}, planes are {sorted(self._shapes)}")
        for name, dense in out.items():
            shape = (num_tokens, *self._shapes[name])
            if dense.shape != shape or not dense.dtype.is_floating_point:
                raise ConfigError(
                    f"out[{name!r}] is {dense.dtype} {tuple(dense.shape)}; it must be a float "
                    f"tensor of shape {shape}"
                )


def _as_indexable(plane: Tensor) -> Tensor:
    """The plane itself, or viewed as bytes: torch cannot index float8 on CPU."""
    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane


def _zeros(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Zeros; on CPU a page of memory becomes resident when a step first writes to it."""
    if device.type == "cpu" and dtype is not None:
        return huge_pages.small_page_zeros(shape, dtype)
    return torch.zeros(*shape, dtype=dtype, device=device)
