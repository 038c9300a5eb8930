"""Validate what a backend's `run` gets: query rows, planes, selected positions, sinks."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not

import torch
from torch import Tensor

from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError
from ramify.kv.layout import FLOAT_DTYPES, KVLayout, Plane


class RunInputs:
    """Validates the arguments of one backend's `run`; the planes of a layer only when they change."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._valid_planes: dict[int, tuple[Tensor, ...]] = {}

    def validate(
        self,
        num_tokens: int,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        selected: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Raise ConfigError unless `run` can compute with these arguments.

        Args:
            num_tokens: of the plan.
        """
        validate_rows(num_tokens, layer, q, selected, self._spec)
        validate_sinks(sinks, self._spec)
        tensors = tuple(planes.values())
        valid = self._valid_planes.get(layer)
        if valid is None or len(valid) != len(tensors) or any(map(is_not, valid, tensors)):
            validate_planes(planes, self._spec)
            self._valid_planes[layer] = tensors
        if tensors[0].device != q.device:
            raise ConfigError(f"q is on {q.device}, the planes are on {tensors[0].device}")


def validate_rows(
    num_tokens: int, layer: int, q: Tensor, selected: Tensor | None, spec: AttentionSpec
) -> None:
    """Raise ConfigError unless there is such a layer, and queries and selected positions fit the plan."""
    if not 0 <= layer < len(spec.windows):
        raise ConfigError(f"layer={layer} but layers are 0..{len(spec.windows) - 1}")
    heads = spec.num_heads, spec.head_dim
    if q.dim() != 3 or q.shape[0] < num_tokens or q.shape[1:] != heads:
        raise ConfigError(
            f"q has shape {tuple(q.shape)}; it must be {(num_tokens, *heads)}, with or "
            "without more rows of padding"
        )
    if not q.dtype.is_floating_point:
        raise ConfigError(f"q is {q.dtype}; it must be a float tensor")
    if selected is None:
        return
    if not spec.sparse:
        raise ConfigError("selected is given but the spec has sparse=False; leave it out")
    if selected.dim() != 2 or selected.shape[0] < num_tokens or selected.dtype != torch.int32:
        raise ConfigError(
            f"selected is {selected.dtype} {tuple(selected.shape)}; it must be int32 "
            f"[{num_tokens}, n], with or without more rows of padding"
        )


def validate_sinks(sinks: Tensor | None, spec: AttentionSpec) -> None:
    """Raise ConfigError unless they are what the spec announces; kernels read them by address."""
    if sinks is None and not spec.sinks:
        return
    expected = f"float32 [{spec.num_heads}], contiguous" if spec.sinks else "None"
    if sinks is None:
        raise ConfigError(f"sinks are None; they must be {expected}")
    is_row = sinks.shape == (spec.num_heads,) and sinks.is_contiguous()
    if not spec.sinks or not is_row or sinks.dtype != torch.float32:
        raise ConfigError(
            f"sinks are {sinks.dtype} {tuple(sinks.shape)} with strides {sinks.stride()}; they "
            f"must be {expected}"
        )


def validate_planes(planes: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """Check the planes of a layer, since kernels read them by address and check nothing.

    Raises:
        ConfigError: a plane is missing, or has a wrong shape, dtype or memory order.
    """
    heads = spec.num_kv_heads
    if spec.kind == "mla":
        layout = KVLayout.mla(1, spec.v_head_dim, spec.head_dim - spec.v_head_dim)
    else:
        layout = KVLayout.mha(1, heads, spec.head_dim, spec.v_head_dim)
    if spec.layout == "vectorised":
        layout = layout.vectorised()
    for plane in layout.planes:
        _validate_plane(plane, planes, layout, spec.page_size)


def _validate_plane(
    expected: Plane, planes: Mapping[str, Tensor], layout: KVLayout, page_size: int
) -> None:
    """Check a plane, and its scales if it needs or has them."""
    name, scale_name = expected.name, f"{expected.name}_scale"
    plane, scale = planes.get(name), planes.get(scale_name)
    if plane is None:
        raise ConfigError(f"plane {name} is missing; there are {', '.join(planes) or 'none'}")
    if plane.dtype not in FLOAT_DTYPES and plane.dtype.itemsize > 1:
        raise ConfigError(
            f"plane {name} is {plane.dtype}; it must be one of "
            f"{', '.join(map(str, FLOAT_DTYPES))}, or 8 bits wide with scales"
        )
    shape = layout.tensor_shape(Plane(name, expected.shape, plane.dtype), 1, page_size)
    _validate_shape(name, plane, shape[1:])
    if scale is None:
        if plane.dtype.itemsize == 1:
            raise ConfigError(f"plane {name} is {plane.dtype} but there is no plane {scale_name}")
        return
    _validate_shape(scale_name, scale, (page_size, *expected.shape[:-1]))
    if scale.dtype != torch.float32:
        raise ConfigError(f"plane {scale_name} is {scale.dtype}; it must be float32")


def _validate_shape(name: str, plane: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(plane.shape[1:]) != shape or not plane.is_contiguous():
        raise ConfigError(
            f"plane {name} is {plane.dtype} {tuple(plane.shape)} with strides {plane.stride()}; it "
            f"must be contiguous, [pages, {', '.join(map(str, shape))}]"
        )
