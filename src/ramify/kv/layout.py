"""`KVLayout`: the K/V planes of a token, their shapes and dtypes, and reads and writes of slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ramify.errors import ConfigError, SlotOutOfRangeError
from ramify.kv.quantize import SCALED_DTYPES, dequantize

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTOR_BYTES = 16  # a vector load on a GPU


@dataclass(frozen=True, slots=True)
class Plane:
    """A tensor per layer that holds `shape` elements of every token in `dtype` (None: the pool's)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The planes that each layer stores of a token, and their memory format.

        nhd          every plane  [pages, page_size, *shape]
        vectorised   k            [pages, heads, dim / x, page_size, x]: x elements of one token
                     v            [pages, heads, page_size / x, dim, x]: x tokens of one element
                     other planes as in nhd
        scales       <name>_scale [pages, page_size, *shape[:-1]] float32, for int8 and float8_e4m3fn

    x is the number of elements in 16 bytes, a vector load.
    """

    num_layers: int
    planes: tuple[Plane, ...]
    format: Literal["nhd", "vectorised"] = "nhd"

    def __post_init__(self) -> None:
        names = [plane.name for plane in self.planes]
        if self.num_layers < 1 or not names or len(set(names)) != len(names):
            raise ConfigError(
                f"num_layers={self.num_layers} with planes {names}: at least one layer and one "
                "plane are needed, and no name twice"
            )
        for plane in self.planes:
            if not plane.shape or min(plane.shape) < 1:
                raise ConfigError(f"plane {plane.name} of shape {plane.shape}: use sizes above 0")
        if self.format not in {"nhd", "vectorised"}:
            raise ConfigError(f"format={self.format!r} does not exist; use 'nhd' or 'vectorised'")
        if self.format == "vectorised" and not {"k", "v"} <= set(names):
            raise ConfigError(
                f"format='vectorised' is for keys and values per head, the planes are {names}; "
                "use format='nhd'"
            )

    @classmethod
    def mha(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None
    ) -> KVLayout:
        """Planes `k` and `v` with heads: multi-head, grouped-query and multi-query attention.

        Args:
            value_dim: width of a value; None: head_dim.
        """
        widths = {"k": head_dim, "v": head_dim if value_dim is None else value_dim}
        return cls(
            num_layers, tuple(Plane(name, (num_kv_heads, width)) for name, width in widths.items())
        )

    @classmethod
    def mla(cls, num_layers: int, latent_dim: int, rope_dim: int) -> KVLayout:
        """Planes `latent` and `rope`: one compressed vector for all heads, and the key's rotary part."""
        return cls(num_layers, (Plane("latent", (latent_dim,)), Plane("rope", (rope_dim,))))

    def with_index_key(self, dim: int) -> KVLayout:
        """This layout with an `index_key` plane, by which sparse attention selects tokens."""
        return replace(self, planes=(*self.planes, Plane("index_key", (dim,))))

    def vectorised(self) -> KVLayout:
        """This layout with `k` and `v` in 16-byte vectors."""
        return replace(self, format="vectorised")

    def stored(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        """The tensors of one layer in a pool of `dtype`: planes with their dtype, and planes of scales.

        Raises:
            ConfigError: a plane's dtype is not supported.
        """
        tensors = []
        for plane in self.planes:
            stored = dtype if plane.dtype is None else plane.dtype
            if stored not in FLOAT_DTYPES and stored not in SCALED_DTYPES:
                known = ", ".join(str(supported) for supported in (*FLOAT_DTYPES, *SCALED_DTYPES))
                raise ConfigError(f"plane {plane.name} cannot be {stored}; use one of {known}")
            tensors.append(replace(plane, dtype=stored))
            if stored in SCALED_DTYPES:
                tensors.append(Plane(f"{plane.name}_scale", plane.shape[:-1], torch.float32))
        return tuple(tensors)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per token over all layers, planes and scales, in a pool of `dtype`."""
        return self.num_layers * sum(
            prod(plane.shape) * plane.dtype.itemsize for plane in self.stored(dtype) if plane.dtype
        )

    def tensor_shape(self, stored: Plane, num_pages: int, page_size: int) -> tuple[int, ...]:
        """The shape of a plane of `stored` with `num_pages` pages.

        Raises:
            ConfigError: `dim` or `page_size` is not a multiple of the vectorised format's x.
        """
        if self.format == "nhd" or stored.name not in {"k", "v"}:
            return (num_pages, page_size, *stored.shape)
        assert stored.dtype is not None
        heads, dim = stored.shape
        x = VECTOR_BYTES // stored.dtype.itemsize
        name, size = ("dim", dim) if stored.name == "k" else ("page_size", page_size)
        if size % x:
            raise ConfigError(
                f"{name}={size} of plane {stored.name} is no multiple of {x}, the elements of "
                f"{stored.dtype} in {VECTOR_BYTES} bytes, which format='vectorised' needs; use "
                f"{name}={-(-size // x) * x} or format='nhd'"
            )
        if stored.name == "k":
            return (num_pages, heads, dim // x, page_size, x)
        return (num_pages, heads, page_size // x, dim, x)


def read_slots(name: str, plane: Tensor, slots: Tensor) -> Tensor:
    """Gather a plane at `slots` [n] int64 into a dense copy [n, *shape] in the plane's dtype.

    Args:
        name: of the plane; `k` and `v` differ in the vectorised format.
        plane: in either format; only the vectorised one has five axes.

    Raises:
        IndexError: a slot is outside the plane, on CPU.
    """
    if plane.dim() < 5:
        return plane.flatten(0, 1).index_select(0, slots)
    rows = plane[_vectorised_index(name, plane, slots)]
    return rows.flatten(2) if name == "k" else rows


def read_plane(planes: Mapping[str, Tensor], name: str, slots: Tensor) -> Tensor:
    """`read_slots` of a layer's plane; if it has scales, dequantised to float32."""
    rows = read_slots(name, planes[name], slots)
    scale = planes.get(f"{name}_scale")
    return rows if scale is None else dequantize(rows, read_slots(f"{name}_scale", scale, slots))


def write_slots(name: str, plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """Scatter `values` [n, *shape], in the plane's dtype, to `slots` [n] int64, in place.

    Raises:
        IndexError: a slot is outside the plane, on CPU.
    """
    if plane.dim() < 5:
        # torch cannot index float8 on CPU; bytes do as well.
        if plane.dtype == torch.float8_e4m3fn:
            plane, values = plane.view(torch.uint8), values.view(torch.uint8)
        plane.flatten(0, 1).index_copy_(0, slots, values)
    else:
        rows = values.unflatten(2, (-1, plane.shape[4])) if name == "k" else values
        plane[_vectorised_index(name, plane, slots)] = rows


def _vectorised_index(name: str, plane: Tensor, slots: Tensor) -> tuple[Tensor | slice, ...]:
    """Index of `slots` in plane `k` or `v` of the vectorised format, range-checked on CPU.

    Tensor indexing would count a negative page from the end. On GPU the check would need a host
    sync; there slot -1 leads to the last page, which is the padding page.
    """
    x = plane.shape[4]
    page_size = plane.shape[3] if name == "k" else plane.shape[2] * x
    num_slots = plane.shape[0] * page_size
    if slots.device.type == "cpu" and len(slots):
        low, high = (int(bound) for bound in torch.aminmax(slots))
        if low < 0 or high >= num_slots:
            raise SlotOutOfRangeError(low, high, num_slots)
    page, offset, whole = slots // page_size, slots % page_size, slice(None)
    if name == "k":
        return page, whole, whole, offset
    return page, whole, offset // x, whole, offset % x
