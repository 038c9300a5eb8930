"""Gather a request's K/V from pages: slots, dense float32 K and V, causal and window masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.kv.layout import read_slots
from ramify.kv.quantize import dequantize


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """Query rows [start, stop) of a request, the slots of its keys, and both positions."""

    start: int
    stop: int
    slots: Tensor  # [kv_len] int64
    query_positions: Tensor  # [q_len] int64
    key_positions: Tensor  # [kv_len] int64


def request_slices(batch: AttentionBatch, device: torch.device) -> list[RequestSlice]:
    """Split a batch into requests, each with its slots and positions on `device`."""
    positions = torch.as_tensor(batch.positions.astype("int64"), device=device)
    slices = []
    for seq in range(batch.num_seqs):
        start, stop = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
        slots = torch.from_numpy(batch.kv_slots(seq)).to(device)
        keys = torch.arange(len(slots), device=device)
        slices.append(RequestSlice(start, stop, slots, positions[start:stop], keys))
    return slices


def attention_mask(
    request: RequestSlice, window: int | None, selected: Tensor | None = None
) -> Tensor:
    """True where a query sees a key: [q_len, kv_len] bool, causal, of the last `window` tokens.

    `selected` [tokens of the batch, n] restricts each query to the positions in its row.
    """
    distance = request.query_positions[:, None] - request.key_positions[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if selected is not None:
        keys = selected[request.start : request.stop].long()
        num_keys = len(request.key_positions)
        # the extra column takes the padding (-1) and is cut off
        is_selected = visible.new_zeros(len(keys), num_keys + 1)
        is_selected.scatter_(1, keys.masked_fill((keys < 0) | (keys >= num_keys), num_keys), True)
        visible &= is_selected[:, :num_keys]
    return visible


def gather_kv_f32(planes: Mapping[str, Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
    """Gather K/V of `slots` [n] int64 as float32 [n, heads, key_dim] and [n, heads, value_dim].

    Planes may have either layout of `KVLayout` and any dtype of a `KVPool`. Planes `latent` and
    `rope` make one head with key `[latent, rope]` and value `latent`.
    """
    if "latent" in planes:
        latent = gather_plane_f32(planes, "latent", slots)[:, None]
        return torch.cat((latent, gather_plane_f32(planes, "rope", slots)[:, None]), -1), latent
    return gather_plane_f32(planes, "k", slots), gather_plane_f32(planes, "v", slots)


def gather_plane_f32(planes: Mapping[str, Tensor], name: str, slots: Tensor) -> Tensor:
    """Gather a plane's rows [n, *shape] as float32, times their scale if the plane has one."""
    rows = read_slots(name, planes[name], slots)
    scale = planes.get(f"{name}_scale")
    if scale is None:
        return rows.float()
    return dequantize(rows, read_slots(f"{name}_scale", scale, slots))
