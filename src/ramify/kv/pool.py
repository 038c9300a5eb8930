"""The tensors that hold K/V, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kv import huge_pages
from ramify.kv.layout import FLOAT_DTYPES, KVLayout, Plane, read_slots, write_slots
from ramify.kv.quantize import SCALED_DTYPES, dequantize, quantize

__all__ = ["KVLayout", "KVPool", "Plane"]


class KVPool:
    """Paged, non-contiguous K/V; one page id addresses every plane of every layer.

    One page more than `num_pages` is allocated: `padding_page`, outside every count, takes the
    writes of padding rows and is never read as content.

    Args:
        layout: planes and layers.
        num_pages, page_size: at least 1 each.
        dtype: of every plane that names none: float32, bfloat16, float16, or int8 and
            float8_e4m3fn with scales (error bounds: `ramify.kv.quantize.quantize`).
        device: of every plane.

    Raises:
        ConfigError: a size or dtype that cannot be stored, or not in this layout.
        MemoryError: on CPU, there is no room for so many pages.
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
            {name: _zeros(shape, kept, self.device) for name, (shape, kept) in shapes.items()}
            for _ in range(layout.num_layers)
        ]
        # one row per slot, where that is how a plane lies: the view costs as much as the checks
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
        """The extra page for padding rows."""
        return self.num_pages

    @property
    def num_bytes(self) -> int:
        """Memory of all planes and scales, the padding page included."""
        return self.layout.token_bytes(self.dtype) * (self.num_pages + 1) * self.page_size

    def planes(self, layer: int) -> dict[str, Tensor]:
        """The planes of one layer by name, scales among them; for shapes see `KVLayout`."""
        return self._planes[layer]

    def write_kv(self, layer: int, slots: Tensor, **values: Tensor) -> None:
        """Scatter the new tokens of one layer into their slots, in place.

        Every token and head is quantised on its own where the plane has scales: its bits depend
        neither on its neighbours nor on where it is written.

        Args:
            slots: [tokens] int64; slot = page * page_size + offset.
            values: one per plane of the layout, [tokens, *shape] in the plane's dtype, or in any
                float dtype for a plane with scales.

        Raises:
            ConfigError: names, shapes, dtypes or devices disagree; nothing was written.
            IndexError: a slot is outside the planes (on CPU; on GPU nobody waits to look). Its
                neighbours may have been written.

        Two equal slots make the result undefined, except in the padding page where nobody
        looks.
        """
        planes = self._planes[layer]
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
        rows = self._flat_planes[layer]
        for name, new in values.items():
            if name in rows:
                rows[name].index_copy_(0, slots, new)
            elif planes[name].dtype in SCALED_DTYPES:
                codes, scale = quantize(new, planes[name].dtype)
                write_slots(name, planes[name], slots, codes)
                write_slots(f"{name}_scale", planes[f"{name}_scale"], slots, scale)
            else:
                write_slots(name, planes[name], slots, new)

    def gather_kv(
        self, layer: int, slots: Tensor, out: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Dense copies of one layer's planes at any slots, in any order, equal ones included.

        Args:
            slots: [tokens] int64.
            out: where to put them: one tensor per plane of the layout, [tokens, *shape] in any
                float dtype. Without it new ones are made, in the plane's dtype, or in float32
                where it has scales.

        Returns:
            [tokens, *shape] by name: `out`, if given. Scales are multiplied in.

        Raises:
            ConfigError: `slots` or `out` do not fit; nothing was written.
            IndexError: a slot is outside the planes (on CPU).
        """
        self._check_slots(slots)
        if out is not None:
            self._check_out(len(slots), out)
        found = {}
        planes = self._planes[layer]
        for name in self._shapes:
            dense = read_slots(name, planes[name], slots)
            if planes[name].dtype in SCALED_DTYPES:
                scale = f"{name}_scale"
                dense = dequantize(dense, read_slots(scale, planes[scale], slots))
            found[name] = dense if out is None else out[name].copy_(dense)
        return found

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages in every plane of every layer, as if all were read before any is written.

        Raises:
            ConfigError: the lists differ in length, a page is outside the pool, or a target is
                named twice; nothing was copied.
        """
        if len(source) != len(target):
            raise ConfigError(f"{len(source)} source pages, {len(target)} target pages")
        if len(set(target)) != len(target):
            raise ConfigError(f"a target page is named twice in {list(target)}")
        take, put = self._page_index(source), self._page_index(target)
        for planes in self._planes:
            for plane in map(_as_indexable, planes.values()):
                plane.index_copy_(0, put, plane.index_select(0, take))

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Erase pages whose content must never be seen again, after a failed step.

        Raises:
            ConfigError: a page is outside the pool; nothing was erased.
        """
        index = self._page_index(pages)
        for planes in self._planes:
            for plane in map(_as_indexable, planes.values()):
                plane.index_fill_(0, index, 0)

    def _page_index(self, pages: Sequence[int]) -> Tensor:
        listed = list(pages)
        if listed and not 0 <= min(listed) <= max(listed) <= self.padding_page:
            raise ConfigError(
                f"pages {min(listed)} to {max(listed)} are not all in 0..{self.padding_page}"
            )
        return torch.as_tensor(listed, dtype=torch.int64, device=self.device)

    def _check_slots(self, slots: Tensor) -> None:
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise ConfigError(
                f"slots are {slots.dtype} of shape {tuple(slots.shape)}; give [tokens] int64"
            )

    def _check_out(self, num_tokens: int, out: Mapping[str, Tensor]) -> None:
        if out.keys() != self._shapes.keys():
            raise ConfigError(f"out has {sorted(out)}, planes are {sorted(self._shapes)}")
        for name, each in out.items():
            shape = (num_tokens, *self._shapes[name])
            if each.shape != shape or not each.dtype.is_floating_point:
                raise ConfigError(
                    f"out[{name!r}] is {each.dtype} {tuple(each.shape)}; it must be a float "
                    f"tensor of shape {shape}"
                )


def _as_indexable(plane: Tensor) -> Tensor:
    """The plane, as bytes where torch cannot index its dtype on CPU."""
    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane


def _zeros(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Of memory that is there already: it must not be missed in the middle of a step."""
    if device.type == "cpu" and dtype is not None:
        return huge_pages.zeros(shape, dtype).zero_()
    return torch.zeros(*shape, dtype=dtype, device=device)
