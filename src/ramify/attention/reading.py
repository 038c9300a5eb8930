"""Planes to dense keys and values: what every backend that gathers has in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ramify.kv.layout import read_slots
from ramify.kv.quantise import dequantise


def keys_and_values(planes: Mapping[str, Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
    """K/V of `slots` [n] int64 in float32: keys [n, heads, key_dim], values [n, heads, value_dim].

    Planes may be in either layout of `KVLayout` and in any dtype of a `KVPool`. With `latent` and
    `rope` planes there is one head: its key is both, its value the latent.
    """
    if "latent" in planes:
        latent = read_plane(planes, "latent", slots)
        return torch.cat((latent, read_plane(planes, "rope", slots)), -1)[:, None], latent[:, None]
    return read_plane(planes, "k", slots), read_plane(planes, "v", slots)


def read_plane(planes: Mapping[str, Tensor], name: str, slots: Tensor) -> Tensor:
    """[n, *shape] float32, times its scale where the plane has one."""
    found = read_slots(name, planes[name], slots)
    scale = planes.get(f"{name}_scale")
    if scale is None:
        return found.float()
    return dequantise(found, read_slots(f"{name}_scale", scale, slots))
