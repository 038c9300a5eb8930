"""Planes to dense keys and values: what every backend that gathers has in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ramify.kv.layout import read_slots
from ramify.kv.quantize import dequantize


def gather_kv_f32(planes: Mapping[str, Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
    """K/V of `slots` [n] int64 in float32: keys [n, heads, key_dim], values [n, heads, value_dim].

    Planes may be in either layout of `KVLayout` and in any dtype of a `KVPool`. With `latent` and
    `rope` planes there is one head: its key is both, its value the latent.
    """
    if "latent" in planes:
        latent = gather_plane_f32(planes, "latent", slots)
        return torch.cat((latent, gather_plane_f32(planes, "rope", slots)), -1)[:, None], latent[
            :, None
        ]
    return gather_plane_f32(planes, "k", slots), gather_plane_f32(planes, "v", slots)


def gather_plane_f32(planes: Mapping[str, Tensor], name: str, slots: Tensor) -> Tensor:
    """[n, *shape] float32, times its scale where the plane has one."""
    found = read_slots(name, planes[name], slots)
    scale = planes.get(f"{name}_scale")
    if scale is None:
        return found.float()
    return dequantize(found, read_slots(f"{name}_scale", scale, slots))
